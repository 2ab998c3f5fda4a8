"""Builds fastagg's native modules with CMake and ninja. All else about the package is in pyproject.toml."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

HERE = Path(__file__).parent.resolve()


class CMakeBuild(build_ext):
    def build_extension(self, ext: Extension) -> None:
        if ext.optional:  # CMake has built it with the first one, or left it out
            return
        import pybind11

        package = Path(self.get_ext_fullpath(ext.name)).parent.resolve()
        build = Path(self.build_temp).resolve()
        build.mkdir(parents=True, exist_ok=True)
        configure = [
            "cmake", "-S", str(HERE), "-B", str(build), "-G", "Ninja",
            f"-DCMAKE_LIBRARY_OUTPUT_DIRECTORY={package}",
            f"-DPython_EXECUTABLE={sys.executable}",
            f"-Dpybind11_DIR={pybind11.get_cmake_dir()}",
            f"-DCMAKE_BUILD_TYPE={os.environ.get('FASTAGG_BUILD_TYPE', 'Release')}",
        ]  # fmt: skip
        # said anew each time, for CMake remembers what an earlier build was told or did not find
        configure += ["-UCMAKE_CUDA_COMPILER", f"-DFASTAGG_CUDA={os.environ.get('FASTAGG_CUDA') or 'auto'}"]
        configure.append(f"-DCMAKE_MAKE_PROGRAM={shutil.which('ninja') or 'ninja'}")  # the former build's may be gone
        configure.append(f"-DFASTAGG_CUDA_ARCHITECTURES={os.environ.get('FASTAGG_CUDA_ARCHITECTURES', '')}")
        in_place = self.inplace or getattr(self, "editable_mode", False)
        for former in [*package.glob("_cuda.*.so"), *((HERE / "fastagg").glob("_cuda.*.so") if in_place else ())]:
            former.unlink()  # if it is not built now, it must not stay
        try:
            subprocess.run(configure, check=True)
            subprocess.run(["cmake", "--build", str(build)], check=True)
        except FileNotFoundError as error:
            raise SystemExit(f"fastagg: building needs {error.filename!r}; pip install cmake ninja pybind11") from error


setup(
    ext_modules=[Extension("fastagg._cpu", sources=[]), Extension("fastagg._cuda", sources=[], optional=True)],
    cmdclass={"build_ext": CMakeBuild},
)
