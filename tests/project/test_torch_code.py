"""The PyTorch code of the benchmarks gives fastagg's answers, and `agree` tells when an answer is another."""

import sys
from pathlib import Path

import pytest
import torch

from helpers.cohort import assert_unchanged, make_with_batch_norm, snapshot

sys.path.insert(0, str(Path(__file__).parents[2]))  # benchmarks are not installed

from benchmarks import torch_code
from benchmarks.torch_code import CONTESTANTS

SHAPES = {
    "scale": (3,),  # in no module
    "conv.weight": (8, 3, 3, 3),
    "bn.weight": (8,),
    "bn.bias": (8,),
    "bn.running_mean": (8,),
    "bn.running_var": (8,),
    "fc.weight": (10, 40),
    "fc.bias": (10,),
}
PAIRS = [(job, how) for job in CONTESTANTS.values() for how in ("usual", *job.best)]
every_contestant = pytest.mark.parametrize(("job", "how"), PAIRS, ids=[f"{job.name}-{how}" for job, how in PAIRS])


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    """The larger tensors are more than one block, the last of them shorter; such models need no threads"""
    monkeypatch.setattr(torch_code, "BLOCK", 150)
    torch.set_num_threads(1)


def cohort(job, seed=0, scale=0.3):
    return make_with_batch_norm(max(5, job.least), SHAPES, torch.float32, seed=seed, scale=scale)


def contestant(job, how):
    return job.usual if how == "usual" else job.best[how]


@every_contestant
@pytest.mark.parametrize("scale", [0.01, 0.3])
def test_agrees_with_fastagg(job, how, scale):
    for seed in range(3):
        g, clients = cohort(job, seed, scale)
        job.agree(job.fastagg(g, clients), contestant(job, how)(g, clients))


@every_contestant
def test_takes_nothing_of_the_caller(job, how):
    """Neither changes the models nor returns their memory, so that all contestants do the same work"""
    g, clients = cohort(job)
    before = snapshot(g, *clients)
    result = contestant(job, how)(g, clients)
    assert_unchanged([g, *clients], before)
    given = {value.data_ptr() for sd in (g, *clients) for value in sd.values()}
    for model in result if isinstance(result, list) else [result[0] if isinstance(result, tuple) else result]:
        values = model.values() if isinstance(model, dict) else [model]
        assert given.isdisjoint(value.data_ptr() for value in values)


@every_contestant
def test_agree_notices_another_answer(job, how):
    """The answer for the same clients, one of which trained on: it moved as far again as it is from g"""
    g, clients = cohort(job)
    ours = job.fastagg(g, clients)
    chosen = int(ours.weights.argmax()) if job.name == "krum" else 0
    clients[chosen] = {key: 2 * value - g[key] for key, value in clients[chosen].items()}
    theirs = contestant(job, how)(g, clients)
    with pytest.raises(AssertionError):
        job.agree(ours, theirs)


@pytest.mark.parametrize("job", [job for name, job in CONTESTANTS.items() if name != "gram"], ids=lambda job: job.name)
def test_fastagg_takes_out(job):
    g, clients = cohort(job)
    job.agree(job.fastagg(g, clients, out=job.fastagg(g, clients)), job.usual(g, clients))


@pytest.mark.parametrize("how", ["usual", *CONTESTANTS["fedavg"].best])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_fedavg_of_other_dtypes(how, dtype):
    g, clients = make_with_batch_norm(5, SHAPES, dtype, seed=0, scale=0.3)
    theirs = contestant(CONTESTANTS["fedavg"], how)(g, clients)
    error = 8 * torch.finfo(dtype).eps  # rounded after every client
    for key, value in CONTESTANTS["fedavg"].fastagg(g, clients).items():
        torch.testing.assert_close(theirs[key], value, rtol=error, atol=error)
