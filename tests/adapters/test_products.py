"""The Gram of adapters is that of their dense updates."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import fastagg
from fastagg._engine.adapters import access
from fastagg._engine.adapters.factors import CHUNK, Factors, core_of
from helpers.adapters import SHAPES, adapter, cohort, dense, dense_gram, flat, relative


def gram_of(g, clients, **more):
    return fastagg.lora.aggregate(g, clients, method="krum", f=0, **more).gram


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_it_is_that_of_the_dense_updates(dtype):
    g, clients = cohort(dtype=dtype)
    assert relative(gram_of(g, clients).matrix, dense_gram(g, clients)) < 1e-12  # whatever the dtype holds is exact


def test_without_a_global_adapter_the_updates_are_the_products():
    _, clients = cohort()
    found = gram_of(None, clients).matrix
    expected = dense_gram({key: torch.zeros_like(value) for key, value in clients[0].items()}, clients)
    assert relative(found, expected) < 1e-13
    assert not found[0].any()


@pytest.mark.parametrize("tiny", [1e-2, 1e-4, 1e-6])
def test_tiny_updates_keep_their_digits(tiny):
    """Factors move by a few units in the last place of float32. In float64, the reference loses some digits too: it
    subtracts two products of 1e1 whose difference is 1e1 * tiny."""
    g, clients = cohort(scale=tiny)
    error = relative(gram_of(g, clients).matrix[1:, 1:], dense_gram(g, clients)[1:, 1:])
    assert error < 1e-13 / tiny
    g32, c32 = ({m: value.float() for m, value in dense(sd).items()} for sd in (g, clients[0]))
    lost = sum(float((c32[m] - g32[m]).double().sub(dense(clients[0])[m] - dense(g)[m]).square().sum()) for m in g32)
    length = float(gram_of(g, clients).squares[0])
    assert lost / length > (1e-9 / tiny) ** 2  # the same with products that are rounded to float32


def test_a_step_along_the_scale_of_the_factors_is_no_update():
    """B R^-1 and R A are the same product, however far the factors have moved"""
    g, _ = cohort(dtype=torch.float64)
    turned = {key: value * (2.0 if "lora_A" in key else 0.5) for key, value in g.items()}
    gram = gram_of(g, [turned] * 3)
    assert gram.squares.max() < 1e-13 * gram.global_square


@pytest.mark.parametrize("ranks", [(1, 4, 9), (4, 4, 2), (6, 1, 1)], ids=str)
def test_ranks_may_differ(ranks):
    g = adapter(4)
    clients = [adapter(rank, seed=1 + k) for k, rank in enumerate(ranks)]
    config = {"lora_alpha": 8, "peft_type": "LORA"}
    given = [fastagg.lora.Adapter(sd, config) for sd in (g, *clients)]
    expected = _scaled_gram([g, *clients], [4, *ranks], 8)
    assert relative(gram_of(given[0], given[1:]).matrix, expected) < 1e-12
    assert relative(gram_of(g, clients, scaling=lambda r: 8 / r).matrix, expected) < 1e-12


def _scaled_gram(adapters, ranks, alpha):
    rows = [flat(dense(sd, alpha / r)) for sd, r in zip(adapters, ranks, strict=True)]
    rows = torch.stack([rows[0], *(row - rows[0] for row in rows[1:])])
    return rows @ rows.T


def test_a_module_that_a_client_does_not_have_did_not_move():
    g, clients = cohort()
    gone = {key: value for key, value in clients[1].items() if "layers.1" not in key}
    kept = {**g, **gone}
    assert relative(gram_of(g, [clients[0], gone, *clients[2:]]).matrix,
                    dense_gram(g, [clients[0], kept, *clients[2:]])) < 1e-13  # fmt: skip


def test_plain_tensors_count_too():
    g, clients = cohort(plain=["classifier.weight"])
    assert relative(gram_of(g, clients).matrix, dense_gram(g, clients)) < 1e-5  # float32 sums, as of models


def test_layer_by_layer():
    g, clients = cohort(plain=["classifier.weight"])
    found = fastagg.lora.aggregate(g, clients, method="fedawa", layerwise=True).gram
    names = [name.removeprefix("base_model.model.") for name in found.layers]
    assert names == [*SHAPES, "classifier"]
    for at, module in enumerate(names):
        keep = [{key: v for key, v in sd.items() if f".{module}." in key} for sd in (g, *clients)]
        assert relative(found.matrix[at], dense_gram(keep[0], keep[1:])) < 1e-5
    assert found.numel.tolist() == [60 * 40, 24 * 40, 60 * 40, 35]


def test_more_columns_than_are_converted_at_a_time():
    shapes = {"m": (2 * CHUNK + 3, CHUNK + 1)}
    g, *clients = (adapter(3, shapes, seed=k) for k in range(4))
    assert relative(gram_of(g, clients).matrix, dense_gram(g, clients)) < 1e-13


def test_products_of_the_factors_themselves_follow():
    """Those that the Gram needed, of differences, give those of the sum to be truncated"""
    g, clients = cohort(3)
    [module] = {key.rpartition(".lora_")[0] for key in g if "layers.0.v" in key}
    fs = [Factors(sd[f"{module}.lora_A.weight"], sd[f"{module}.lora_B.weight"], s) for s, sd in
          zip((2.0, 2.0, 1.0, 2.0), (g, *clients), strict=True)]  # fmt: skip
    core = core_of(fs[0], [*fs[1:], fs[0], None])
    for some in (fs[1:], fs, [fs[2]], [fs[0]]):
        found, expected = core.of(some), core_of(None, some)
        torch.testing.assert_close(found.A, expected.A, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(found.unit**2 * found.B, expected.unit**2 * expected.B, rtol=1e-12, atol=1e-12)
    assert core.of([Factors(fs[0].A, fs[0].B, 2.0)]) is None


def test_any_number_of_threads_gives_the_same_bits():
    g, clients = cohort(7)
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        results.append(fastagg.lora.aggregate(g, clients, method="krum", f=1))
        assert torch.get_num_threads() == threads
    for other in results[1:]:
        assert torch.equal(results[0].gram.matrix, other.gram.matrix)
        assert all(torch.equal(value, other[key]) for key, value in results[0].items())


def test_rounds_at_the_same_time_leave_the_number_of_threads_alone():
    g, clients = cohort(6)
    torch.set_num_threads(2)
    expected, found = fastagg.lora.aggregate(g, clients), []

    def rounds():
        found.extend(fastagg.lora.aggregate(g, clients) for _ in range(4))

    threads = [threading.Thread(target=rounds) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(result[key], value) for result in found for key, value in expected.items())
    with ThreadPoolExecutor(1) as pool:
        assert [len(found), torch.get_num_threads(), pool.submit(torch.get_num_threads).result()] == [16, 2, 2]


@pytest.mark.parametrize("with_threads", [True, False])
@pytest.mark.parametrize(("method", "form", "partial"), [
    ("fedawa", "rank", False), ("fedavg", "rank", False), ("krum", "exact", True), ("fedavg", "separate", False),
])  # fmt: skip
def test_torchs_default_device_does_not_matter(monkeypatch, with_threads, method, form, partial):
    if not with_threads:  # as on a GPU
        monkeypatch.setattr(access, "side_by_side", lambda work, items, *_: list(map(work, items)))
    g, clients = cohort(4, rank=2)
    clients[0] = {key: value for key, value in clients[0].items() if "layers.1" not in key}
    more = {"method": method, "form": form, "partial": partial, **({"f": 0} if method == "krum" else {})}
    more |= {"rank": 50} if form == "rank" else {}
    expected = fastagg.lora.aggregate(g, clients, **more)
    torch.set_default_device("meta")  # stands in for a GPU
    try:
        found = fastagg.lora.aggregate(g, clients, **more)
    finally:
        torch.set_default_device(None)
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, rtol=1e-6, atol=1e-9)


def test_the_order_of_clients_does_not_change_the_bits():
    g, clients = cohort(5)
    order, ids = [3, 0, 4, 2, 1], list("abcde")
    one = fastagg.lora.aggregate(g, clients, [1, 2, 3, 4, 5], client_ids=ids)
    other = fastagg.lora.aggregate(
        g, [clients[k] for k in order], [k + 1 for k in order], client_ids=[ids[k] for k in order]
    )
    assert all(torch.equal(value, other[key]) for key, value in one.items())
    assert torch.equal(one.weights[order], other.weights)


def test_nor_does_it_change_the_form_of_the_result():
    """Dtype, scaling and config are those of the first client of the largest rank, by its id"""
    sds = [adapter(rank, seed=seed, dtype=dtype) for seed, (rank, dtype) in enumerate(
        ((4, torch.float32), (6, torch.float32), (6, torch.bfloat16), (6, torch.float16)))]  # fmt: skip
    clients = [fastagg.lora.Adapter(sd, {"lora_alpha": 8 + k}) for k, sd in enumerate(sds)]
    order, ids = [3, 2, 0, 1], list("dbca")
    one = fastagg.lora.aggregate(None, clients, client_ids=ids)
    other = fastagg.lora.aggregate(None, [clients[k] for k in order], client_ids=[ids[k] for k in order])
    assert {value.dtype for value in one.values()} == {torch.float16}
    assert all(torch.equal(value, other[key]) and value.dtype == other[key].dtype for key, value in one.items())
    assert (one.config, one.scaling) == (other.config, other.scaling)
    assert one.config["lora_alpha"] == 11
