"""What the examples and the documentation show really runs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import fastagg

ROOT = Path(__file__).resolve().parents[2]
INTEGRATIONS = ROOT / "docs/integrations.md"


def test_plain_pytorch_learns():
    pytest.importorskip("sklearn", reason="needs scikit-learn: pip install '.[sim]'")
    done = subprocess.run(
        [sys.executable, ROOT / "examples/plain_pytorch.py"], capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    accuracy: dict[str, list[float]] = {}
    for method, value in re.findall(r"(\w+) round \d+: accuracy ([\d.]+)", done.stdout):
        accuracy.setdefault(method, []).append(float(value))
    assert list(accuracy) == ["fedavg", "fedawa"]
    for values in accuracy.values():
        assert len(values) == 15
        assert values[0] < 0.5  # ten digits: 0.1 by guessing
        assert values[-1] > 0.7


def test_what_to_install_is_said_as_it_works_from_a_clone():
    """fastagg is on no package index"""
    extras = re.search(
        r"\[project\.optional-dependencies\]\n(.*?)\n\[", (ROOT / "pyproject.toml").read_text(), re.DOTALL
    )
    known = set(re.findall(r"^(\w+) = \[", extras[1], re.MULTILINE))
    files = [path for folder in ("fastagg", "docs", "examples", "benchmarks") for path in (ROOT / folder).rglob("*")]
    for path in [*ROOT.glob("*.md"), *(path for path in files if path.suffix in (".py", ".md"))]:
        text = path.read_text()
        assert not re.search(r"pip install\s+['\"]?fastagg\b", text), path
        assert set(re.findall(r"'\.\[(\w+)\]'", text)) <= known, path


@pytest.fixture
def pfllib() -> dict:
    """The classes of the recipe, as they stand in the documentation"""
    if not INTEGRATIONS.exists():
        pytest.skip(f"no {INTEGRATIONS.relative_to(ROOT)} here")
    [code] = re.findall(r"```python\n(# PFLlib\n.*?)```", INTEGRATIONS.read_text(), re.DOTALL)
    names: dict = {}
    exec(code, names)
    return names


class AsInPFLlib:
    """The part of PFLlib's server that the recipe leaves as it is"""

    def __init__(self, global_model):
        self.global_model = global_model

    def receive_models(self, clients):
        self.uploaded_ids = [client.id for client in clients]
        self.uploaded_models = [client.model for client in clients]
        total = sum(client.train_samples for client in clients)
        self.uploaded_weights = [client.train_samples / total for client in clients]

    def aggregate_parameters(self):
        raise AssertionError("the recipe replaces this")


def net(seed):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))
    for _ in range(seed):
        model(torch.randn(8, 6) * seed)
    return model


@pytest.mark.parametrize("method", ["fedavg", "fedawa"])
def test_pfllib_recipe(pfllib, method):
    class Server(pfllib["FastAggServer"], AsInPFLlib):
        pass

    class Client(pfllib["FastAggClient"], SimpleNamespace):
        pass

    Server.method = method
    server = Server(net(0))
    reference = fastagg.aggregator(method)
    everyone = [Client(id=k, train_samples=100 * k, model=net(k)) for k in (1, 2, 3)]
    for chosen in (everyone, [everyone[2], everyone[0]]):  # the second time not all take part, in another order
        before = {key: value.clone() for key, value in server.global_model.state_dict().items()}
        returned = [{key: value.clone() for key, value in client.model.state_dict().items()} for client in chosen]
        sizes, ids = [client.train_samples for client in chosen], [client.id for client in chosen]
        server.receive_models(chosen)
        server.aggregate_parameters()

        expected = reference.aggregate(before, returned, sizes, ids)
        after = server.global_model.state_dict()
        for key, value in expected.items():
            assert torch.allclose(after[key], value, rtol=1e-6, atol=1e-7), key
        assert not torch.equal(after["1.running_mean"], returned[0]["1.running_mean"])
        assert after["1.num_batches_tracked"] == 3
        for client in everyone:
            client.set_parameters(server.global_model)
            assert torch.equal(client.model.state_dict()["1.running_var"], after["1.running_var"])
        for client in everyone:  # they train
            with torch.no_grad():
                for parameter in client.model.parameters():
                    parameter += 0.1 * client.id * torch.randn_like(parameter)
                client.model[1].running_mean += client.id


def test_adapters_of_different_ranks_learn(tmp_path):
    """examples/flower_lora without Flower, shorter than its plot: each way to aggregate makes the model better"""
    plot = tmp_path / "plot.svg"
    short = ["--rounds", "1", "--local-steps", "4", "--base-steps", "30", "--out", str(plot)]
    done = subprocess.run(
        [sys.executable, ROOT / "examples/flower_lora/compare.py", *short], capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    before = float(re.search(r"^before: ([\d.]+) bits", done.stdout, re.MULTILINE)[1])
    after = dict(re.findall(r"^(\w[\w ]*?) +round 1: ([\d.]+) bits", done.stdout, re.MULTILINE))
    assert set(after) == {"FedIT", "exact", "best rank", "FedAWA"}
    assert all(float(bits) < before for bits in after.values())
    assert "<svg" in plot.read_text()
