"""What tests share. No test imports another."""

from __future__ import annotations

import os
from pathlib import Path

TESTS = Path(__file__).parents[1]


def environment(**more: str) -> dict[str, str]:
    """Of a process that imports helpers too"""
    path = os.pathsep.join(filter(None, [str(TESTS), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path, **more}
