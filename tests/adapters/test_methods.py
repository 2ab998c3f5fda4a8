"""Every method that reads weights, products or pairs works on adapters by its name, and sees what it sees of models."""

from __future__ import annotations

import pytest
import torch

import fastagg
from fastagg._engine.registry import registry
from helpers.adapters import PREFIX, adapter, cohort, dense
from helpers.every_method import OPTIONS

REFUSED = [name for name, cls in registry().items() if cls(**OPTIONS[name]).why_not_on_adapters()]
WORK = sorted(registry().keys() - set(REFUSED))
IDS, SIZES = list("gecdabf"), [3.0, 1.0, 4.0, 1.5, 9.0, 2.0, 6.0]


def as_models(sd):
    """The same adapters as ordinary models of float64: their dense updates"""
    return {f"{name}.lora" if ".weight" not in name else name: value for name, value in dense(sd).items()}


def inputs_of(name, K=7):
    return dict(registry()[name].example_round(K).inputs)


def test_what_is_refused_is_what_needs_elements_or_models():
    assert {"median", "trimmed_mean", "meamed", "phocas", "bulyan", "fedlaw", "feddf", "fedbe", "server_ft", "fedavgm",
            "fedadam", "fedyogi", "fedadagrad", "fltrust", "cwfedavg", "fedbuff"} == set(REFUSED)  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_say_why(name):
    server = registry()[name](**OPTIONS[name])
    with pytest.raises(fastagg.InputError, match=rf"{name}: .*(adapter|factors)"):
        fastagg.lora.aggregate(*cohort(7), method=server, **inputs_of(name))


def test_an_update_that_is_kept_is_none_of_factors():
    with pytest.raises(fastagg.InputError, match="centred_clipping: center='previous' keeps an update"):
        fastagg.lora.aggregate(*cohort(3), method="centred_clipping", tau=1.0, center="previous")


def test_versions_are_not_kept_of_factors():
    """FedBuff takes clients of the current version, round after round"""
    server = fastagg.aggregator("fedbuff", keep_versions=0, server_lr=0.5)
    for version in range(2):
        g, clients = cohort(3, seed=version)
        found = fastagg.lora.aggregate(g, clients, SIZES[:3], method=server, version=[version] * 3, form="exact")
        expected = fastagg.lora.aggregate(g, clients, SIZES[:3], method="fedavg", server_lr=0.5, form="exact")
        for key, value in dense(expected).items():
            torch.testing.assert_close(dense(found)[key], value, rtol=1e-6, atol=1e-6)
    with pytest.raises(fastagg.BadClientError, match="started from version 1"):
        fastagg.lora.aggregate(g, clients, method=server, version=[2, 1, 2])


def test_methods_of_others_that_look_at_elements_are_refused_too(monkeypatch):
    monkeypatch.setattr(registry()["bulyan"], "why_not_on_adapters", lambda self: "")
    with pytest.raises(fastagg.InputError, match="elements of updates, and those of an adapter's"):
        fastagg.lora.aggregate(*cohort(7), method="bulyan", f=1)


@pytest.mark.parametrize("name", WORK)
def test_weights_are_those_of_the_dense_updates(name):
    """Over three rounds: what a method remembers is the same, too"""
    options = OPTIONS[name]
    a, b = (fastagg.aggregator(name, **options) for _ in range(2))
    for seed in range(3):
        g, clients = cohort(7, dtype=torch.float64, seed=20 * seed, plain=["head.weight"], scale=0.3)
        found = fastagg.lora.aggregate(g, clients, SIZES, method=a, form="exact", client_ids=IDS, **inputs_of(name))
        expected = b.aggregate(as_models(g), [as_models(sd) for sd in clients], SIZES, IDS, **inputs_of(name))
        several = isinstance(expected, list)
        theirs, ours = (getattr(r, "mixing" if several else "weights") for r in (expected, found))
        torch.testing.assert_close(ours, theirs, rtol=1e-7, atol=1e-9)
        for one, other in zip(*((found, expected) if several else ([found], [expected])), strict=True):
            updates = as_models(one)
            for key, value in other.items():
                torch.testing.assert_close(updates[key], value, rtol=1e-6, atol=1e-7)
        if expected.gram is not None:
            torch.testing.assert_close(found.gram.squares, expected.gram.squares, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("options", [
    {"method": "fedawa", "layerwise": True}, {"method": "fedawa", "pre": "nnm f=2"},
    {"method": "geometric_median", "pre": "bucketing s=2"}, {"method": "krum", "pre": ["clipping"], "f": 1},
], ids=str)  # fmt: skip
def test_options_of_all_methods_work(options):
    if options.get("pre") == ["clipping"]:
        options = options | {"pre": {"stage": "clipping", "c": 3.0}}
    name = options["method"]
    more = {key: value for key, value in options.items() if key != "method"}
    g, clients = cohort(7, dtype=torch.float64)
    found = fastagg.lora.aggregate(g, clients, SIZES, form="exact", **options)
    expected = getattr(fastagg, name)(as_models(g), [as_models(sd) for sd in clients], SIZES, **more)
    torch.testing.assert_close(found.weights, expected.weights, rtol=1e-8, atol=1e-10)
    for key, value in as_models(found).items():
        torch.testing.assert_close(value, expected[key], rtol=1e-7, atol=1e-8)


def test_a_gram_centred_on_a_client():
    """Clients that are nearer to each other than to the global adapter, a third of which lack a module"""
    g, clients = cohort(6, dtype=torch.float64, scale=1.0)
    near = [{key: clients[0][key] + 1e-8 * sd[key] for key in sd} for sd in clients]
    near[3] = {key: value for key, value in near[3].items() if "layers.1" not in key}
    found = fastagg.lora.aggregate(g, near, method="krum", f=1, form="exact")
    models = [as_models({**g, **sd}) for sd in near]
    expected = fastagg.krum(as_models(g), models, f=1)
    assert torch.equal(found.weights, expected.weights)


def test_more_clients_than_a_gram_is_formed_for():
    g, clients = cohort(40, rank=1, dtype=torch.float64)
    found = fastagg.lora.aggregate(g, clients, method="weiavg")
    assert found.gram.formed
    torch.testing.assert_close(found.weights, fastagg.weiavg(as_models(g), [as_models(sd) for sd in clients]).weights)


def test_whole_tensors_need_the_global_adapter():
    _, clients = cohort(plain=["head.weight"])
    with pytest.raises(fastagg.InputError, match=r"'base_model.model.head.weight': pass the global adapter"):
        fastagg.lora.aggregate(None, clients)
    with pytest.raises(fastagg.InputError, match="pass the global adapter"):
        fastagg.lora.aggregate(None, clients, method="fedavg", server_lr=0.5)
    fastagg.lora.aggregate(None, clients, method="fedavg")
    fastagg.lora.aggregate({PREFIX + "head.weight": torch.zeros(5, 7)}, clients)  # from B = 0, and a known head


def test_biases_of_factors_are_scaled_with_them():
    key = PREFIX + "layers.0.q_proj.lora_B.bias"
    clients = [{**adapter(rank, seed=rank), key: torch.full((60,), float(rank))} for rank in (4, 4, 8)]
    result = fastagg.lora.aggregate(None, clients[:2], method="fedavg", scaling=2.0)
    assert result[key].eq(4).all()
    with pytest.raises(fastagg.InputError, match=r"lora_B.bias' \(lora_bias\) is multiplied by each adapter's scaling"):
        fastagg.lora.aggregate(None, clients, method="fedavg", scaling=lambda r: 8 / r)


def test_client_ids_and_sizes_by_id():
    g, clients = cohort(3)
    result = fastagg.lora.aggregate(g, clients, {"a": 1, "b": 2, "c": 5}, method="fedavg", client_ids=["b", "a", "c"])
    assert result.weights.tolist() == [2 / 8, 1 / 8, 5 / 8]


def test_state_is_saved_and_loaded(tmp_path):
    servers = [fastagg.aggregator("fedawa", variant="released") for _ in range(2)]
    rounds = [cohort(4, seed=30 * seed) for seed in range(3)]
    for g, clients in rounds:
        last = fastagg.lora.aggregate(g, clients, method=servers[0], client_ids=list("abcd"))
    for at, (g, clients) in enumerate(rounds):
        if at:
            servers[1] = fastagg.aggregator("fedawa", variant="released")
            servers[1].load(tmp_path / "state")
        again = fastagg.lora.aggregate(g, clients, method=servers[1], client_ids=list("abcd"))
        servers[1].save(tmp_path / "state")
    assert torch.equal(last.weights, again.weights)


def test_a_name_or_option_that_does_not_exist():
    g, clients = cohort(3)
    with pytest.raises(ValueError, match="no method 'fedavga'; did you mean 'fedavg"):
        fastagg.lora.aggregate(g, clients, method="fedavga")
    with pytest.raises(TypeError, match="no option 'stepz'; did you mean 'steps'"):
        fastagg.lora.aggregate(g, clients, stepz=3)
    with pytest.raises(ValueError, match="form='best'; expected one of 'rank', 'exact'"):
        fastagg.lora.aggregate(g, clients, form="best")
    with pytest.raises(ValueError, match="rank=3 is for form='rank'"):
        fastagg.lora.aggregate(g, clients, form="exact", rank=3)
    with pytest.raises(ValueError, match="rank=0; expected an integer >= 1"):
        fastagg.lora.aggregate(g, clients, rank=0)


def test_ranks_that_differ_need_a_scaling():
    good = fastagg.lora.Adapter(adapter(4), {"lora_alpha": 8})
    with pytest.raises(fastagg.InputError, match=r"rank 4 come without a config"):
        fastagg.lora.aggregate(adapter(4), [good, good])  # whose scaling is 2
    with pytest.raises(fastagg.InputError, match=r"rank 4 and 8 come without a config.*scaling=lambda r: alpha / r"):
        fastagg.lora.aggregate(None, [adapter(4), adapter(8)])


@pytest.mark.parametrize("name", WORK)
def test_clients_that_began_with_nothing_give_finite_results(name):
    """Without a global adapter, the vector that some methods compare updates with is zero"""
    _, clients = cohort(7)
    server = registry()[name](**OPTIONS[name])
    result = fastagg.lora.aggregate(None, clients, SIZES, method=server, client_ids=IDS, **inputs_of(name))
    for one in result if isinstance(result, list) else [result]:
        assert all(torch.isfinite(value).all() for value in one.values())
        assert any(value.any() for key, value in one.items() if "lora_B" in key)
