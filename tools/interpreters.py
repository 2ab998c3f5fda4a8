"""Finds the Pythons of this machine."""

from __future__ import annotations

import glob
import os
import shutil
import subprocess


def find(version: str) -> str | None:
    """The command of Python "3.10": from PATH, or from pyenv whatever it has chosen"""
    installed = os.environ.get("PYENV_ROOT") or os.path.expanduser("~/.pyenv")
    for command in (shutil.which(f"python{version}"), *glob.glob(f"{installed}/versions/{version}.*/bin/python")):
        if command and version_of(command) == version:
            return command
    return None


def version_of(command: str | os.PathLike[str]) -> str | None:
    """As "3.10"; None if it does not run: of a pyenv that has chosen another, or gone since an environment was made"""
    code = "import sys; print('%d.%d' % sys.version_info[:2])"
    try:
        done = subprocess.run([command, "-c", code], capture_output=True, text=True)
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None
