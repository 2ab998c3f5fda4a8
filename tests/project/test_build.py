"""How the native module is built, and with what."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

from fastagg._engine import scanner

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.skipif(scanner._cpu is None, reason="no native module")
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="of ELF files")
@pytest.mark.skipif(shutil.which("readelf") is None, reason="no readelf")
def test_the_native_module_is_hardened():
    options = ["--wide", "--program-headers", "--dynamic", "--dyn-syms"]
    done = subprocess.run(["readelf", *options, scanner._cpu.__file__], capture_output=True, text=True, check=True)
    assert "GNU_RELRO" in done.stdout
    assert re.search(r"\(FLAGS\).*BIND_NOW|\(FLAGS_1\).*NOW", done.stdout)
    assert "__stack_chk_fail" in done.stdout  # -fstack-protector-strong
    assert re.search(r"GNU_STACK.* RW ", done.stdout)  # and not executable


def test_build_requirements_are_pinned_and_hashed():
    pinned = {}
    for line in (ROOT / "build-requirements.txt").read_text().replace("\\\n", " ").splitlines():
        if not line.startswith("#"):
            name, hashes = re.fullmatch(r"([\w-]+)==[\d.]+((?:\s+--hash=sha256:[0-9a-f]{64})+)", line).groups()
            pinned[name] = hashes.split()
    needed = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    assert pinned.keys() == {re.match(r"[\w-]+", requirement)[0] for requirement in needed}
    makefile = (ROOT / "Makefile").read_text()
    builds = [line for line in makefile.splitlines() if re.search(r"\b(install|wheel)\b.* (-e|-w) ", line)]
    assert builds
    assert all("--no-build-isolation" in line for line in builds)
    assert "--require-hashes" in makefile


def test_what_is_declared_as_oldest_is_what_is_run_as_oldest():
    """Each minimum of pyproject.toml is a version of constraints-oldest.txt: setuptools>=77 there, 77.0.1 here"""
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text())
    project, extras = pyproject["project"], pyproject["project"]["optional-dependencies"]
    declared = [*pyproject["build-system"]["requires"], *project["dependencies"], *extras["sim"], *extras["demo"]]
    declared = [requirement for requirement in declared if not requirement.startswith("fastagg[")]
    run = (ROOT / "constraints-oldest.txt").read_text()
    pinned = dict(line.split("==") for line in run.splitlines() if not line.startswith("#"))
    for requirement in declared:
        name, oldest = re.match(r"([\w-]+)>=([\d.]+)", requirement).groups()
        assert f"{pinned.pop(name)}.".startswith(f"{oldest}."), requirement
    assert not pinned
