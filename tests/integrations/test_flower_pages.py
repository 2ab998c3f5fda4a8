"""What the documentation shows of Flower, as it stands there."""

from __future__ import annotations

import pytest

pytest.importorskip("flwr", reason="needs flwr: make test-integrations")

import torch

from fastagg.integrations.flower import unpack
from helpers.flower_nodes import NODES, Nodes, content
from helpers.page_names import given
from helpers.pages import ROOT, blocks, run

pytestmark = pytest.mark.integration


def trained(message):
    return content({key: value + 0.1 for key, value in unpack(message.content["arrays"]).items()})


def evaluated(message):
    reply = content({}, loss=1.0)
    del reply["arrays"]
    return reply


@pytest.mark.parametrize("page", ["README.md", "docs/integrations.md", "docs/guides/flower.md"])
def test_blocks_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = given() | {"grid": Nodes(NODES, trained, evaluated)}
    found = [block for block in blocks(ROOT / page) if block.mark and block.mark[2] == "flwr"]
    assert found
    for block in found:
        run(block, names)


def test_notebook_runs(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib").use("Agg")
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "notebook"}
    for cell in blocks(ROOT / "docs/notebooks/flower.ipynb"):
        run(cell, names)
    assert torch.isfinite(torch.stack([value.sum() for value in names["strategy"].result.values()])).all()
    assert len(names["strategy"].result.dropped) == 1
