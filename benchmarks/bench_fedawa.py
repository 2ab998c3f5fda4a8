"""FedAWA in all its forms, against the usual PyTorch and PyTorch at its best."""

import pytest

import fastagg
from benchmarks.bench_gram import error
from benchmarks.conftest import cohorts
from benchmarks.torch_code import CONTESTANTS


@pytest.mark.parametrize("name", ["fedawa", "fedawa_layerwise", "fedawa_released"])
@cohorts(("resnet20", 5), ("resnet20", 20), ("resnet20", 100), ("lora", 20), ("resnet18", 20))
def test_fedawa(cohort, contest, name):
    g, clients, job = cohort.global_sd, cohort.client_sds, CONTESTANTS[name]
    others = job.in_pytorch()
    out = job.fastagg(g, clients)
    for other in others.values():
        job.agree(out, other(g, clients))
    jobs = {other: lambda f=f: f(g, clients) for other, f in others.items()}
    jobs["torch._foreach_ FedAvg"] = lambda: CONTESTANTS["fedavg"].best["torch._foreach_"](g, clients)
    jobs["fastagg, fresh output"] = lambda: job.fastagg(g, clients)
    shown = cohort.model == "resnet18"
    contest(cohort, name, lambda: job.fastagg(g, clients, out=out), jobs, memory=shown)


@pytest.mark.parametrize("steps", [1, 10, 100, 1000])
@cohorts(("resnet18", 20))
def test_fedawa_paper(cohort, contest, steps):
    """The paper's objective needs the Gram before the weights: two reads"""
    g, clients = cohort.global_sd, cohort.client_sds
    options = {"variant": "paper", "steps": steps}
    out = fastagg.fedawa(g, clients, **options)
    native, reference = (fastagg.gram(g, clients, backend=b) for b in ("cpu", "reference"))
    assert error(native.matrix, reference.matrix) < 1e-6
    contest(cohort, "fedawa_paper", lambda: fastagg.fedawa(g, clients, out=out, **options), {}, steps=steps)
