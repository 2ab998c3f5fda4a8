"""Builds what a release publishes, in this environment: the sdist; from that the wheel, repaired for other Linuxes.

`make wheels` runs it. [tool.cibuildwheel] in pyproject.toml says how to build: cibuildwheel does it in containers of an
old Linux, this with the compiler and the glibc that are here, and what these permit is what the wheel is tagged with.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
BEYOND_ABI3 = {"PyObject_GetBuffer", "PyBuffer_Release"}  # csrc/python.h says why 3.10 has them nevertheless


def settings() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["cibuildwheel"]


def run(*command: str | Path, **options) -> subprocess.CompletedProcess[str]:
    print("+", *command, flush=True)
    return subprocess.run([str(word) for word in command], check=True, text=True, **options)


def sdist(out: Path) -> Path:
    """Of the files that git knows, as they are now, in a folder without what earlier builds left"""
    with tempfile.TemporaryDirectory() as folder:
        listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True)
        for name in filter(None, listed.stdout.split("\0")):
            if (ROOT / name).exists():
                target = Path(folder, name)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / name, target)
        code = f"from setuptools import build_meta; print(build_meta.build_sdist({str(out.resolve())!r}))"
        done = run(sys.executable, "-c", code, cwd=folder, capture_output=True)
    return out / done.stdout.splitlines()[-1]


def unpack(archive: Path, folder: Path) -> Path:
    with tarfile.open(archive) as tar:
        tar.extractall(folder, filter="data")
    [source] = folder.iterdir()
    return source


def build(source: Path, out: Path) -> Path:
    """The wheel of the unpacked sdist, with the packages that are here: build-requirements.txt"""
    command = [sys.executable, "-m", "pip", "-q", "wheel", "--no-build-isolation", "--no-deps", "-w", out, source]
    run(*command, env=os.environ | settings()["environment"])
    [wheel] = out.glob("*.whl")
    return wheel


def repair(wheel: Path, out: Path) -> Path:
    """For the oldest glibc of pyproject.toml or, if what was built needs a newer one, for that"""
    machine = platform.machine()
    wanted = f"{settings()[f'manylinux-{machine}-image']}_{machine}"
    shown = run("auditwheel", "show", wheel, capture_output=True).stdout
    possible = re.search(r'platform tag: "(\w+)"', " ".join(shown.split()))[1]
    tag = wanted if glibc(possible) <= glibc(wanted) else possible
    run("auditwheel", "repair", "--plat", tag, "--only-plat", "-w", out, wheel)
    if tag != wanted:
        print(f"The compiler and glibc here permit {tag}, not {wanted}: publish what cibuildwheel builds instead.")
    [repaired] = out.glob("*.whl")
    return repaired


def glibc(tag: str) -> tuple[int, int]:
    major, minor = re.match(r"manylinux_(\d+)_(\d+)_", tag).groups()
    return int(major), int(minor)


def audit(wheel: Path) -> None:
    """Nothing but the stable ABI is used, so that later Pythons can load it"""
    command = ["abi3audit", "--report", str(wheel)]
    done = subprocess.run(command, capture_output=True, text=True)  # it fails for whatever it finds
    [checked] = json.loads(done.stdout)["specs"].values()
    for module in checked["wheel"]:
        result = module["result"]
        if not result["is_abi3"] or result["non_abi3_symbols"] or set(result["future_abi3_objects"]) != BEYOND_ABI3:
            raise SystemExit(f"{wheel.name}: {module['name']} is not of the stable ABI: {result}")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.wheels", description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="folder, emptied first (default: dist)")
    out = parser.parse_args().out
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    archive = sdist(out)
    with tempfile.TemporaryDirectory() as folder:
        source = unpack(archive, Path(folder, "source"))
        wheel = repair(build(source, Path(folder, "built")), out)
    audit(wheel)
    print(f"{archive}\n{wheel}")


if __name__ == "__main__":
    main()
