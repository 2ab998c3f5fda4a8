"""Builds fastagg's native modules with CMake and ninja. All else about the package is in pyproject.toml.

Where they cannot be built (no compiler, Windows), fastagg is installed without: its reference backend, in plain torch,
computes everything. FASTAGG_NATIVE=1 (or FASTAGG_CUDA=1) makes that an error, as those who publish wheels want it.
"""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

HERE = Path(__file__).parent.resolve()
ABI3 = not sysconfig.get_config_var("Py_GIL_DISABLED")  # free-threaded Pythons have no stable ABI


class CMakeBuild(build_ext):
    def build_extension(self, ext: Extension) -> None:
        if ext.name != "fastagg._cpu":  # CMake has built it with the first one, or left it out
            return
        wanted = os.environ.get("FASTAGG_CUDA") or "auto"
        why = self.cmake(ext, wanted)
        if why and wanted == "auto":  # it may have been the CUDA kernels
            why = self.cmake(ext, "0")
        if why and (wanted == "1" or os.environ.get("FASTAGG_NATIVE") == "1"):
            asked = "FASTAGG_CUDA=1" if wanted == "1" else "FASTAGG_NATIVE=1"
            raise SystemExit(f"fastagg: {asked}, but the native kernels were not built: {why}")
        if why:
            print(f"fastagg: the native kernels were not built ({why}); the reference backend, in plain torch, serves")

    def cmake(self, ext: Extension, cuda: str) -> str:
        """Why it failed; empty if all is built"""
        package = Path(self.get_ext_fullpath(ext.name)).parent.resolve()
        build = Path(self.build_temp).resolve()
        build.mkdir(parents=True, exist_ok=True)
        configure = [
            "cmake", "-S", str(HERE), "-B", str(build), "-G", "Ninja",
            f"-DCMAKE_LIBRARY_OUTPUT_DIRECTORY={package}",
            f"-DPython_EXECUTABLE={sys.executable}",
            f"-DCMAKE_BUILD_TYPE={os.environ.get('FASTAGG_BUILD_TYPE', 'Release')}",
        ]  # fmt: skip
        # said anew each time, for CMake remembers what an earlier build was told or did not find
        configure += ["-UCMAKE_CUDA_COMPILER", f"-DFASTAGG_CUDA={cuda}"]
        configure.append(f"-DCMAKE_MAKE_PROGRAM={shutil.which('ninja') or 'ninja'}")  # the former build's may be gone
        configure.append(f"-DFASTAGG_CUDA_ARCHITECTURES={os.environ.get('FASTAGG_CUDA_ARCHITECTURES', '')}")
        if cuda != "0":
            import pybind11

            configure.append(f"-Dpybind11_DIR={pybind11.get_cmake_dir()}")
        in_place = self.inplace or getattr(self, "editable_mode", False)
        for folder in (package, *([HERE / "fastagg"] if in_place else ())):
            for former in (*folder.glob("_cpu.*.so"), *folder.glob("_cuda.*.so")):
                former.unlink()  # what is not built now must not stay
        try:
            subprocess.run(configure, check=True)
            subprocess.run(["cmake", "--build", str(build)], check=True)
        except FileNotFoundError as error:
            return f"{error.filename} was not found"
        except subprocess.CalledProcessError as error:
            return f"`cmake {error.cmd[1]}` failed; `pip install -v` shows why"
        return ""


class Wheel(bdist_wheel):
    def get_tag(self) -> tuple[str, str, str]:
        if any(Path(self.bdist_dir).glob("fastagg/_cuda.*.so")):  # which is for this version of Python only
            self.py_limited_api = ""
        return super().get_tag()


def readme() -> str:
    """README.md as PyPI can show it: a relative link leads to the file in the repository, of this version"""
    project = (HERE / "pyproject.toml").read_text(encoding="utf-8")
    version, source = (re.search(rf'^{name} = "(.+)"$', project, re.MULTILINE)[1] for name in ("version", "Source"))

    def link(found: re.Match[str]) -> str:
        return f"{found[1]}({source}/{'raw' if found[1].startswith('!') else 'blob'}/v{version}/{found[2]})"

    return re.sub(r"(!?\[[^\]]*\])\((?!https?:|#)([^)\s]+)\)", link, (HERE / "README.md").read_text(encoding="utf-8"))


setup(
    long_description=readme(),
    long_description_content_type="text/markdown",
    ext_modules=[
        Extension("fastagg._cpu", sources=[], optional=True, py_limited_api=ABI3),
        Extension("fastagg._cuda", sources=[], optional=True),
    ],
    cmdclass={"build_ext": CMakeBuild, "bdist_wheel": Wheel},
    options={"bdist_wheel": {"py_limited_api": "cp310"}} if ABI3 else {},
)
