"""A round that every method can take: models, sizes and what some methods want besides."""

from __future__ import annotations

import torch

import fastagg
from fastagg._engine.aggregator import REGISTRY
from helpers.cohort import make

SHAPES = {"conv.weight": (6, 3, 3, 3), "bn.weight": (6,), "bn.bias": (6,), "fc.weight": (4, 24), "fc.bias": (4,)}
K, CLASSES = 7, 4
IDS = ["d", "g", "a", "f", "b", "e", "c"]


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 6, 3, bias=False)
        self.bn = torch.nn.BatchNorm2d(6)
        self.fc = torch.nn.Linear(24, CLASSES)

    def forward(self, x):
        return self.fc(torch.relu(self.bn(self.conv(x))).flatten(1))


def proxy():
    generator = torch.Generator().manual_seed(5)
    return [
        (torch.randn(8, 3, 4, 4, generator=generator), torch.randint(CLASSES, (8,), generator=generator))
        for _ in range(2)
    ]


OPTIONS = {"krum": {"f": 1}, "multi_krum": {"f": 1}, "fedlaw": {"model": Net(), "epochs": 3, "progress": False}}


def round_info(name, clients=K):
    generator = torch.Generator().manual_seed(9)
    shares = torch.rand(clients, CLASSES, generator=generator, dtype=torch.float64) + 0.1
    return {
        "feddisco": {"label_dist": shares},
        "cwfedavg": {"class_dist": shares},
        "fednova": {"local_steps": list(range(1, clients + 1))},
        "fedlaw": {"proxy": proxy()},
    }.get(name, {})


def cohort(clients=K, seed=0, scale=1e-2):
    g, sds = make(clients, SHAPES, seed=seed, scale=scale)
    for k, sd in enumerate((g, *sds)):
        sd["bn.running_mean"] = 0.1 * k * torch.ones(6)
        sd["bn.running_var"] = 1 + 0.1 * torch.arange(6.0) + 0.01 * k
        sd["bn.num_batches_tracked"] = torch.tensor(10 + k)
    return g, sds


def run(name, g, clients, sizes=None, *, ids=None, info=None, server=None, **more):
    server = server or fastagg.aggregator(name, **OPTIONS.get(name, {}))
    info = round_info(name, len(clients)) if info is None else info
    return server.aggregate(g, clients, sizes, ids, **info, **more)


def models(result):
    return list(result) if isinstance(result, list) else [result]


METHODS = sorted(REGISTRY)
NEEDS_MANY = {"krum", "multi_krum"}  # K >= 2 f + 3
ROBUST = {*NEEDS_MANY, "geometric_median", "centred_clipping"}  # what is not a parameter is a median
