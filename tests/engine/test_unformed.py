"""A Gram that is never formed: the same answers, from products with vectors."""

from __future__ import annotations

import gc
import math
import weakref

import numpy as np
import pytest
import torch

import fastagg
from fastagg._engine import forming, rounds
from fastagg._engine.in_memory import InMemory
from fastagg._engine.registry import registry
from helpers.cohort import assert_same_bits, flat, make
from helpers.every_method import IDS, OF_EXAMPLE_NET, OPTIONS, K, cohort, round_inputs, some_of
from helpers.forming import never_formed
from helpers.model_files import load_model, read_round, write_round

# FedFomo, which has a model per client and needs losses, and FLTrust, which needs a model, have their own tests
ONLY_PRODUCTS = [
    name for name, cls in registry().items()
    if cls.reads == "products" and cls.produces == "global" and name not in OF_EXAMPLE_NET
]  # fmt: skip
CASES = [(name, {}) for name in ONLY_PRODUCTS] + [
    ("fedawa", {"variant": "released"}),
    ("fedawa", {"variant": "released", "gamma": 0.9, "layerwise": True}),
    ("fedawa", {"variant": "released", "steps": 3, "optimizer": "sgd", "reg": "euc"}),
    ("fedawa", {"variant": "cos"}),
    ("fedawa", {"layerwise": True, "reg": "euc"}),
    ("ldawa", {"layerwise": False}),
    ("simagg", {"layerwise": False}),
    ("centred_clipping", {"tau": 0.1, "iterations": 3, "center": "previous"}),
    ("fedadam", {"weights": "fedadp"}),
    ("fedavgm", {"weights": {"method": "fedawa", "variant": "released"}}),
]
SIZES = [3.0, 1.0, 4.0, 1.5, 9.0, 2.0, 6.0]


def as_dtype(sd, dtype):
    return {key: value.to(dtype) if value.is_floating_point() else value for key, value in sd.items()}


def several_rounds(name, options, dtype, **more):
    server = fastagg.aggregator(name, **OPTIONS[name], **options, **more)
    results = []
    for seed in range(3):
        g, *clients = (as_dtype(sd, dtype) for sd in (lambda g, c: (g, *c))(*cohort(seed=seed)))
        results.append(server.aggregate(g, clients, SIZES, IDS, **round_inputs(name)))
    return results


@pytest.mark.parametrize(("name", "options"), CASES, ids=str)
@pytest.mark.parametrize(("dtype", "close"), [(torch.float64, 1e-9), (torch.float32, 2e-5)], ids=str)
def test_every_method_gives_the_same_answer(name, options, dtype, close):
    """In float64 to rounding. In float32 both Grams are off by up to 1e-6, which Adam may magnify."""
    expected = several_rounds(name, options, dtype, gram="full")
    with never_formed():
        found = several_rounds(name, options, dtype)
    for a, b in zip(found, expected, strict=True):
        assert not a.gram.formed
        assert b.gram.formed
        torch.testing.assert_close(a.weights, b.weights, rtol=close, atol=close)
        for key in b:
            torch.testing.assert_close(a[key], b[key], rtol=close, atol=close)
        torch.testing.assert_close(a.gram.norms(), b.gram.norms(), rtol=1e-6, atol=0)
        torch.testing.assert_close(a.gram.cosine("global"), b.gram.cosine("global"), rtol=1e-6, atol=1e-6)
        assert torch.equal(a.gram.numel, b.gram.numel)


def part_of_a_round(server, g, clients, order):
    """Of some clients, in this order"""
    inputs = some_of(server.name, round_inputs(server.name), order)
    return server.aggregate(
        g, [clients[k] for k in order], [SIZES[k] for k in order], [IDS[k] for k in order], **inputs
    )


@pytest.mark.parametrize(("name", "options"), CASES, ids=str)
def test_the_order_of_clients_does_not_change_the_bits(name, options):
    order = [3, 0, 6, 2, 5, 1, 4]
    g, clients = cohort()
    with never_formed():
        a, b = (fastagg.aggregator(name, **OPTIONS[name], **options) for _ in range(2))
        one, other = part_of_a_round(a, g, clients, range(K)), part_of_a_round(b, g, clients, order)
    assert_same_bits(one, other)
    assert torch.equal(one.weights[..., order], other.weights)
    assert torch.equal(one.gram.norms()[..., order], other.gram.norms())


@pytest.mark.parametrize(("name", "options"), CASES, ids=str)
def test_dropped_clients_are_as_if_they_had_not_been_there(name, options):
    g, clients = cohort()
    clients[2]["fc.weight"][0, 0] = math.nan
    here = [0, 1, 3, 4, 5, 6]
    with never_formed():
        a, b = (fastagg.aggregator(name, **OPTIONS[name], **options, on_bad_client=bad) for bad in ("drop", "raise"))
        with pytest.raises(fastagg.NonFiniteError, match=r"id 'a'.*'fc.weight'"):
            part_of_a_round(b, g, clients, range(K))
        dropped, without = part_of_a_round(a, g, clients, range(K)), part_of_a_round(b, g, clients, here)
    assert_same_bits(dropped, without)
    assert list(dropped.dropped) == ["a"]
    assert dropped.gram.absent == (2,)
    assert dropped.gram.norms()[..., 2].eq(0).all()
    assert torch.equal(dropped.gram.present().norms(), without.gram.norms())


@pytest.mark.parametrize(("name", "options"), CASES, ids=str)
def test_files_give_the_bits_of_memory(name, options, tmp_path):
    if options.get("center") == "previous":
        pytest.skip("not on files")
    g, clients = make(5, {"a.weight": (300, 401), "a.bias": (301,), "bn.running_mean": (70_000,), "b.x": (100_001,)})
    center, paths = write_round(tmp_path / "in", g, clients)
    g, clients = read_round(center, paths)
    ids, inputs, out = [f"c{k}" for k in range(5)], round_inputs(name, 5), tmp_path / "o.safetensors"
    with never_formed():
        expected = fastagg.aggregator(name, **options).aggregate(g, clients, client_ids=ids, **inputs)
        for memory in (8_000_000, 10**9):
            found = fastagg.aggregate_files(name, center, paths, out, memory=memory, **inputs, **options)
            assert not found.gram.formed
            assert torch.equal(found.weights, expected.weights)
            assert torch.equal(found.gram.squares, expected.gram.squares)
            assert_same_bits(load_model(out), dict(expected))


@pytest.mark.parametrize("layerwise", [False, True])
def test_gram_times_is_the_gram_times_vectors(layerwise):
    g, clients = cohort()
    whole = fastagg.gram(g, clients, layerwise=layerwise)
    V = torch.rand(3, K, dtype=torch.float64)
    gram = fastagg.gram_times(g, clients, V, layerwise=layerwise)
    torch.testing.assert_close(gram.squares, whole.squares, rtol=1e-6, atol=0)
    torch.testing.assert_close(gram.along_global, whole.along_global, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(gram.global_square, whole.global_square)
    for v in V:
        torch.testing.assert_close(gram @ v, whole @ v, rtol=1e-5, atol=1e-9)
        assert np.array_equal(gram @ v.numpy(), (gram @ v).numpy())
        torch.testing.assert_close(gram.projection(v), whole.projection(v), rtol=1e-5, atol=1e-9)
        torch.testing.assert_close(gram.model() @ v, whole.model() @ v, rtol=1e-5, atol=1e-9)
    several = V.T if not layerwise else V.T.expand(len(gram.layers), K, 3)
    torch.testing.assert_close(gram @ several, whole @ several, rtol=1e-5, atol=1e-9)
    assert (gram @ torch.zeros(K, dtype=torch.float64)).eq(0).all()


def test_one_vector_for_each_layer():
    g, clients = cohort()
    whole = fastagg.gram(g, clients, layerwise=True)
    v = torch.rand(3, K, dtype=torch.float64)
    torch.testing.assert_close(
        fastagg.gram_times(g, clients, v[:, None], layerwise=True) @ v, whole @ v, rtol=1e-5, atol=1e-9
    )


def test_what_was_not_computed_is_refused_with_a_remedy():
    gram = fastagg.gram_times(*cohort(), torch.ones(K))
    looks = (
        lambda: gram.matrix, lambda: gram.cosine(), lambda: gram.distances(), lambda: gram.gaussian(),
        lambda: gram.models(), lambda: gram @ torch.arange(7.0),
    )  # fmt: skip
    for look in looks:
        with pytest.raises(RuntimeError, match=r"not formed.*gram='full'"):
            look()
    assert repr(gram).startswith("UnformedGram(K=7")
    seen = fastagg.diagnostics(gram, torch.ones(K))
    assert seen.cosine is None
    assert seen.coherence is None
    assert seen.update_norms.shape == (K,)


def test_with_many_clients_a_gram_is_formed_only_where_it_is_cheaper():
    g, clients = make(120, {"a.weight": (50,)})
    released = fastagg.aggregator("fedawa", variant="released")
    assert not released.aggregate(g, clients, client_ids=range(120)).gram.formed
    assert fastagg.aggregator("fedawa", steps=100).aggregate(g, clients).gram.formed  # 200 products
    assert fastagg.weiavg(g, clients, gram="full").gram.formed
    assert fastagg.weiavg(g, clients[: forming.FEW]).gram.formed
    assert fastagg.simprox(g, clients).gram.formed  # which compares pairs


@pytest.mark.parametrize(("name", "options"), [("fedawa", {}), ("fedawa", {"layerwise": True}), ("simagg", {})])
def test_clients_much_closer_to_each_other_than_to_the_global_model(name, options):
    """Distances that a float32 Gram centred on the global model has no digits left for"""
    shapes = {"a.weight": (4000,), "b.weight": (3000,)}
    g, clients = make(9, shapes, torch.float64, scale=1e-5, seed=1)
    far = {key: value + 5 for key, value in g.items()}
    clients = [as_dtype(sd, torch.float32) for sd in clients]
    exact = fastagg.aggregator(name, gram="full", **options).aggregate(
        far, [as_dtype(sd, torch.float64) for sd in clients]
    )
    with never_formed():
        found = fastagg.aggregator(name, **options).aggregate(as_dtype(far, torch.float32), clients)
    assert not found.gram.formed
    torch.testing.assert_close(found.weights, exact.weights, rtol=1e-3, atol=1e-5)
    assert flat(found).isfinite().all()


def test_a_vector_of_any_magnitude():
    g, clients = cohort()
    whole = fastagg.gram(g, clients)
    v = torch.rand(K, dtype=torch.float64)
    for scale in (1e-200, 1e-30, 1e30, 1e200):
        found = fastagg.gram_times(g, clients, scale * v) @ (scale * v)
        torch.testing.assert_close(found / scale, whole @ v, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_updates_whose_products_leave_float32(dtype):
    """Squares of the clients fit into float32, their sum's products with them do not"""
    generator = torch.Generator().manual_seed(0)
    g = {"a.weight": torch.zeros(600, dtype=dtype)}
    common = torch.randn(600, generator=generator)
    clients = [
        {"a.weight": (4e17 * common if k % 3 == 0 else torch.randn(600, generator=generator)).to(dtype)}
        for k in range(45)
    ]
    for name in ("weiavg", "fedadp", "simagg"):
        found, expected = (fastagg.aggregator(name, gram=gram).aggregate(g, clients) for gram in ("auto", "full"))
        assert not found.gram.formed
        torch.testing.assert_close(found.weights, expected.weights, rtol=1e-4, atol=1e-6)


def test_a_round_holds_no_client_after_it():
    g, clients = cohort()
    gone = weakref.ref(clients[3]["fc.weight"])
    gc.collect()
    gc.disable()
    try:
        with never_formed():
            result = fastagg.aggregator("fedawa").aggregate(g, clients)
        del clients
        assert gone() is None
        assert not result.gram.formed
    finally:
        gc.enable()


def test_products_are_the_callers_own():
    v = np.ones(K)
    gram = fastagg.gram_times(*cohort(), v)
    before = (gram @ v).copy()
    (gram @ v)[:] = 0
    assert np.array_equal(gram @ v, before)


def test_parts_of_an_open_gram_multiply(monkeypatch):
    """What a method makes of a Gram multiplies with further vectors, as long as the round lasts"""
    g, clients = cohort()
    whole = fastagg.gram(g, clients, layerwise=True)
    v, w = np.linspace(0, 1, K), np.linspace(1, 2, 3)
    seen = []

    def weigh(self, cohort):
        gram = cohort.gram(True)
        seen.extend([gram.model() @ v, gram.model().part([5, 0, 2]) @ w])
        return cohort.shares

    monkeypatch.setattr(registry()["fedadp"], "weigh", weigh)
    with never_formed():
        fastagg.fedadp(g, clients)
    np.testing.assert_allclose(seen[0], whole.model() @ v, rtol=1e-5, atol=1e-9)
    np.testing.assert_allclose(seen[1], whole.model().part([5, 0, 2]) @ w, rtol=1e-5, atol=1e-9)


def test_vectors_that_do_not_fit_are_named():
    g, clients = cohort()
    with pytest.raises(fastagg.InputError, match=r"vectors have shape \(3,\), expected \[K\] or \[M, K\] with K = 7"):
        fastagg.gram_times(g, clients, [1.0, 2.0, 3.0])
    low = torch.ones(K, dtype=torch.bfloat16)
    assert torch.equal(fastagg.gram_times(g, clients, low) @ low, fastagg.gram_times(g, clients, np.ones(K)) @ low)


def test_a_server_optimiser_reads_no_more_than_its_weights_need():
    server = fastagg.aggregator("fedavgm", weights={"method": "fedawa", "variant": "released"})
    g, clients = make(60, {"a.weight": (50,)})
    read = []

    class Counted(InMemory):
        def gram_times(self, *args, **options):
            read.append("times")
            return super().gram_times(*args, **options)

    rounds.run(server, Counted(), g, clients, list(range(1, 61)), None, None, {})
    assert len(read) == 2
