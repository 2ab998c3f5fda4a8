"""The GPU backends on a real device. Emulated and interpreted, they are tested everywhere else."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import fastagg
from fastagg._engine import backends
from fastagg._engine import table as tables
from helpers import every_method
from helpers import kernels as checks
from helpers.cohort import DTYPES, assert_same_bits, make
from helpers.every_method import METHODS
from helpers.kernels import SHAPES, assert_mixed, check_marks, check_times, gram_error, gram_tolerance, times
from helpers.ranked import every_mean, ranked_means, same_bits

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: the real kernels cannot run here"),
]
DEVICE = "cuda:0"


def to(sd, device=DEVICE):
    return {key: value.to(device) for key, value in sd.items()}


def cohort(K, shapes=None, dtype=torch.float32, **options):
    g, clients = make(K, shapes or SHAPES, dtype, **options)
    return to(g), [to(sd) for sd in clients]


@pytest.fixture(params=["cuda", "triton"])
def backend(request):
    why = backends.why_not(request.param, torch.device(DEVICE))
    if why:
        pytest.skip(why)
    fastagg.set_backend(request.param)
    return request.param


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("K", [1, 5, 7, 8, 20, 23, 24, 40, 64, 65, 70, 130])
def test_matches_the_reference(backend, dtype, K):
    g, clients = cohort(K, dtype=dtype)
    exact = fastagg.gram(g, clients, layerwise=True, backend="reference")
    got = fastagg.gram(g, clients, layerwise=True)
    tolerance = gram_tolerance(dtype, max(v.numel() for v in g.values()))
    assert got.matrix.device == torch.device(DEVICE)
    assert gram_error(got, exact) <= tolerance
    assert torch.equal(fastagg.gram(g, clients).matrix, got.model().matrix)
    weights = torch.rand(5, K, dtype=torch.float64)
    both, mixed = fastagg.gram_mix(g, clients, weights)
    assert torch.equal(both.matrix, got.model().matrix)
    on_cpu = fastagg.mix([to(sd, "cpu") for sd in clients], weights, backend="cpu")
    for m, (a, b, c) in enumerate(zip(mixed, fastagg.mix(clients, weights), on_cpu, strict=True)):
        assert_same_bits(a, b)
        assert_mixed(to(a, "cpu"), [to(sd, "cpu") for sd in clients], weights[m], dtype)
        if backend == "cuda":
            assert_same_bits(to(a, "cpu"), c)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("K", "M"), [(1, 1), (5, 3), (15, 1), (20, 3), (31, 1), (33, 1), (130, 3), (400, 1)])
def test_gram_times(backend, dtype, K, M):
    table, chosen = tables.build(*cohort(K, dtype=dtype)), backends.choose(torch.device(DEVICE))
    weights = torch.rand(M, K, dtype=torch.float64) - 0.2
    plain = check_times(chosen, table, dtype, weights)
    check_times(chosen, table, dtype, weights, per_layer=False)
    out, mixed = ([[torch.full_like(t, float("nan")) for t in table.clients[0]] for _ in range(M)] for _ in range(2))
    assert torch.equal(times(chosen, table, weights, out=out), plain)
    chosen.mix(table, weights[None], np.zeros(table.T, np.int32), mixed)
    for a, b in zip(out, mixed, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
    assert torch.equal(times(chosen, table, weights.to(DEVICE)), plain)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("K", [1, 5, 20, 32, 33, 100, 150, 300])
def test_means_by_rank(backend, dtype, K):
    g, clients = cohort(K, {"a.weight": (33,), "b.weight": (2060,)}, dtype=dtype)
    for k, sd in enumerate([g, *clients]):
        sd["count"] = torch.tensor([k * k, -k], device=DEVICE)
    chosen = backends.choose(torch.device(DEVICE))
    found = ranked_means(chosen, g, clients, every_mean(K))
    assert same_bits(found[0], ranked_means(backends.reference, g, clients, every_mean(K))[0])
    assert found[1] == [0, 0, 0]
    mixing = np.random.default_rng(K).random((K, K)) / K
    mixed = ranked_means(chosen, g, clients, every_mean(K)[:3], mixing=mixing)[0]
    expected = ranked_means(backends.reference, g, clients, every_mean(K)[:3], mixing=mixing)[0]
    for a, b in zip(mixed, expected, strict=True):
        for x, y in zip(a, b, strict=True):
            torch.testing.assert_close(x, y, rtol=torch.finfo(dtype).eps, atol=1e-14)


@pytest.mark.parametrize("size", [1e30, 1e-30])
def test_gram_times_of_values_whose_squares_leave_float32(backend, size):
    g, clients = cohort(40, {"a.weight": (5000,)}, torch.float64, scale=1.0)
    g, *clients = ({k: (v * size).float() for k, v in sd.items()} for sd in (g, *clients))
    weights = torch.rand(2, 40, dtype=torch.float64)
    check_times(backends.choose(torch.device(DEVICE)), tables.build(g, clients), torch.float32, weights)


@pytest.mark.parametrize("K", [3, 70])
@pytest.mark.parametrize("fill", [0.1, 1 / 3, 0.7])
def test_constant_data(backend, K, fill):
    g = {"w": torch.zeros(100_000, device=DEVICE)}
    clients = [{"w": torch.full((100_000,), fill + 0.01 * k, device=DEVICE)} for k in range(K)]
    assert gram_error(fastagg.gram(g, clients), fastagg.gram(g, clients, backend="reference")) <= 1e-6


@pytest.mark.parametrize("size", [1e25, 1e-25, 3e-38])
@pytest.mark.parametrize("K", [5, 70])
def test_values_whose_squares_leave_float32(backend, size, K):
    g, clients = cohort(K, {"a.weight": (5000,)}, torch.float64, scale=1.0)
    g, *clients = ({k: (v * size).float() for k, v in sd.items()} for sd in (g, *clients))
    assert gram_error(fastagg.gram(g, clients), fastagg.gram(g, clients, backend="reference")) <= 1e-6


def test_nobody_waits_for_the_device(backend):
    g, clients = cohort(20)
    weights = torch.rand(20, dtype=torch.float64)
    fastagg.gram_mix(g, clients, weights)  # kernels are loaded
    torch.cuda.set_sync_debug_mode("error")
    try:
        for w in (weights, weights.pin_memory().to(DEVICE, non_blocking=True)):
            fastagg.gram(g, clients)
            fastagg.mix(clients, w, on_nonfinite="pass")
            fastagg.gram_mix(g, clients, w, on_nonfinite="pass")
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_the_callers_stream(backend):
    g, clients = cohort(20)
    weights = torch.rand(20, dtype=torch.float64)
    expected, model = fastagg.gram_mix(g, clients, weights)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    changed = [{k: torch.zeros_like(v) for k, v in sd.items()} for sd in clients]
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)  # what the kernels read is written late, on the same stream
        for to_, from_ in zip(changed, clients, strict=True):
            for key in to_:
                to_[key].copy_(from_[key])
        gram, mixed = fastagg.gram_mix(g, changed, weights)
    stream.synchronize()
    assert torch.equal(gram.matrix, expected.matrix)
    assert_same_bits(mixed, model)


def test_cuda_graph(backend):
    g, clients = cohort(20)
    weights = torch.rand(20, dtype=torch.float64, device=DEVICE)
    out = {k: torch.empty_like(v) for k, v in g.items()}
    fastagg.gram_mix(g, clients, weights, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        gram, _ = fastagg.gram_mix(g, clients, weights, out=out)
    for sd in clients:
        for value in sd.values():
            value.mul_(1.5)
    weights.mul_(0.5)
    graph.replay()
    torch.cuda.synchronize()
    expected, model = fastagg.gram_mix(g, clients, weights)
    assert torch.equal(gram.matrix, expected.matrix)
    assert_same_bits(out, model)


def test_a_client_that_is_not_finite_is_named_except_in_a_graph(backend):
    g, clients = cohort(20)
    out, weights = {k: torch.empty_like(v) for k, v in g.items()}, torch.rand(20, dtype=torch.float64)
    fastagg.mix(clients, weights, out=out)
    key = list(g)[-2]
    clients[7][key].view(-1)[-1] = float("nan")
    for call in (lambda: fastagg.mix(clients, weights), lambda: fastagg.gram_mix(g, clients, weights)):
        with pytest.raises(fastagg.NonFiniteError, match=f"client 7: key '{key}'"):
            call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fastagg.mix(clients, weights, out=out)
    graph.replay()
    assert out[key].view(-1)[-1].isnan()


def test_outputs_that_are_not_finite_are_marked(backend, monkeypatch):
    monkeypatch.setattr(checks, "make", cohort)
    for dtype in DTYPES:
        check_marks(backends.load(backend)[0], dtype, 3)


def test_a_graph_of_an_unknown_table_is_refused(backend):
    g, clients = cohort(3, {"w": (5,)})
    with pytest.raises(RuntimeError, match="make the same call once before"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        fastagg.gram(g, clients)


def test_models_on_several_devices(backend):
    g, clients = cohort(3, {"w": (5,)})
    with pytest.raises(fastagg.InputError, match=r"client 1: key 'w' is on cpu, expected cuda:0"):
        fastagg.gram(g, [clients[0], to(clients[1], "cpu"), clients[2]])
    with pytest.raises(fastagg.InputError, match=r"client 0: key 'w' is on cuda:0, expected cpu"):
        fastagg.gram(to(g, "cpu"), clients)
    with pytest.raises(fastagg.InputError, match=r"key 'w' is .* on cpu"):
        fastagg.mix(clients, torch.rand(3), out=to(g, "cpu"))


@pytest.mark.parametrize("name", METHODS)
def test_every_method_agrees_with_the_cpu(backend, name):
    g, clients = every_method.cohort(8, scale=0.1)
    inputs = every_method.round_inputs(name, 8)
    fastagg.set_backend("auto")
    expected = every_method.run(name, g, clients, range(1, 9), inputs=inputs)
    fastagg.set_backend(backend)
    got = every_method.run(name, to(g), [to(sd) for sd in clients], range(1, 9), inputs=inputs)
    expected, got = (x if isinstance(x, list) else [x] for x in (expected, got))
    for a, b in zip(got, expected, strict=True):
        for key in b:
            torch.testing.assert_close(a[key].cpu(), b[key], rtol=1e-5, atol=1e-5)


def test_gradient_of_cpu_weights(backend):
    _, clients = cohort(5, {"a.weight": (3000,)})
    weights = torch.rand(5, dtype=torch.float64, requires_grad=True)
    fastagg.mix(clients, weights)["a.weight"].sum().backward()
    expected = torch.stack([sd["a.weight"].double().sum() for sd in clients]).cpu()
    torch.testing.assert_close(weights.grad, expected, rtol=1e-5, atol=1e-4)
