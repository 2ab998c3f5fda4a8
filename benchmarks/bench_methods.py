"""Every method on a round of real size, and PyTorch's code for one of each family."""

import pytest

import fastagg
from benchmarks.conftest import cohorts
from benchmarks.torch_code import CONTESTANTS
from fastagg._engine.options import options_of
from fastagg._engine.registry import registry

ELSEWHERE = {"fedavg", "fedawa", "median", "trimmed_mean"}  # in the suites of their own


def depends_on_the_model(cls: type) -> bool:
    """Its example round is of a model of its own: measured in a suite of its own"""
    takes_the_module = any(option.role == "module" and name != "params" for name, option in options_of(cls).items())
    return takes_the_module or any(spec.kind == "server_model" for spec in cls.round_inputs)


METHODS = {name: cls for name, cls in sorted(registry().items()) if name not in ELSEWHERE}


@pytest.mark.parametrize("name", [name for name, cls in METHODS.items() if not depends_on_the_model(cls)])
@cohorts(("resnet18", 20))
def test_method(cohort, contest, name):
    g, clients = cohort.global_sd, cohort.client_sds
    options, inputs = METHODS[name].example_round(cohort.K)
    server = fastagg.aggregator(name, **options)

    def play(**more):
        newest = {} if server.version is None else {"version": [server.version] * cohort.K}
        return server.aggregate(g, clients, **inputs | newest, **more)

    result = play()
    others = {}
    if name in CONTESTANTS:
        job = CONTESTANTS[name]
        others = job.in_pytorch()
        for other in others.values():
            job.agree(job.fastagg(g, clients), other(g, clients))
    out = {} if server.produces == "clusters" else {"out": result}
    jobs = {other: lambda f=f: f(g, clients) for other, f in others.items()}
    if out:
        jobs["fastagg, fresh output"] = play
    contest(cohort, name, lambda: play(**out), jobs)
