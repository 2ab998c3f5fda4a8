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
        if command and _runs(command, version):
            return command
    return None


def _runs(command: str, version: str) -> bool:
    code = "import sys; print('%d.%d' % sys.version_info[:2])"
    done = subprocess.run([command, "-c", code], capture_output=True, text=True)
    return done.returncode == 0 and done.stdout.strip() == version
