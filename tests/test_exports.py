"""What `import fastagg` promises: its names, whatever was imported before, and nothing heavy before one is used."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import fastagg

STUB = Path(fastagg.__file__).with_suffix(".pyi")


def stub():
    """What type checkers are told: every name, and where it is from"""
    pairs = sorted((module, name) for module, names in fastagg._EXPORTS.items() for name in names.split())
    lines = [f"from {module} import {name} as {name}" for module, name in pairs]
    return "\n".join(["# Written by tests/test_exports.py", *lines, "", "__version__: str", ""])


def test_type_checkers_see_the_same_names():
    assert STUB.read_text() == stub(), "run python tests/test_exports.py"


def test_names():
    assert set(fastagg.__all__) <= set(dir(fastagg))
    for name in fastagg.__all__:
        assert getattr(fastagg, name).__name__ == name
    with pytest.raises(AttributeError, match="module 'fastagg' has no attribute 'fedavgg'"):
        _ = fastagg.fedavgg


FIRST = [
    """
import sys, fastagg
assert "torch" not in sys.modules
from fastagg._engine.registry import registry
assert len(registry()) == len(fastagg.list_methods())
from fastagg import *
assert fedavg and mix
""",
    """
import fastagg.gram, fastagg.methods.fedavg, fastagg.info, fastagg.diagnostics
from fastagg._engine import registry
assert registry.aggregator("krum")
""",
    """
import torch
from fastagg._engine.functions import mix
assert mix([{"a": torch.ones(3)}] * 2, torch.ones(2, requires_grad=True))["a"].requires_grad
""",
]


@pytest.mark.parametrize("code", FIRST)
def test_whatever_comes_first(code):
    functions = (
        "\nimport fastagg\nfor f in (fastagg.gram, fastagg.methods, fastagg.info, fastagg.diagnostics): f.__code__"
    )
    subprocess.run([sys.executable, "-c", code + functions], check=True, timeout=600)


if __name__ == "__main__":
    STUB.write_text(stub())
