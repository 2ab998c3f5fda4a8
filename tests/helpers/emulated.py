"""The CUDA kernels as a module for this machine's CPU: csrc/cuda compiled by the host's compiler against the emulator.

Built when first asked for, in build/emulated, and again when a source changes.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sysconfig
from functools import cache
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
CSRC = ROOT / "csrc"
FLAGS = ["-std=c++17", "-O2", "-march=native", "-ffp-contract=off", "-fPIC", "-shared", "-fvisibility=hidden"]
FLAGS += ["-Wall", "-Wno-unknown-pragmas"]


def build(name: str, sources: list[Path]):
    """The Python module `name` of some sources (.cu or .cpp), compiled with the emulator"""
    import pybind11

    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    sources = [*sources, CSRC / "cuda/emulator/emulator.cpp"]
    headers = sorted(CSRC.glob("*.h")) + sorted((CSRC / "cuda").rglob("*.h"))
    content = b"".join(path.read_bytes() for path in [*sources, *headers, Path(__file__)])
    key = hashlib.sha256(content + compiler.encode() + sysconfig.get_config_var("EXT_SUFFIX").encode()).hexdigest()[:16]
    folder = ROOT / "build/emulated" / key
    target = folder / f"{name}{sysconfig.get_config_var('EXT_SUFFIX')}"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # tests in several processes wait for the one that builds
        if not target.exists():
            include = [f"-I{path}" for path in (CSRC, pybind11.get_include(), sysconfig.get_paths()["include"])]
            part = target.with_suffix(f".{os.getpid()}")
            command = [compiler, *FLAGS, "-DFASTAGG_EMULATED", f"-DFASTAGG_MODULE={name}", *include]
            subprocess.run([*command, "-x", "c++", *map(str, sources), "-o", str(part)], check=True)
            part.rename(target)
    spec = importlib.util.spec_from_file_location(name, target)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@cache
def kernels():
    """The backend "cuda" on the emulator"""
    from fastagg._engine.backends.cuda import Kernels

    names = ("mix", "products", "ranked", "reduce", "tensor_cores", "times")
    native = build("_cuda_emulated", [CSRC / "bind_cuda.cpp", *(CSRC / f"cuda/{name}.cu" for name in names)])
    return Kernels(native, emulated=True)
