"""memory= bounds what the process takes, whatever the allocator does with memory that was freed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fastagg
from benchmarks.measure import peak_extra_memory

ROOT = Path(__file__).parents[2]
MODEL, CLIENTS, MEMORY = 12_000_000, 40, 32_000_000


def client(g, seed):
    noise = torch.Generator().manual_seed(seed)
    return {key: value + 0.01 * torch.randn(value.shape, generator=noise) for key, value in g.items()}


ROUND = """
import sys
import torch, fastagg
from benchmarks.measure import peak_extra_memory

N, what = int(sys.argv[1]), sys.argv[2]
server = fastagg.aggregator("fedavg")
g = None if "without" in what else {"w": torch.randn(N)}
server.aggregate(None, [{"w": torch.randn(1000)}])
options = {"running": True} if "running" in what else {"memory": 16_000_000}

def job():
    with server.round(g, **options) as round:
        for k in range(3):
            sent = {"w": torch.randn(N)}
            round.add(k, **({"update": sent} if g else {"model": sent}))
            del sent
        return round.finish()

print(peak_extra_memory(job))
"""


@pytest.mark.parametrize("what", ["updates", "without a global model", "a running sum without one"])
def test_nothing_but_the_round_is_kept(what):
    """Of a model that is one large tensor: no zeros of its size to compare updates with, and no first client. In a
    process of its own: with holes in the heap from other tests, tensors of this size are put there, and stay resident
    when they are freed."""
    N = 20_000_000
    alone = subprocess.run([sys.executable, "-c", ROUND, str(N), what], cwd=ROOT, capture_output=True, text=True)
    assert alone.returncode == 0, alone.stderr
    if alone.stdout.strip() == "None":
        pytest.skip("this system does not say")
    models = 3 if "running" in what else 1  # a sum in float64, and the client that is added; or the new model
    assert int(alone.stdout) < 4 * N * (models + 0.5) + (0 if "running" in what else 16_000_000)


@pytest.mark.parametrize("updates", [0, 1])
def test_memory(updates, tmp_path):
    """And the client that is being added, made here, the new model, and pages of 2 MB that pieces of files lie in"""
    g = {f"{layer}.weight": torch.randn(300, 1000) for layer in range(10)}
    server = fastagg.aggregator("fedawa", variant="released")
    server.aggregate(g, [client(g, 0)])  # loads what is loaded once

    def job():
        with server.round(g, memory=MEMORY, spill=tmp_path) as round:
            for k in range(CLIENTS):
                sd = client(g, k)
                if k < updates:
                    round.add(k, update={key: value - g[key] for key, value in sd.items()})
                else:
                    round.add(k, sd)
            return round.finish()

    peak = peak_extra_memory(job)
    if peak is None:
        pytest.skip("this system does not say")
    assert peak < MEMORY + 4 * MODEL + CLIENTS * 2 * (2 << 20)
