"""What clients send in the place of a model of the global model's dtype: narrower floats, updates, and running sums."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file

import fastagg
from fastagg import BadClientError, InputError
from fastagg._engine.arrivals import updates
from fastagg._engine.arrivals.round import Round
from helpers.arrivals import ORDER, SIZES, arrive, pairs_of
from helpers.cohort import assert_same_bits, make, make_with_batch_norm
from helpers.every_method import IDS, IN_MEMORY, METHODS, OF_EXAMPLE_NET, OPTIONS, K, cohort, models, run

SHAPES = {"a.weight": (130, 700), "a.bias": (130,), "bn.running_var": (130,), "b.weight": (3, 1)}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("wide", [torch.float32, torch.float64])
@pytest.mark.parametrize("memory", [None, 1])
@pytest.mark.parametrize("name", ["fedavg", "fedawa", "median", "krum", "fedadam", "simprox"])
def test_narrower_floats_have_the_bits_of_their_values(name, memory, wide, dtype):
    g, clients = make_with_batch_norm(K, SHAPES, wide, seed=3, scale=0.1)
    sent = [{key: v.to(dtype) if v.is_floating_point() else v for key, v in sd.items()} for sd in clients]
    sent[2] = clients[2]  # not all of them
    meant = [{key: v.to(g[key].dtype) for key, v in sd.items()} for sd in sent]
    expected = fastagg.aggregator(name).aggregate(g, meant, SIZES, IDS)
    with fastagg.aggregator(name).round(g, memory=memory) as round:
        arrive(round, name, sent)
        found = round.finish()
    assert_same_bits(expected, found)
    assert torch.equal(expected.weights[ORDER], found.weights)


def test_a_layer_wise_distance_gram_of_narrower_floats():
    """Centred on a client, whose tensors are then in the place of the global model's"""
    g, clients = make(9, SHAPES, torch.float32, scale=1e-6)
    clients = [{key: v + 100 for key, v in sd.items()} for sd in clients]
    sent = [{key: v.bfloat16() for key, v in sd.items()} for sd in clients]
    meant = [{key: v.float() for key, v in sd.items()} for sd in sent]
    for name in ("krum", "geometric_median"):
        with fastagg.aggregator(name).round(g) as round:
            for k, sd in enumerate(sent):
                round.add(k, sd)
            assert_same_bits(fastagg.aggregator(name).aggregate(g, meant, None, range(9)), round.finish())


def test_dtypes_that_are_refused():
    g, [sd] = make(1, {"w": (4, 3)}, torch.float16)
    with fastagg.aggregator("fedavg").round(g) as round:
        for dtype in (torch.float32, torch.bfloat16, torch.int32):
            with pytest.raises(BadClientError, match=f"client 0: key 'w' has dtype {dtype}, expected torch.float16"):
                round.add(0, {"w": sd["w"].to(dtype)})
    with fastagg.aggregator("fedavg").round(None) as round:  # the first one sets the form
        round.add(0, {"w": sd["w"].float()})
        with pytest.raises(BadClientError, match="dtype"):
            round.add(1, sd)


@pytest.mark.parametrize("name", sorted(IN_MEMORY))
def test_methods_that_want_whole_models_get_wide_ones(name):
    g, clients = cohort()
    sent = [{key: v.bfloat16() if v.is_floating_point() else v for key, v in sd.items()} for sd in clients]
    meant = [{key: v.to(g[key].dtype) for key, v in sd.items()} for sd in sent]
    expected = run(name, g, meant, SIZES, ids=IDS)
    with fastagg.aggregator(name, **OPTIONS[name]).round(g, memory=1) as round:
        rest = arrive(round, name, sent)
        assert_same_bits(expected, round.finish(**rest))


def difference(sd, g):
    return {key: value - g[key] for key, value in sd.items()}


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("who", ["all", "some"])
@pytest.mark.parametrize("memory", [None, 1])
def test_updates(name, memory, who):
    """In float64, of which the updates are exact to 1e-16 of the model"""
    g, clients = cohort()
    if name not in OF_EXAMPLE_NET:  # whose network is of float32
        g, *clients = [{k: v.double() if v.is_floating_point() else v for k, v in sd.items()} for sd in (g, *clients)]
    expected = run(name, g, clients, SIZES, ids=IDS)
    server = fastagg.aggregator(name, **OPTIONS[name])
    with server.round(g, memory=memory) as round:
        rest = arrive(
            round, name, clients,
            lambda k, sd: {"update": difference(sd, g)} if who == "all" or k % 2 else {"model": sd},
        )  # fmt: skip
        found = round.finish(**rest)
    tight = name not in OF_EXAMPLE_NET
    for a, b in pairs_of(server, expected, found):
        for key in a:
            if a[key].is_floating_point():
                torch.testing.assert_close(b[key], a[key], rtol=1e-9 if tight else 1e-5, atol=1e-11 if tight else 1e-6)
            else:
                assert torch.equal(a[key], b[key])


@pytest.mark.parametrize("memory", [None, 1])
@pytest.mark.parametrize("name", sorted(set(METHODS) - IN_MEMORY))
def test_models_among_updates_are_not_copied(name, memory, monkeypatch):
    """They have the bits of the updates that could be made of them. One of them is the global model itself."""
    g, clients = make_with_batch_norm(K, SHAPES, torch.float32, seed=3, scale=1e-2)
    clients[2] = g
    clients[3] = {key: v.bfloat16() if v.is_floating_point() else v for key, v in clients[3].items()}
    as_models = {2, 3, 5}
    found = []
    monkeypatch.setattr(updates, "update_of", None)
    monkeypatch.setattr(Round, "_slab_bytes", 1 << 16)
    for who in (set(), as_models):
        with fastagg.aggregator(name, **OPTIONS[name]).round(g, memory=memory) as round:
            rest = arrive(
                round, name, clients,
                lambda k, sd, who=who: {"model": sd} if k in who else {"update": difference(sd, g)},
            )  # fmt: skip
            found.append(round.finish(**rest))
    for a, b in zip(*map(models, found), strict=True):
        assert_same_bits(a, b)


@pytest.mark.parametrize("count", [5, 40])
@pytest.mark.parametrize("layerwise", [False, True])
def test_small_updates_keep_their_digits(count, layerwise):
    """An update of 1e-9 of the model is lost in w = g + d of float32. As it is, the weights are right to float32."""
    g, clients = make(count, {"a.weight": (60, 70), "b.weight": (33,)}, torch.float64, scale=1e-9)
    updates = [difference(sd, g) for sd in clients]
    zeros = {key: torch.zeros_like(value) for key, value in g.items()}
    options = {"layerwise": layerwise, "reg": "euc"}  # which does not depend on the global model
    expected = fastagg.fedawa(zeros, updates, **options)
    narrow = lambda sd: {key: value.float() for key, value in sd.items()}  # noqa: E731
    with fastagg.aggregator("fedawa", **options).round(narrow(g)) as round:
        for k, update in enumerate(updates):
            round.add(k, update=narrow(update))
        found = round.finish()
    torch.testing.assert_close(found.weights, expected.weights, rtol=1e-5, atol=1e-8)
    assert (found.weights - 1 / count).abs().max() > 1e-4  # it has learned something


@pytest.mark.parametrize("gram", ["auto", "full"])
@pytest.mark.parametrize("name", ["fedawa", "weiavg", "ldawa"])
def test_the_gram_of_updates(name, gram):
    g, clients = make(40, {"a.weight": (60, 70), "b.weight": (33,)}, torch.float64, scale=0.1)
    expected = fastagg.aggregator(name, gram=gram).aggregate(g, clients, None, list(range(40)))
    with fastagg.aggregator(name, gram=gram).round(g) as round:
        for k, sd in enumerate(clients):
            round.add(k, update=difference(sd, g))
        found = round.finish()
    assert found.gram.formed == expected.gram.formed
    torch.testing.assert_close(found.gram.squares, expected.gram.squares, rtol=1e-9, atol=0)
    torch.testing.assert_close(found.gram.along_global, expected.gram.along_global, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(found.gram.global_square, expected.gram.global_square, rtol=1e-12, atol=0)
    torch.testing.assert_close(found.weights, expected.weights, rtol=1e-9, atol=1e-12)


def test_an_update_that_is_not_finite_with_the_model():
    g = {"w": torch.full((4, 3), 3e38)}
    with fastagg.aggregator("fedavg").round(g) as round:
        round.add(0, update={"w": torch.full((4, 3), 3e38)})
        with pytest.raises(InputError, match=r"key 'w' has values that are too large for torch\.float32"):
            round.finish()


MEANS = [(name, options) for name in ("fedavg", "uniform") for options in ({}, {"server_lr": 0.5, "gamma": 0.9})]
STEPS = [4.0, 1, 30, 7, 7, 5, 2]


@pytest.mark.parametrize(("name", "options"), [*MEANS, ("fednova", {}), ("fednova", {"momentum": 0.9})])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_running_sum(name, options, dtype, tmp_path):
    g, clients = make_with_batch_norm(K, SHAPES, dtype, seed=3, scale=0.1)
    clients[5] = {key: torch.zeros_like(value) - 7 for key, value in clients[5].items()}
    sizes = [3.0, 1, 4, 1, 5, 0, 2]
    server = fastagg.aggregator(name, **options)
    inputs = [{"local_steps": steps} if name == "fednova" else {} for steps in STEPS]
    expected = server.aggregate(g, clients, sizes, IDS, **dict.fromkeys(inputs[0], STEPS))
    with server.round(g, running=True) as round:
        for k in ORDER:
            if k % 2 and dtype != torch.bfloat16:
                round.add(IDS[k], update=difference(clients[k], g), size=sizes[k], **inputs[k])
            elif k == 4:
                save_file(clients[k], tmp_path / "4.safetensors")
                round.add(IDS[k], tmp_path / "4.safetensors", size=sizes[k], **inputs[k])
            else:
                round.add(IDS[k], clients[k], size=sizes[k], **inputs[k])
        found = round.finish()
    bit = 2 * torch.finfo(dtype).eps
    for key in g:
        # FedNova's weights add up to more than 1, less of g: sums of K + 1 such terms, in float64 on both sides
        terms = [w * sd[key].double().abs() for w, sd in zip(expected.weights, clients, strict=True)]
        terms.append((1 - expected.weights.sum()).abs() * g[key].double().abs())
        lost = 2 * len(terms) * torch.finfo(torch.float64).eps * sum(terms) if name == "fednova" else 0
        off = (found[key].double() - expected[key].double()).abs()
        assert (off <= bit + bit * expected[key].double().abs() + lost).all()
    torch.testing.assert_close(
        found.weights, expected.weights[ORDER], rtol=1e-15 * (K if name == "fednova" else 1), atol=0
    )


OPTIMISERS = ["fedadagrad", "fedadam", "fedavgm", "fedyogi"]


@pytest.mark.parametrize("name", OPTIMISERS)
@pytest.mark.parametrize(
    "weights", [None, "uniform", "fednova", {"method": "fedavg", "server_lr": 0.5, "gamma": 0.9}], ids=str
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_running_sum_before_a_server_optimiser(name, weights, dtype):
    """The moments are of the update, which is small beside the model: its digits are not those of a rounded mean"""
    options = {"weights": weights} | ({"momentum": 0.0} if name == "fedavgm" and weights is None else {})
    servers = [fastagg.aggregator(name, **options) for _ in range(2)]
    sizes, g = [3.0, 1, 4, 1, 5, 0, 2], make_with_batch_norm(1, SHAPES, dtype, seed=3, scale=0.1)[0]
    for r in range(3):
        _, clients = make_with_batch_norm(K, SHAPES, dtype, seed=r, scale=0.1)
        small = lambda v: 1e-3 * v if v.is_floating_point() else v  # noqa: E731
        clients = [{key: g[key] + small(v) for key, v in sd.items()} for sd in clients]
        inputs = [{"local_steps": steps} if weights == "fednova" else {} for steps in STEPS]
        expected = servers[0].aggregate(g, clients, sizes, IDS, **dict.fromkeys(inputs[0], STEPS))
        with servers[1].round(g, running=True) as round:
            for k in ORDER:
                is_update = k % 2 and dtype == torch.float64
                sent = {"update": difference(clients[k], g)} if is_update else {"model": clients[k]}
                round.add(IDS[k], **sent, size=sizes[k], **inputs[k])
            found = round.finish()
        eps, most = torch.finfo(dtype).eps, max(float(value.abs().max()) for value in g.values())
        lost = K * torch.finfo(torch.float64).eps * most  # by a mean update, of sums of models in float64
        steep = servers[0].lr / getattr(servers[0], "tau", 1.0)  # what of that a step makes of it
        for key in g:
            if g[key].is_floating_point():
                torch.testing.assert_close(found[key], expected[key], rtol=8 * eps, atol=8 * eps + steep * lost)
            else:
                assert torch.equal(found[key], expected[key])
        for moment in ("m", "v")[: 1 + (name != "fedavgm")]:
            for key, value in servers[0].state.moments[moment].items():
                of, largest = servers[1].state.moments[moment][key], float(value.abs().max())
                torch.testing.assert_close(of, value, rtol=0, atol=4 * eps * largest + lost)
        torch.testing.assert_close(found.weights, expected.weights[ORDER], rtol=1e-13, atol=0)
        g = dict(expected)


def test_running_sums_hold_no_client():
    import gc
    import weakref

    g, clients = make(3, {"w": (40, 30)})
    expected = fastagg.fedavg(g, clients)
    with fastagg.aggregator("fedavg").round(g, running=True) as round:
        for k in range(3):
            sd = clients.pop(0)
            there = weakref.ref(sd["w"])
            round.add(k, sd)
            del sd
            gc.collect()
            assert there() is None
        with pytest.raises(InputError, match="cannot be taken out again"):
            round.discard(0)
        torch.testing.assert_close(round.finish()["w"], expected["w"])


def test_what_cannot_be_a_running_sum(tmp_path):
    g, _ = make(1, {"w": (4, 3)})
    for name in sorted(set(METHODS) - {"fedavg", "uniform", "fednova", *OPTIMISERS}):
        with pytest.raises(InputError, match="leave it out, and the clients are kept"):
            fastagg.aggregator(name, **OPTIONS[name]).round(g, running=True)
    for name in OPTIMISERS:
        with pytest.raises(InputError, match="weights do not depend on the models; leave it out"):
            fastagg.aggregator(name, weights="fedawa").round(g, running=True)
        with pytest.raises(InputError, match="more digits than 16 bits have; leave it out"):
            fastagg.aggregator(name).round({"w": g["w"].half()}, running=True)
    with pytest.raises(InputError, match="keeps no clients"):
        fastagg.aggregator("fedavg").round(g, running=True, spill=tmp_path)
    with fastagg.aggregator("fedavg").round(g, running=True) as round:
        round.add(0, g, size=0)
        with pytest.raises(InputError, match="sizes sum to zero"):
            round.finish()
    with fastagg.aggregator("fednova").round(g, running=True) as round:
        with pytest.raises(BadClientError, match="client 0: it has no local_steps, which a running sum needs"):
            round.add(0, g)
        round.add(1, g, size=0, local_steps=3)
        with pytest.raises(InputError, match="sizes sum to zero"):
            round.finish()
