"""Many clients: methods that compare no pairs of clients cost a few reads of memory, whatever their number."""

import pytest
import torch

import fastagg
from benchmarks.conftest import cohorts

OPTIONS = {"fedawa_released": {"variant": "released"}}
METHODS = ["fedavg", "fedawa_released", "fedawa", "weiavg", "ldawa", "fedadp", "simagg"]


def server_of(name: str, **more) -> fastagg.Aggregator:
    return fastagg.aggregator(name.partition("_")[0], **OPTIONS.get(name, {}), **more)


@pytest.mark.parametrize("name", METHODS)
@cohorts(("mlp_6m", 100), ("mlp_half", 1000))
def test_many(cohort, contest, name):
    run(cohort, contest, f"many_{name}", name)


@pytest.mark.parametrize("name", ["fedavg", "fedawa_released", "fedawa"])
@cohorts(("mlp_1m", 20), ("mlp_1m", 100), ("mlp_1m", 400), ("mlp_1m", 1000))
def test_over_clients(cohort, contest, name):
    run(cohort, contest, f"over_k_{name}", name)


def run(cohort, contest, job: str, name: str) -> None:
    g, clients = cohort.global_sd, cohort.client_sds
    server, ids = server_of(name), list(range(cohort.K))
    out = server.aggregate(g, clients, client_ids=ids)
    check(name, g, clients[:60])
    formed = {} if out.gram is None else {"formed": out.gram.formed}
    contest(
        cohort, job, lambda: server.aggregate(g, clients, client_ids=ids, out=out), {}, multiply_adds=False, **formed
    )


def check(name: str, g: dict, some: list[dict]) -> None:
    """Against the same method on the Gram, which is formed; the benchmarks of the Gram check that one"""
    one, other = (server_of(name, gram=gram).aggregate(g, some).weights for gram in ("auto", "full"))
    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-7)
