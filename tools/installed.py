"""Tests a wheel as its users get it: installed into an environment of its own, without a compiler on PATH, and
without the sources. `make wheels`, `make test-oldest` and `make test-newest` run it.

[tool.cibuildwheel] in pyproject.toml says what is needed and run (test-requires, test-command). The tests are those of
the sdist.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tools.interpreters import find, version_of
from tools.wheels import ROOT, run, settings, unpack


def environment(command: str, folder: Path, keep: bool) -> Path:
    """Its Python. What is kept has everything but fastagg from the last time, if that was with the same Python"""
    python = folder / "bin/python"
    if not (keep and version_of(python) == version_of(command)):
        shutil.rmtree(folder, ignore_errors=True)
        run(command, "-m", "venv", folder)
    return python


def commands(folder: Path) -> Path:
    """A folder for PATH with what tests call, and neither a compiler nor git"""
    folder.mkdir()
    for name in ("bash", "cat", "head", "sh"):
        (folder / name).symlink_to(shutil.which(name))
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.installed", description=__doc__)
    parser.add_argument("--dist", type=Path, default=ROOT / "dist", help="folder with a wheel and an sdist")
    parser.add_argument("--python", metavar="3.10", help="default: the one that runs this")
    parser.add_argument("--constraints", type=Path, default=ROOT / "constraints.txt", help="versions to install")
    parser.add_argument("--env", type=Path, help="keep the environment here (default: a new one, removed at the end)")
    options = parser.parse_args()
    command = find(options.python) if options.python else sys.executable
    if command is None:
        raise SystemExit(f"Python {options.python} is not on this machine (looked on PATH and in pyenv)")
    [wheel], [archive] = options.dist.glob("*.whl"), options.dist.glob("*.tar.gz")
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.env or Path(temporary, "env")
        python = environment(command, folder.resolve(), options.env is not None)
        pip = (python, "-m", "pip", "-q", "--disable-pip-version-check")
        extras = ",".join(settings()["test-extras"])
        run(*pip, "install", "-c", options.constraints, f"{wheel}[{extras}]", *settings()["test-requires"])
        run(*pip, "install", "--force-reinstall", "--no-deps", wheel)  # of an environment that was kept, too
        source = unpack(archive, Path(temporary, "source"))
        here = Path(temporary, "tests")  # with neither fastagg nor csrc beside
        here.mkdir()
        for name in settings()["test-sources"]:
            copy = shutil.copytree if (source / name).is_dir() else shutil.copy
            copy(source / name, here / name)
        alone = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
        alone["PATH"] = os.pathsep.join([str(python.parent.absolute()), str(commands(Path(temporary, "bin")))])
        code = "import fastagg; print(fastagg.__file__); assert fastagg.info()['backends']['cpu'] == 'available'"
        run(python, "-c", code, cwd=here, env=alone)
        run(python, "-m", "fastagg", "info", cwd=here, env=alone)
        _, *arguments = shlex.split(settings()["test-command"])
        print("+", python, *arguments, flush=True)
        tested = subprocess.run([python, *arguments], cwd=here, env=alone)
    raise SystemExit(tested.returncode)


if __name__ == "__main__":
    main()
