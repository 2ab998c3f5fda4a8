"""What `pip install` leaves where native code cannot be built, and what the sdist has in it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

from tools import installed, wheels

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.skipif(not (ROOT / ".git").exists(), reason="needs git's list of files")
LEFT_OUT = (  # of tests: see MANIFEST.in
    "tests/project/", "tests/integrations/", "tests/sim/test_faults.py", "tests/arrivals/test_bounded.py",
    *(f"tests/helpers/{name}.py" for name in ("byzfl", "flower_nodes", "page_names", "pages", "run_benchmark")),
)  # fmt: skip
TOP = {"CHANGELOG.md", "CMakeLists.txt", "LICENSE", "MANIFEST.in", "README.md", "build-requirements.txt",
       "constraints.txt", "pyproject.toml", "setup.py", "tools/__init__.py", "tools/stubs.py"}  # fmt: skip
SOURCE = "https://github.com/fastagg/fastagg/"
# With the build tools of this environment, which need not be activated
PATH = os.pathsep.join([sysconfig.get_path("scripts"), os.environ["PATH"]])
# Everything of the package but what the native modules and the editable install of this environment would lend it
ALONE = """
import sys
sys.meta_path[:] = [finder for finder in sys.meta_path if "editable" not in repr(finder).lower()]
"""


@pytest.fixture(scope="module")
def sdist(tmp_path_factory):
    return wheels.sdist(tmp_path_factory.mktemp("sdist"))


def test_the_sdist_has_what_it_takes_and_nothing_else(sdist):
    with tarfile.open(sdist) as tar:
        [top] = {name.partition("/")[0] for name in tar.getnames()}
        found = {member.name.removeprefix(f"{top}/") for member in tar if member.isfile()}
        tests = {name: tar.extractfile(f"{top}/{name}").read().decode() for name in found if "/test_" in name}
    assert not [name for name, text in tests.items() if re.search(r"^(from|import) benchmarks", text, re.MULTILINE)]
    found = {name for name in found if not name.startswith("fastagg.egg-info/")} - {"PKG-INFO", "setup.cfg"}
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True).stdout.split()
    expected = {name for name in listed if name.startswith(("csrc/", "fastagg/", "tests/")) and (ROOT / name).exists()}
    assert found == {name for name in expected if not name.startswith(LEFT_OUT)} | TOP


def test_pypi_can_follow_every_link(sdist):
    """It shows README.md alone"""
    with tarfile.open(sdist) as tar:
        [name] = [name for name in tar.getnames() if name.count("/") == 1 and name.endswith("/PKG-INFO")]
        about = tar.extractfile(name).read().decode()
    version, text = re.search(r"^Version: (.+)$", about, re.MULTILINE)[1], about.split("\n\n", 1)[1]
    links = re.findall(r"\]\((\S+?)\)", text)
    here = [link.partition(f"/v{version}/")[2] for link in links if link.startswith(SOURCE)]
    assert all(link.startswith("https://") for link in links)
    assert "docs/performance/speedup.svg" in here
    assert all((ROOT / path.partition("#")[0]).exists() for path in here)
    assert text.startswith("# fastagg\n")


def build(source: Path, out: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pip", "wheel", "-v", "--no-build-isolation", "--no-deps", "-w", out, source]
    settings = {**os.environ, "FASTAGG_CUDA": "0", "FASTAGG_NATIVE": "", "CXX": "/bin/false", "PATH": PATH}
    return subprocess.run(list(map(str, command)), env=settings | environment, capture_output=True, text=True)


@pytest.mark.skipif(shutil.which("cmake", path=PATH) is None, reason="no cmake")
@pytest.mark.parametrize("missing", ["compiler", "cmake"])
def test_without_native_code(sdist, tmp_path, missing):
    source, out = wheels.unpack(sdist, tmp_path / "source"), tmp_path / "out"
    without = {"PATH": str(tmp_path)} if missing == "cmake" else {}
    done = build(source, out, **without)
    assert done.returncode == 0, done.stderr
    said = [line.strip() for line in (done.stdout + done.stderr).splitlines() if line.strip().startswith("fastagg: ")]
    [line] = [line for line in said if "native kernels were not built" in line]
    assert ("cmake was not found" if missing == "cmake" else "`cmake -S` failed") in line
    [wheel] = out.glob("*.whl")
    with zipfile.ZipFile(wheel) as files:
        assert not [name for name in files.namelist() if name.endswith(".so")]
        files.extractall(tmp_path / "installed")
    code = f"""{ALONE}
import warnings, torch, fastagg
assert fastagg.__file__.startswith({str(tmp_path)!r})
g, clients = {{"a.weight": torch.zeros(5)}}, [{{"a.weight": torch.full((5,), float(k))}} for k in range(3)]
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    new = fastagg.fedavg(g, clients, [1, 1, 2])
[said] = [str(w.message) for w in said if "fastagg" in str(w.message)]
assert "the much slower reference serves tensors on cpu (cpu: fastagg was installed without its native code" in said
assert torch.equal(new["a.weight"], torch.full((5,), 1.25))
from fastagg.cli import main
assert main(["info"]) == 0
"""
    used = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": str(tmp_path / "installed")},
    )  # fmt: skip
    assert used.returncode == 0, used.stderr
    assert "not available: fastagg was installed without its native code" in used.stdout
    assert "fastagg: the much slower" not in used.stderr  # info has said it


LACKING = """
import ctypes, mmap, os, signal, sys
import torch, safetensors.torch  # which would not be those for Windows
sys.platform = "win32"
for name in ("fcntl", "triton", "fastagg._cpu", "fastagg._cuda"):
    sys.modules[name] = None
for module, names in {
    os: ("O_NOFOLLOW", "O_NONBLOCK", "O_DIRECTORY", "RTLD_NOLOAD", "fchmod", "fork", "register_at_fork"),
    mmap: [name for name in dir(mmap) if name.startswith(("MADV_", "MAP_", "PROT_"))], signal: ("pthread_sigmask",),
}.items():
    for name in names:
        delattr(module, name)
class CDLL(ctypes.CDLL):
    def __init__(self, name, *args, **options):
        if name is None:
            raise TypeError("bad argument type for built-in operation")
        super().__init__(name, *args, **options)
ctypes.CDLL = CDLL
"""


def test_models_are_aggregated_where_files_cannot_be_written(tmp_path):
    """Windows, as far as Linux can be without what that lacks"""
    code = f"""{LACKING}
import fastagg
g, clients = {{"a.weight": torch.zeros(5)}}, [{{"a.weight": torch.full((5,), float(k))}} for k in range(3)]
server = fastagg.aggregator("fedadam", weights="fedawa")
server.aggregate(g, clients, [1, 1, 2])
assert torch.equal(fastagg.fedavg(g, clients, [1, 1, 2])["a.weight"], torch.full((5,), 1.25))
for call in (server.save, server.load, lambda path: fastagg.aggregate_files("fedavg", path, [path], path)):
    try:
        call({str(tmp_path / "file")!r})
    except fastagg.InputError as error:
        print(error)
"""
    alone = os.environ | {"PYTHONPATH": str(ROOT)}
    used = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, env=alone)
    assert used.returncode == 0, used.stderr
    assert used.stdout.count("on Windows, fastagg neither reads nor writes files") == 3
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(shutil.which("cmake", path=PATH) is None, reason="no cmake")
@pytest.mark.parametrize("asked", ["FASTAGG_NATIVE", "FASTAGG_CUDA"])
def test_who_asks_for_native_code_gets_it_or_an_error(sdist, tmp_path, asked):
    done = build(wheels.unpack(sdist, tmp_path / "source"), tmp_path / "out", **{asked: "1"})
    assert done.returncode != 0
    assert f"{asked}=1, but the native kernels were not built: `cmake -S` failed" in done.stdout + done.stderr


def test_an_environment_is_kept_for_the_python_that_made_it(tmp_path):
    """Another would run the tests of `make test-newest` with the Python of the last time"""
    kept = tmp_path / "bin/python"
    kept.parent.mkdir()
    for said, same in ((".".join(map(str, sys.version_info[:2])), True), ("3.9", False)):
        kept.unlink(missing_ok=True)
        kept.write_text(f"#!/bin/sh\necho {said}\n")
        kept.chmod(0o755)
        assert installed.environment(sys.executable, tmp_path, True) == kept
        assert kept.is_symlink() is not same  # made anew
