"""partial=True: clients that hold only some of the tensors, against docs/partial.md in plain float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import fastagg
from fastagg._engine import partial
from fastagg._engine.registry import registry
from helpers.cohort import assert_same_bits, assert_unchanged, snapshot
from helpers.every_method import IDS, METHODS, OF_EXAMPLE_NET, OPTIONS, cohort, models, round_inputs, run
from helpers.partial import gram, is_parameter, layers_of, mix, one, partial_cohort, parts_of, whole_models

REFUSED = [name for name in METHODS if registry()[name](**OPTIONS[name]).why_not_partial()]
WORK = [name for name in METHODS if name not in REFUSED]
OF_MOMENTS = {"fedavgm", "fedadam", "fedyogi", "fedadagrad"}
SIZES = [3.0, 1.0, 4.0, 1.5, 9.0, 2.0, 6.0]


def made(name, **more):
    return fastagg.aggregator(name, **{**OPTIONS[name], **more})


def weighed(server):
    """The server, and a list that gets what it decides"""
    seen, decide = [], server.weights_of

    def weights_of(cohort, **inputs):
        seen.append(decide(cohort, **inputs))
        return seen[-1]

    server.weights_of = weights_of
    return server, seen


def test_what_is_refused_is_what_needs_whole_models():
    assert set(REFUSED) == {"median", "trimmed_mean", "meamed", "phocas", "bulyan", "fedlaw", "feddf", "fedbe",
                            "server_ft", "cwfedavg", "fedbuff", "fedasync"}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_say_why(name):
    with pytest.raises(ValueError, match=rf"^{name}: partial=True is not possible: \w"):
        made(name, partial=True)


@pytest.mark.parametrize("weights", ["median", "bulyan", "fedbuff"])
def test_the_method_of_a_server_optimisers_weights_refuses_it_too(weights):
    with pytest.raises(ValueError, match=r"^fedadam: partial=True is not possible: \w"):
        made("fedadam", weights=weights, partial=True)


@pytest.mark.parametrize("seed", range(3))
def test_gram(seed):
    g, clients = partial_cohort(seed=seed)
    found = fastagg.gram(g, clients, partial=True)
    torch.testing.assert_close(found.matrix, gram(g, clients), rtol=1e-11, atol=1e-12)
    assert torch.linalg.eigvalsh(found.matrix).min() > -1e-12 * found.matrix.max()
    by_layer = fastagg.gram(g, clients, partial=True, layerwise=True)
    for layer, keys in layers_of(g).items():
        at = by_layer.layers.index(layer.removesuffix(".weight"))
        torch.testing.assert_close(by_layer.matrix[at], gram(g, clients, keys), rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("layerwise", [False, True])
def test_pieces_at_a_time(monkeypatch, layerwise):
    """However many there are, their products are not all in memory at once"""
    g, clients = partial_cohort()
    whole = fastagg.gram(g, clients, partial=True, layerwise=layerwise).matrix
    for most in (1, 3 * 8 * 8 * 8):
        monkeypatch.setattr(partial, "MOST_BYTES", most)
        assert torch.equal(fastagg.gram(g, clients, partial=True, layerwise=layerwise).matrix, whole)


def test_numbers_that_are_known():
    """Of three tensors of 2, 1 and 1 elements"""
    g = {"a": torch.zeros(2), "b": torch.zeros(1), "c": torch.ones(1)}
    clients = [
        {"a": torch.tensor([3.0, 0.0]), "b": torch.tensor([4.0])},  # a length of 5, of 3 of 4 elements
        {"b": torch.tensor([-2.0]), "c": torch.tensor([1.0])},  # of 2, of 2 elements
        {"a": torch.tensor([0.0, 1.0])},
    ]
    found = fastagg.gram(g, clients, partial=True)
    squares = [25 * 4 / 3, 4 * 2, 1 * 2]
    torch.testing.assert_close(found.squares, torch.tensor(squares, dtype=torch.float64))
    cosines = torch.tensor([[1.0, -1, 0], [-1, 1, 0], [0, 0, 1]], dtype=torch.float64)
    torch.testing.assert_close(found.cosine(), cosines)
    new = fastagg.fedavg(g, clients, [1, 3, 0], partial=True)
    assert new["a"].tolist() == [3, 0]  # of the first: the third has no data
    assert new["b"].tolist() == [0.25 * 4 - 0.75 * 2]
    assert torch.equal(new["c"], g["c"])
    expected = torch.tensor([[1, 0, 0], [0.25, 0.75, 0], [0, 1, 0]], dtype=torch.float64)
    torch.testing.assert_close(new.contributions, expected)


def test_cosines_that_no_vectors_have_become_some_that_vectors_can_have():
    """Three clients, each two of whom share one tensor: alike, alike, and opposite"""
    g = {key: torch.zeros(8) for key in "abc"}
    one = torch.ones(8)
    clients = [{"a": one, "b": one}, {"a": one, "c": one}, {"b": one, "c": -one}]
    assert torch.linalg.eigvalsh(torch.tensor([[1.0, 1, 1], [1, 1, -1], [1, -1, 1]])).min() < -0.9
    found = fastagg.gram(g, clients, partial=True)
    assert torch.linalg.eigvalsh(found.matrix).min() > -1e-12
    torch.testing.assert_close(found.squares, torch.full((3,), 24.0, dtype=torch.float64))
    half = torch.tensor([[1.0, 0.5, 0.5], [0.5, 1, -0.5], [0.5, -0.5, 1]], dtype=torch.float64)
    torch.testing.assert_close(found.cosine(), half)
    for name in ("fedawa", "simprox", "geometric_median", "fedadp", "weiavg", "mda", "fedamp"):
        more = {"entropies": [1, 2, 3]} if name == "weiavg" else {}
        for result in models(getattr(fastagg, name)(g, clients, partial=True, **more)):
            assert all(torch.isfinite(value).all() for value in result.values())
            assert torch.isfinite(result.weights).all()


@pytest.mark.parametrize("name", [name for name in WORK if name not in OF_EXAMPLE_NET])
def test_every_method_sees_that_gram_and_mixes_who_has_what(name):
    g, clients = partial_cohort(seed=5)
    before = snapshot(g, *clients)
    server, decided = weighed(made(name, partial=True))
    inputs = round_inputs(name)
    found = server.aggregate(g, clients, SIZES, IDS, **inputs)
    assert_unchanged([g, *clients], before)

    layerwise = getattr(server, "layerwise", False)
    whole = whole_models(g, clients, layers_of(g) if layerwise else None)
    expected = made(name).aggregate(*whole, SIZES, IDS, **inputs)
    several = isinstance(found, list)
    theirs, ours = (getattr(r, "mixing" if several else "weights") for r in (expected, found))
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-9)
    if name in OF_MOMENTS:
        return  # whose models are not such a mean
    [w] = decided
    in_order = [clients[k] for k in sorted(range(len(IDS)), key=IDS.__getitem__)]
    if registry()[name].produces == "personalised":
        found = [found[k] for k in sorted(range(len(IDS)), key=IDS.__getitem__)]
    for m, result in enumerate(models(found)):
        center = 0.0 if w.center is None else np.reshape(w.center, -1)[m if several else 0]
        values = w.values[..., m, :] if several else w.values
        if layerwise:
            values = dict(zip(found.layers, values, strict=True))
        for key, value in mix(g, in_order, values, scale=w.scale, center=float(center)).items():
            torch.testing.assert_close(result[key], value, rtol=1e-10, atol=1e-11)


def test_the_servers_own_model_is_whole():
    g, clients = partial_cohort()
    near = {key: value + 0.1 if is_parameter(key) else value for key, value in g.items()}
    found = fastagg.fltrust(g, clients, server_model=near, partial=True)
    whole, rows = whole_models(g, [*clients, near])
    expected = fastagg.fltrust(whole, rows[:-1], server_model=rows[-1])
    torch.testing.assert_close(found.weights, expected.weights, rtol=1e-7, atol=1e-10)
    torch.testing.assert_close(found.trust, expected.trust, rtol=1e-7, atol=1e-10)


@pytest.mark.parametrize("pre", ["nnm f=1", "bucketing s=2", "clipping c=2.0", "arc f=1 + nnm f=1"])
def test_stages(pre):
    g, clients = partial_cohort(seed=2)
    found = fastagg.geometric_median(g, clients, SIZES, pre=pre, partial=True)
    expected = fastagg.geometric_median(*whole_models(g, clients), SIZES, pre=pre)
    torch.testing.assert_close(found.weights, expected.weights, rtol=1e-6, atol=1e-9)
    rest = 1 - float(found.weights.sum())
    for key, value in mix(g, clients, found.weights, center=rest).items():
        torch.testing.assert_close(found[key], value, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize(("lr", "dtype", "rtol"), [(0.5, torch.float64, 1e-12), (1.0, torch.bfloat16, 2**-8)])
def test_server_optimisers_step_along_the_mean_of_who_has_it(lr, dtype, rtol):
    g, clients = partial_cohort(dtype=dtype)
    clients = [{key: value for key, value in sd.items() if key != "fc.bias"} for sd in clients]
    found = fastagg.fedavgm(g, clients, SIZES, momentum=0.0, lr=lr, partial=True)
    shares = [size / sum(SIZES) for size in SIZES]
    for key, value in mix(g, clients, shares).items():
        start = g[key].double()
        torch.testing.assert_close(found[key].double(), start + lr * (value - start), rtol=rtol, atol=1e-12)
    assert torch.equal(found["fc.bias"], g["fc.bias"])


@pytest.mark.parametrize("name", WORK)
def test_clients_with_everything_are_as_ever(name):
    """Bit for bit; and so are the same clients in another order"""
    g, clients = cohort() if name not in OF_EXAMPLE_NET else _example_net()
    inputs = round_inputs(name)
    servers = made(name), made(name, partial=True)
    ever, found = (run(name, g, clients, SIZES, ids=IDS, inputs=inputs, server=server) for server in servers)
    for a, b in zip(models(ever), models(found), strict=True):
        assert_same_bits(a, b)
        assert torch.equal(a.weights, b.weights)
        assert b.contributions is None


def _example_net():
    from fastagg._engine.examples import ExampleNet

    g = ExampleNet().state_dict()
    generator = torch.Generator().manual_seed(3)
    noise = [{key: torch.randn(value.shape, generator=generator) for key, value in g.items()} for _ in IDS]
    return g, [{key: g[key] + (0.1 * n[key]).to(g[key].dtype) for key in g} for n in noise]


@pytest.mark.parametrize("name", ["fedavg", "fedawa", "simprox", "geometric_median", "ldawa", "fedamp"])
def test_the_order_of_clients_does_not_matter(name):
    g, clients = partial_cohort(dtype=torch.float32)
    order = [4, 0, 6, 2, 5, 1, 3]
    a = made(name, partial=True).aggregate(g, clients, SIZES, IDS)
    b = made(name, partial=True).aggregate(
        g, [clients[k] for k in order], [SIZES[k] for k in order], [IDS[k] for k in order]
    )
    pairs = zip([a[k] for k in order] if isinstance(a, list) else [a], models(b), strict=True)
    for mine, other in pairs:
        assert_same_bits(mine, other)
        assert torch.equal(mine.contributions[:, order], other.contributions)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dtypes(dtype):
    g, clients = partial_cohort(dtype=dtype)
    found = fastagg.fedawa(g, clients, SIZES, partial=True)
    torch.testing.assert_close(found.gram.matrix, gram(g, clients), rtol=1e-5, atol=1e-5)
    eps = torch.finfo(dtype).eps
    for key, value in mix(g, clients, found.weights).items():
        torch.testing.assert_close(found[key].double(), value, rtol=eps, atol=eps)


def test_contributions_are_the_parts_of_who_has_it():
    g, clients = partial_cohort()
    clients = [{key: value for key, value in sd.items() if key != "fc.weight"} for sd in clients]
    found = fastagg.fedawa(g, clients, SIZES, partial=True)
    assert found.contributions.shape == (len(g), 7)
    for key, row in zip(found, found.contributions, strict=True):
        here = torch.tensor([key in sd for sd in clients])
        integer = not g[key].is_floating_point()
        w = torch.ones(7, dtype=torch.float64) if integer else found.weights
        expected = here * w
        torch.testing.assert_close(row, expected / expected.sum().clamp(min=1e-300))
    assert torch.equal(found["fc.weight"], g["fc.weight"])  # which nobody has


def test_what_is_no_parameter():
    g, clients = partial_cohort()
    sizes = [0.0 if k == 6 else 1.0 for k in range(7)]
    found = fastagg.fedavg(g, clients, sizes, partial=True)
    counters = [int(sd["bn.num_batches_tracked"]) for sd in clients[:6] if "bn.num_batches_tracked" in sd]
    assert int(found["bn.num_batches_tracked"]) == max(counters)  # of those with data
    torch.testing.assert_close(found["bn.running_mean"], one(g, clients, "bn.running_mean", [n / 6 for n in sizes]))
    robust = fastagg.krum(g, clients, f=1, partial=True)
    here = torch.stack([sd["bn.running_var"] for sd in clients if "bn.running_var" in sd])
    torch.testing.assert_close(robust["bn.running_var"], here.quantile(0.5, dim=0))
    rows = dict(zip(robust, robust.contributions, strict=True))
    assert rows["bn.running_var"].max() == 1 / len(here)


def test_a_client_of_no_weight_decides_nothing():
    """Krum takes one client: what that does not have stays as it is"""
    g, clients = partial_cohort(dtype=torch.float32)
    found = fastagg.krum(g, clients, f=1, partial=True)
    chosen = clients[int(found.weights.argmax())]
    for key in filter(is_parameter, g):
        assert torch.equal(found[key], chosen.get(key, g[key]))


def test_many_clients_of_a_method_that_compares_no_pairs():
    g, clients = partial_cohort(40)
    found = fastagg.fedexp(g, clients, partial=True)
    assert found.gram.formed
    torch.testing.assert_close(found.gram.matrix, gram(g, clients), rtol=1e-11, atol=1e-12)


def test_rounds_with_memory():
    """FedAWA as released remembers logits by id, whatever clients hold in a round"""
    server = made("fedawa", variant="released", partial=True)
    other = made("fedawa", variant="released")
    for seed in range(3):
        g, clients = partial_cohort(seed=seed)
        ids = IDS[seed:] + IDS[:seed]
        found = server.aggregate(g, clients, SIZES, ids)
        expected = other.aggregate(*whole_models(g, clients), SIZES, ids)
        torch.testing.assert_close(found.weights, expected.weights, rtol=1e-7, atol=1e-9)


def test_written_in_place():
    g, clients = partial_cohort(dtype=torch.float32)
    out = {key: torch.full_like(value, 7) for key, value in g.items()}
    found = fastagg.simprox(g, clients, SIZES, partial=True, out=out)
    assert all(found[key] is value for key, value in out.items())
    assert_same_bits(found, fastagg.simprox(g, clients, SIZES, partial=True))
    with pytest.raises(fastagg.InputError, match=r"shares memory with an input"):
        fastagg.simprox(g, clients, SIZES, partial=True, out=g)


class TestBadInput:
    def test_no_parameter_at_all(self):
        g, clients = partial_cohort()
        for nothing in ({}, {"bn.running_mean": g["bn.running_mean"]}):
            with pytest.raises(fastagg.BadClientError, match=r"^client 2: it has no parameter of the global model$"):
                fastagg.fedavg(g, [*clients[:2], nothing, *clients[3:]], partial=True)
        wrapped = {f"module.{key}": value for key, value in g.items()}
        with pytest.raises(fastagg.BadClientError, match=r"client 0: it has no parameter .* prefix 'module\.'"):
            fastagg.fedavg(g, [wrapped, *clients], partial=True)

    def test_an_unknown_tensor(self):
        g, clients = partial_cohort()
        with pytest.raises(fastagg.BadClientError, match=r"client 1: key 'head' is not in the model"):
            fastagg.fedavg(g, [clients[0], {**clients[1], "head": torch.ones(2)}], partial=True)

    def test_another_shape(self):
        g, _ = cohort()
        with pytest.raises(fastagg.BadClientError, match=r"client 0: key 'fc.bias' has shape \(3,\), expected \(4,\)"):
            fastagg.fedavg(g, [{"fc.bias": torch.ones(3)}], partial=True)

    def test_without_partial_a_tensor_is_missing(self):
        g, clients = partial_cohort()
        with pytest.raises(fastagg.BadClientError, match=r"is missing"):
            fastagg.fedavg(g, clients)

    @pytest.mark.parametrize("name", ["fedavg", "fedawa", "krum", "fedadam"])
    def test_nan_is_named_and_dropped(self, name):
        g, clients = partial_cohort()
        clients[3] = {**clients[3], "fc.weight": torch.full((4, 24), float("nan"), dtype=torch.float64)}
        with pytest.raises(fastagg.NonFiniteError, match=r"^client 3: key 'fc.weight' has values that are not finite"):
            getattr(fastagg, name)(g, clients, partial=True, **OPTIONS[name])
        found = getattr(fastagg, name)(g, clients, SIZES, partial=True, on_bad_client="drop", **OPTIONS[name])
        others = [k for k in range(7) if k != 3]
        expected = getattr(fastagg, name)(
            g, [clients[k] for k in others], [SIZES[k] for k in others], partial=True, **OPTIONS[name]
        )
        assert list(found.dropped) == [3]
        assert_same_bits(found, expected)
        assert torch.equal(found.contributions[:, others], expected.contributions)
        assert found.contributions[:, 3].eq(0).all()

    @pytest.mark.parametrize("name", ["fedavg", "fedawa"])
    def test_nan_in_the_global_model_is_its_own(self, name):
        g, clients = partial_cohort()
        g["conv.weight"][0] = float("nan")
        with pytest.raises(fastagg.InputError, match=r"^the global model: key 'conv.weight' has"):
            getattr(fastagg, name)(g, clients, partial=True)

    def test_no_global_model(self):
        _, clients = partial_cohort()
        with pytest.raises(fastagg.InputError, match=r"the global model is None; partial=True takes from it"):
            fastagg.fedavg(None, clients, partial=True)

    def test_clients_that_arrive_one_by_one(self):
        g, _ = partial_cohort()
        with pytest.raises(fastagg.InputError, match=r"fedavg: partial=True takes all clients at once"):
            made("fedavg", partial=True).round(g)

    def test_group(self):
        with pytest.raises(ValueError, match=r"fedavg: partial=True is not possible: group= is for whole models"):
            made("fedavg", partial=True, group=True)

    def test_means_by_rank_of_a_method_that_does_not_say_so(self, monkeypatch):
        monkeypatch.setattr(registry()["bulyan"], "why_not_partial", lambda self: "")
        g, clients = partial_cohort()
        with pytest.raises(fastagg.InputError, match=r"means by rank are of clients that all have a tensor"):
            fastagg.bulyan(g, clients, f=1, partial=True)

    def test_too_large(self):
        g = {"a": torch.zeros(2, dtype=torch.float64), "b": torch.zeros(2000, dtype=torch.float64)}
        clients = [{"a": torch.full((2,), 7e153, dtype=torch.float64)}, {"b": g["b"] + 1}]
        with pytest.raises(fastagg.BadClientError, match=r"^client 0: its distance to the global model is too large"):
            fastagg.fedawa(g, clients, partial=True)


def test_parts_of_leaves_something_out():
    """What these tests rest on"""
    _, clients = cohort()
    some = parts_of(clients)
    lengths = [len(sd) for sd in some]
    assert min(lengths) > 0
    assert sum(n < len(clients[0]) for n in lengths) > 4
    assert len({frozenset(sd) for sd in some}) > 4
