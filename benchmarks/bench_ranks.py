"""Medians and trimmed means of every element, against PyTorch on a stack of the models and Flower's own."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import fastagg
from benchmarks.conftest import cohorts

COHORTS = (("resnet18", 20), ("resnet18", 20, "bfloat16"), ("resnet18", 100), ("mlp_6m", 100))
FEW = 20  # clients: with more, the others take minutes


def trimmed(K: int) -> int:
    return K // 5


def torch_median(clients: list[dict]) -> dict:
    """The lower of the middle two, as torch has it: for an even number of clients the others' result differs"""
    return {key: torch.stack([sd[key] for sd in clients]).median(0).values for key in clients[0]}


def torch_sort(clients: list[dict]) -> dict:
    """The mean of the middle two, as ours"""
    K = len(clients)

    def of(key: str) -> torch.Tensor:
        s = torch.stack([sd[key] for sd in clients]).sort(0).values
        return s[(K - 1) // 2 : K // 2 + 1].double().mean(0).to(s.dtype) if s.is_floating_point() else s[(K - 1) // 2]

    return {key: of(key) for key in clients[0]}


def torch_trimmed(clients: list[dict], f: int) -> dict:
    def of(key: str) -> torch.Tensor:
        s = torch.stack([sd[key] for sd in clients]).sort(0).values
        return s[f : len(clients) - f].double().mean(0).to(s.dtype) if s.is_floating_point() else s[(len(s) - 1) // 2]

    return {key: of(key) for key in clients[0]}


def of_flower(name: str, clients: list[dict], *options: float) -> dict[str, Callable]:
    """What Flower's FedMedian and FedTrimmedAvg call, on views of the same memory; nothing where it is not installed"""
    try:
        from flwr.server.strategy import aggregate
    except ImportError:
        return {}
    if any(value.dtype == torch.bfloat16 for value in clients[0].values()):
        return {}  # NumPy has none
    arrays = [([value.numpy() for value in sd.values()], 1) for sd in clients]
    function = getattr(aggregate, name)
    return {"Flower": lambda: function(arrays, *options)}


def check(found: dict, expected: dict) -> None:
    for key, value in found.items():
        if value.is_floating_point() and "running_" not in key:  # of which ours are medians, always
            torch.testing.assert_close(value, expected[key], rtol=torch.finfo(value.dtype).eps, atol=1e-30)


@pytest.mark.parametrize("name", ["median", "trimmed_mean"])
@cohorts(*COHORTS)
def test_ranks(cohort, contest, name):
    clients, f = cohort.client_sds, trimmed(cohort.K)
    server = fastagg.aggregator(name, **{} if name == "median" else {"f": f})
    out = server.aggregate(None, clients)
    others: dict[str, Callable] = {}
    if cohort.K <= FEW:
        if name == "median":
            others = {"torch.median": lambda: torch_median(clients), "torch.sort": lambda: torch_sort(clients)}
            others |= of_flower("aggregate_median", clients)
            check(out, torch_sort(clients))
        else:
            others = {"torch.sort": lambda: torch_trimmed(clients, f)}
            others |= of_flower("aggregate_trimmed_avg", clients, f / cohort.K)
            check(out, torch_trimmed(clients, f))
    contest(cohort, name, lambda: server.aggregate(None, clients, out=out), others, memory=cohort.K <= FEW)
