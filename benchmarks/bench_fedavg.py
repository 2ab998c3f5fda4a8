"""The weighted sum: fastagg, the loops people write, the best PyTorch has, and what other frameworks call."""

import torch

import fastagg
from benchmarks import frameworks
from benchmarks.conftest import cohorts
from benchmarks.torch_code import CONTESTANTS

FRAMEWORKS = frameworks.fedavg()


@cohorts(
    ("resnet20", 5), ("resnet20", 20), ("resnet20", 100), ("lora", 5), ("lora", 20), ("lora", 100),
    ("resnet18", 5), ("resnet18", 20), ("resnet18", 100), ("vit_b", 5), ("vit_b", 20),
    ("resnet18", 20, "bfloat16"), ("resnet18", 20, "float16"), ("resnet18", 20, "float64"),
)  # fmt: skip
def test_fedavg(cohort, contest):
    g, clients, job = cohort.global_sd, cohort.client_sds, CONTESTANTS["fedavg"]
    out = fastagg.fedavg(g, clients)
    check(out, fastagg.mix(clients, [1 / cohort.K] * cohort.K, backend="reference"))
    others = {"usual loop": job.usual} | job.best
    if cohort.dtype == "float32":
        for other in others.values():
            job.agree(out, other(g, clients))
        for other in FRAMEWORKS.values():
            check(out, other(g, clients), rtol=1e-5, atol=1e-5)
        others |= FRAMEWORKS
    jobs = {name: lambda f=f: f(g, clients) for name, f in others.items()}
    jobs["fastagg, fresh output"] = lambda: fastagg.fedavg(g, clients)
    shown = (cohort.model, cohort.K, cohort.dtype) == ("resnet18", 20, "float32")
    contest(cohort, "fedavg", lambda: fastagg.fedavg(g, clients, out=out), jobs, memory=shown)


def check(ours: dict, theirs: dict, **tolerance) -> None:
    """Of what is a floating-point number: frameworks average BatchNorm's counters too"""
    for key, value in ours.items():
        if value.is_floating_point():
            torch.testing.assert_close(value, theirs[key].to(value.dtype), **tolerance)
