"""What `import fastagg` promises: its names, whatever was imported before, and nothing heavy before one is used."""

from __future__ import annotations

import subprocess
import sys

import pytest

import fastagg
from tools import stubs


def test_the_stub_is_current():
    assert stubs.STUB.read_text() == stubs.stub(), "run `make stubs`"


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
import fastagg.methods.krum
assert fastagg.methods.krum.Krum is fastagg.Krum
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
        "\nimport fastagg\nfor f in (fastagg.gram, fastagg.list_methods, fastagg.info, fastagg.diagnostics): f.__code__"
    )
    subprocess.run([sys.executable, "-c", code + functions], check=True, timeout=600)
