"""What a call on a GPU waits for, and what it does in a CUDA graph's capture, on a device that is only pretended."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import fastagg
from fastagg._engine import backends
from fastagg._engine import table as tables
from helpers import emulated
from helpers.cohort import assert_same_bits, make
from helpers.kernels import times
from helpers.pretended import GPU, Pretended

SHAPES = {"a.weight": (40, 30), "a.bias": (7,), "bn.running_mean": (5,)}
K = 3


@pytest.fixture(params=["cuda", "triton"])
def gpu(request, monkeypatch):
    """The device; Triton's kernels are prepared, but not run"""
    kernels = emulated.kernels()
    if request.param == "triton":
        kernels = pytest.importorskip("fastagg._engine.backends.triton", reason="triton is not installed")
        monkeypatch.setattr(kernels, "_launch", lambda *args, **constants: None)
    with Pretended(monkeypatch, kernels) as device:
        device.runs = request.param == "cuda"
        yield device


@pytest.fixture
def cohort(gpu):
    g, clients = make(K, SHAPES)
    for k, sd in enumerate([g, *clients]):
        sd["bn.num_batches_tracked"] = torch.tensor(k)
    return gpu.put(g), [gpu.put(sd) for sd in clients]


def weights_on(gpu, where):
    w = torch.rand(K, dtype=torch.float64)
    return gpu.placed(w) if where == "device" else w


@pytest.mark.parametrize("where", ["host", "device"])
def test_pass_never_reads_and_raise_reads_once(gpu, cohort, where):
    g, clients = cohort
    weights = weights_on(gpu, where)
    out = fastagg.mix(clients, weights, on_nonfinite="pass")
    assert out["a.weight"].device == GPU
    fastagg.gram_mix(g, clients, weights, on_nonfinite="pass")
    fastagg.gram(g, clients)
    assert gpu.reads == 0
    fastagg.mix(clients, weights, out=out)
    assert gpu.reads == 1
    fastagg.gram_mix(g, clients, weights, out=out)
    assert gpu.reads == 2


@pytest.mark.parametrize("where", ["host", "device"])
def test_a_capture_neither_waits_nor_copies(gpu, cohort, where):
    g, clients = cohort
    weights, out = weights_on(gpu, where), gpu.put(g)
    calls = [
        lambda: fastagg.mix(clients, weights, out=out),
        lambda: fastagg.gram_mix(g, clients, weights, out=out),
        lambda: fastagg.gram(g, clients),
    ]
    for call in calls:
        needs_one_call_before_a_capture(gpu, call)


def needs_one_call_before_a_capture(gpu, call):
    with gpu.capture(), pytest.raises(RuntimeError, match="make the same call once before"):
        call()
    call()
    with gpu.capture():
        call()


@pytest.mark.parametrize("where", ["host", "device"])
@pytest.mark.parametrize("mix", [False, True])
def test_a_capture_of_gram_times(gpu, cohort, where, mix):
    weights, out = weights_on(gpu, where)[None], [list(gpu.put(cohort[0]).values())] if mix else None
    needs_one_call_before_a_capture(gpu, lambda: times(backends.choose(GPU), tables.build(*cohort), weights, out=out))
    assert gpu.reads == 0


def test_the_pretended_device_notices_a_read(gpu, cohort):
    with gpu.capture(), pytest.raises(RuntimeError, match="not permitted when stream is capturing"):
        cohort[0]["a.bias"].cpu()
    with gpu.capture(), pytest.raises(RuntimeError, match="not permitted when stream is capturing"):
        bool((cohort[0]["a.bias"] > 0).all())


def test_the_example_of_the_page(gpu, cohort, monkeypatch):
    class Graph:
        replay = staticmethod(lambda: None)

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", lambda graph: gpu.capture())
    page = Path(__file__).parents[2] / "docs/gpu.md"
    if not page.exists():
        pytest.skip("an sdist has no docs")
    example = re.search(r"## CUDA graphs.*?```python\n(.*?)```", page.read_text(), re.DOTALL)[1]
    exec(example, {"torch": torch, "fastagg": fastagg, "K": K, "clients": cohort[1]})


def test_a_client_that_is_not_finite_is_named_except_in_a_capture(gpu, cohort):
    if not gpu.runs:
        pytest.skip("nothing is computed")
    g, clients = cohort
    weights = torch.tensor([0.5, 0.5, 0.0], dtype=torch.float64)
    good = fastagg.mix(clients, weights)
    with torch._C.DisableTorchFunction():
        clients[2]["bn.running_mean"][4] = float("inf")
    for call in (
        lambda **o: fastagg.mix(clients, weights, **o),
        lambda **o: fastagg.gram_mix(g, clients, weights, **o),
    ):
        with pytest.raises(fastagg.NonFiniteError, match=r"client 2: key 'bn.running_mean' has values that are not"):
            call(out=good)
        with gpu.capture():
            call(out=good)


def test_methods_in_a_capture(gpu, cohort):
    if not gpu.runs:
        pytest.skip("nothing is computed")
    g, clients = cohort
    out = fastagg.fedavg(g, clients, [1, 2, 3])
    fastagg.fedavg(g, clients, [1, 2, 3], out=out)
    with gpu.capture():
        fastagg.fedavg(g, clients, [1, 2, 3], out=out)
    fastagg.ldawa(g, clients)
    with gpu.capture(), pytest.raises(RuntimeError, match=r"a CUDA graph is being captured: .* Capture fastagg.gram"):
        fastagg.ldawa(g, clients)


def test_results_are_those_of_the_cpu(gpu, cohort):
    if not gpu.runs:
        pytest.skip("nothing is computed")
    weights = torch.rand(K, dtype=torch.float64)
    got = fastagg.mix(cohort[1], weights)
    with torch._C.DisableTorchFunction():
        assert backends.choose(torch.device("cpu")) is backends.cpu
        assert_same_bits(got, fastagg.mix([dict(sd) for sd in cohort[1]], weights))
