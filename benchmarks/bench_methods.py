"""Every method on a round of real size, and PyTorch's code for one of each family."""

import pytest
import torch

import fastagg
from benchmarks.conftest import cohorts
from benchmarks.torch_code import CONTESTANTS

CLASSES = 10
OPTIONS = {"krum": {"f": 2}, "multi_krum": {"f": 2}, "cwfedavg": {"head": "fc.weight"}}
WRITTEN_IN_PYTORCH = ("ldawa", "krum", "geometric_median", "fedadam", "fedamp")
ELSEWHERE = ("fedavg", "fedawa", "fedlaw")  # in the suites of their own
METHODS = [method.name for method in fastagg.methods() if method.name not in ELSEWHERE]


def round_info(name: str, K: int) -> dict:
    generator = torch.Generator().manual_seed(0)
    return {
        "feddisco": {"label_dist": torch.rand(K, CLASSES, generator=generator)},
        "cwfedavg": {"class_dist": torch.rand(K, CLASSES, generator=generator)},
        "fednova": {"local_steps": [1 + k for k in range(K)]},
    }.get(name, {})


@pytest.mark.parametrize("name", METHODS)
@cohorts(("resnet18", 20))
def test_method(cohort, contest, name):
    g, clients = cohort.global_sd, cohort.client_sds
    server = fastagg.aggregator(name, **OPTIONS.get(name, {}))
    info = round_info(name, cohort.K)
    result = server.aggregate(g, clients, **info)
    others = {}
    if name in WRITTEN_IN_PYTORCH:
        job = CONTESTANTS[name]
        others = job.in_pytorch()
        for other in others.values():
            job.agree(job.fastagg(g, clients), other(g, clients))
    out = {} if isinstance(result, list) and result.clusters else {"out": result}
    jobs = {other: lambda f=f: f(g, clients) for other, f in others.items()}
    if out:
        jobs["fastagg, fresh output"] = lambda: server.aggregate(g, clients, **info)
    contest(cohort, name, lambda: server.aggregate(g, clients, **info, **out), jobs)


def test_every_method_is_measured():
    """A method that is added is measured, or this says where"""
    assert set(METHODS) | set(ELSEWHERE) == {method.name for method in fastagg.methods()}
