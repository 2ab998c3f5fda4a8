"""CONTRIBUTING.md's method, added as it says: one file and one test, and it is everywhere that methods are."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import fastagg

ROOT = Path(fastagg.__file__).parent.parent
TEXT = (ROOT / "CONTRIBUTING.md").read_text()


def blocks():
    """The files that CONTRIBUTING.md shows: path -> content"""
    found = {}
    for indent, code in re.findall(r"^( *)```python\n(.*?)^ *```$", TEXT, re.MULTILINE | re.DOTALL):
        lines = [line.removeprefix(indent) for line in code.splitlines()]
        found[lines[0].removeprefix("# ")] = "\n".join(lines[1:]) + "\n"
    return found


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """The package and its tests with the two files added"""
    folder = tmp_path_factory.mktemp("clone")
    ignored = shutil.ignore_patterns("__pycache__")
    for name in ("fastagg", "tests", "tools"):
        shutil.copytree(ROOT / name, folder / name, ignore=ignored)
    for name in ("pyproject.toml", "CONTRIBUTING.md"):
        shutil.copy(ROOT / name, folder / name)
    assert len(blocks()) == 2
    for path, content in blocks().items():
        (folder / path).write_text(content)
    return folder


def run(clone, *command):
    environment = os.environ | {"PYTHONPATH": str(clone)}
    done = subprocess.run([sys.executable, *command], cwd=clone, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_its_own_test_and_those_of_every_method(clone):
    engine = [f"tests/engine/test_{what}.py" for what in ("registry", "conformance", "bad_clients")]
    quiet = ["-p", "no:cacheprovider", "-p", "no:xdist"]
    own = "tests/methods/test_fedcos.py"
    said = run(clone, "-m", "pytest", *quiet, "-k", "fedcos", own, *engine, "tests/files/test_job.py")
    assert int(re.search(r"(\d+) passed", said)[1]) >= 15


def test_it_is_found(clone, tmp_path):
    assert "fedcos " in run(clone, "-m", "fastagg", "methods")
    code = (
        "import fastagg; assert 'fedcos' in [m.name for m in fastagg.list_methods()]; "
        "fastagg.FedCos, fastagg.fedcos, fastagg.aggregator('fedadam', weights='fedcos')"
    )
    run(clone, "-c", code)
    options = ["--clients", "4", "--rounds", "2", "--epochs", "1", "--samples", "300"]
    said = run(clone, "-m", "fastagg", "compare", "fedavg", "fedcos:power=2", *options, "--out", str(tmp_path / "runs"))
    assert "fedcos" in said
    assert list((tmp_path / "runs").rglob("summary.json"))


def test_it_needs_no_other_change(clone):
    """What its absence from the stub means is said by the stub's own test"""
    done = subprocess.run(
        [sys.executable, "-m", "tools.stubs", "--check"], cwd=clone, env=os.environ | {"PYTHONPATH": str(clone)},
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 1
    assert "run `make stubs`" in done.stderr
    run(clone, "-m", "tools.stubs")
    assert "def fedcos(" in (clone / "fastagg/__init__.pyi").read_text()
