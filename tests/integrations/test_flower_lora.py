"""examples/flower_lora inside Flower: its server and its clients, on real records and messages."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("flwr", reason="needs flwr: make test-integrations")
from helpers.flower_nodes import Nodes

pytestmark = pytest.mark.integration
EXAMPLE = Path(__file__).parents[2] / "examples/flower_lora"


@pytest.mark.parametrize("adapters", ["FedIT", "exact", "best rank", "FedAWA"])
def test_the_app(adapters, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLE))
    from fastagg_lora import client_app, server_app
    from fastagg_lora.training import RANKS, SCALING

    assert SCALING == 2.0
    config = {
        "adapters": adapters, "num-server-rounds": 2, "min-nodes": 3, "local-steps": 2, "base-steps": 3,
        "report": str(tmp_path / "report.json"),
    }  # fmt: skip
    ids, ranks = [11, 5, 2**63 + 7], []

    def train(message):
        client = ids.index(message.metadata.dst_node_id)
        context = SimpleNamespace(run_config=config, node_config={"partition-id": client})
        content = client_app.train_here(message, context).content
        ranks.append(content["adapter"].to_torch_state_dict()["blocks.0.up.lora_A.weight"].shape[0])
        return content

    server_app.main(Nodes(ids, train), SimpleNamespace(run_config=config))
    rounds = json.loads((tmp_path / "report.json").read_text())
    assert len(rounds) == 3
    assert sorted(ranks) == sorted(RANKS * 2)
    for numbers in rounds[1:]:
        assert sum(numbers["weights"]) == pytest.approx(1)
        assert 0 <= numbers["left"] < 1
        assert numbers["bits"] < 8
    assert rounds[2]["bits"] != rounds[0]["bits"]
    for name in [name for name in sys.modules if name.startswith("fastagg_lora")]:
        monkeypatch.delitem(sys.modules, name)
