"""One client with a NaN or an infinity: named, or left out as if it had not come. Never in the result."""

from __future__ import annotations

import copy
import logging
import math
import pickle
import re

import numpy as np
import pytest
import torch

import fastagg
from fastagg._engine.registry import registry
from helpers.cohort import assert_same_bits, assert_unchanged, make, snapshot
from helpers.every_method import IDS, METHODS, OPTIONS, TRAINERS, K, cohort, models, round_inputs, run, some_of
from helpers.states import same

BAD = 2
SOME_KEYS = ("conv.weight", "fc.bias", "bn.running_var")


@pytest.mark.parametrize("key", SOME_KEYS)
@pytest.mark.parametrize("name", METHODS)
def test_a_client_that_is_not_finite_is_named(name, key):
    server = fastagg.aggregator(name, **OPTIONS[name])
    g, clients = cohort()
    run(name, g, clients, ids=IDS, server=server)
    state = copy.deepcopy(server.state_dict())
    g, clients = cohort(seed=1)
    clients[BAD][key].view(-1)[-1] = math.inf if key == "fc.bias" else math.nan
    if key.startswith("bn"):
        clients[BAD]["conv.weight"] += 1  # also where its parameters do not get in
    before = snapshot(g, *clients)
    with pytest.raises(fastagg.NonFiniteError, match=re.escape(f"client {BAD} (id 'a'): key '{key}' has")) as caught:
        run(name, g, clients, ids=IDS, server=server)
    assert caught.value.clients == [BAD]
    assert_unchanged([g, *clients], before)
    assert same(server.state_dict(), state)


@pytest.mark.parametrize("key", SOME_KEYS)
@pytest.mark.parametrize("name", METHODS)
def test_dropped_is_as_if_it_had_not_come(name, key, caplog):
    keep = [k for k in range(K) if k != BAD]
    sizes = torch.arange(1.0, K + 1)
    options = OPTIONS[name]
    dropping, without = (fastagg.aggregator(name, on_bad_client=w, **options) for w in ("drop", "raise"))
    for seed in range(2):
        g, clients = cohort(seed=seed)
        clients[BAD][key].view(-1)[0] = -math.inf if key == "fc.bias" else math.nan
        info = round_inputs(name)
        rest = some_of(name, info, keep)
        with caplog.at_level(logging.WARNING, "fastagg"):
            result = run(name, g, clients, sizes, ids=IDS, server=dropping, inputs=info)
        assert f"{name}: client {BAD} (id 'a'): " in caplog.text
        expected = run(
            name, g, [clients[k] for k in keep], sizes[keep], ids=[IDS[k] for k in keep], server=without, inputs=rest
        )
        assert list(result.dropped) == ["a"]
        assert list(expected.dropped) == []
        if registry()[name].produces == "personalised":
            assert result[BAD] is None
            assert not result.mixing[..., BAD, :].any()
            result_models = [result[k] for k in keep]
        else:
            result_models = models(result)
        for got, wanted in zip(result_models, models(expected), strict=True):
            assert_same_bits(got, wanted)
            assert torch.equal(got.weights[..., keep], wanted.weights)
            assert not got.weights[..., BAD].any()
        if getattr(expected, "logits", None) is not None:
            assert torch.equal(result.logits[..., keep], expected.logits)
            assert torch.isfinite(result.logits).all()
        if expected.gram is not None:
            assert result.gram.K == K
            assert result.gram.absent == (BAD,)
            assert torch.equal(result.gram.present().matrix, expected.gram.matrix)
            assert not result.gram.matrix[..., BAD + 1, :].any()
        for seen, other in zip(result_models, models(expected), strict=True):
            if other.gram is not None:  # a result's gram and weights go together, whoever was dropped
                told = vars(fastagg.diagnostics(seen.gram, seen.weights, class_dist=torch.eye(K)))
                alone = vars(fastagg.diagnostics(other.gram, other.weights, class_dist=torch.eye(K)[keep]))
                assert told["update_norms"].shape[-1] == K
                assert torch.equal(told["update_norms"][..., keep], alone["update_norms"])
                assert torch.equal(told["cosine"][..., keep, :][..., keep], alone["cosine"])
                for what in ("coherence", "distance_to_global", "shrink_ratio", "heterogeneity_coherence"):
                    torch.testing.assert_close(told[what], alone[what], rtol=1e-6, atol=1e-12)
    assert same(dropping.state_dict(), without.state_dict())


def test_several_are_dropped_and_all_are_named():
    g, clients = cohort()
    for k, key in ((1, "fc.weight"), (1, "fc.bias"), (4, "conv.weight"), (5, "bn.running_mean")):
        clients[k][key].view(-1)[0] = math.nan
    with pytest.raises(
        fastagg.NonFiniteError, match=r"client 1: keys 'fc.weight', 'fc.bias' have .*; so have client 4"
    ):
        fastagg.fedawa(g, clients, variant="paper")
    with pytest.raises(fastagg.NonFiniteError, match="client 4, client 5"):
        fastagg.fedavg(g, clients)
    for method in (fastagg.fedavg, fastagg.fedawa, fastagg.simprox, fastagg.fedadam):
        result = method(g, clients, on_bad_client="drop")
        assert list(result.dropped) == [1, 4, 5]
        assert_same_bits(result, method(g, [clients[k] for k in (0, 2, 3, 6)]))
    for sd in clients:
        for key in ("fc.weight", "fc.bias", "conv.weight", "bn.weight", "bn.bias", "bn.running_mean"):
            sd[key].fill_(math.nan)
    with pytest.raises(fastagg.NonFiniteError, match=r"'bn.running_mean' and 1 more|and 1 more have"):
        fastagg.fedavg(g, clients)
    for method in (fastagg.fedavg, fastagg.fedawa):
        with pytest.raises(fastagg.InputError, match="no client is left: none of 7 can be used"):
            method(g, clients, on_bad_client="drop")


@pytest.mark.parametrize("where", ["first", "last", "tail"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_mix_sees_it_in_passing(kernels, dtype, where, value):
    n = 40_003
    at = {"first": 0, "last": n - 4, "tail": n - 1}[where]
    _, clients = make(5, {"a.weight": (33,), "b.weight": (n,), "c.weight": (7,)}, dtype)
    weights = [0.25, 0.5, 0.0, 0.125, 0.125]
    assert torch.isfinite(fastagg.mix(clients, weights)["b.weight"]).all()
    clients[2]["b.weight"][at] = value  # its weight is 0
    for several in (weights, [weights] * 6):
        with pytest.raises(fastagg.NonFiniteError, match=r"client 2: key 'b.weight' has values that are not finite"):
            fastagg.mix(clients, several)
    passed = fastagg.mix(clients, weights, on_nonfinite="pass")
    assert torch.isnan(passed["b.weight"][at])
    assert torch.isfinite(passed["c.weight"]).all()
    with pytest.raises(fastagg.NonFiniteError, match=r"client 2: key 'b.weight'"):
        fastagg.gram_mix(clients[0], clients, weights)
    gram, _ = fastagg.gram_mix(clients[0], clients, weights, on_nonfinite="pass")
    assert torch.isfinite(gram.matrix.diagonal()).tolist() == [True, True, True, False, True, True]


def test_the_other_backend_looks_as_well():
    _, clients = make(3, {"a.weight": (5,), "n": (0,)}, torch.float64)
    clients[0]["a.weight"][1] = 1e200  # finite, though not in float32
    fastagg.mix(clients, [1, 1, 1], backend="reference")
    clients[1]["a.weight"][4] = math.nan
    with pytest.raises(fastagg.NonFiniteError, match=r"client 1: key 'a.weight'"):
        fastagg.mix(clients, [1, 1, 1], backend="reference")


@pytest.mark.parametrize(
    ("dtype", "most"), [(torch.float16, 65504.0), (torch.bfloat16, 3.3895e38), (torch.float32, 3.4028e38)], ids=str
)
def test_a_result_too_large_for_its_dtype_is_no_infinity(kernels, dtype, most):
    clients = [{"w": torch.full((37,), most, dtype=torch.float64).to(dtype)} for _ in range(4)]
    assert torch.isfinite(clients[0]["w"]).all()
    assert_same_bits(fastagg.fedavg(None, clients), clients[0])  # a mean is never too large
    with pytest.raises(fastagg.InputError, match="key 'w' has values that are too large for torch"):
        fastagg.mix(clients, [1.0, 0.5, 0.5, 0.5])


def test_large_finite_values_are_no_error():
    g, clients = cohort()
    for sd in clients:
        sd["fc.weight"] *= 1e25  # the square is beyond float32
    for name in METHODS:
        if name not in ("fedadam", "fedyogi", "fedadagrad", "fedlaw", "fedbe"):  # these say that they cannot; see below
            for sd in models(run(name, g, clients)):
                assert all(torch.isfinite(value).all() for value in sd.values()), name
    with pytest.raises(fastagg.InputError, match=r"fedadam: the mean update of key 'fc.weight' is too large"):
        fastagg.fedadam(g, clients)


@pytest.mark.parametrize(
    ("dtype", "value"), [("float32", 1e25), ("float32", 3e38), ("float64", 1e100), ("float64", 1e200)]
)
@pytest.mark.parametrize("name", METHODS)
def test_one_large_finite_client_never_stops_a_server_that_drops(name, dtype, value):
    g, clients = cohort()
    if dtype == "float64":
        g, *clients = ({k: v.double() if v.is_floating_point() else v for k, v in sd.items()} for sd in (g, *clients))
    clients[BAD]["fc.weight"].view(-1)[5] = value
    clients[BAD]["fc.bias"][0] = -value
    options = dict(OPTIONS[name])
    if name == "fedlaw" and dtype == "float64":
        options["loss"] = lambda output, target: torch.nn.functional.cross_entropy(output.float(), target)
    server = fastagg.aggregator(name, on_bad_client="drop", **options)
    info = round_inputs(name)
    if name in TRAINERS:
        info["proxy"] = [(x.to(getattr(torch, dtype)), y) for x, y in info["proxy"]]
    if "server_model" in info:
        info["server_model"] = {key: value.to(g[key].dtype) for key, value in info["server_model"].items()}
    result = run(name, g, clients, ids=IDS, server=server, inputs=info)
    assert list(result.dropped) in ([], ["a"])
    for sd in models(result):
        assert sd is None or all(torch.isfinite(tensor).all() for tensor in sd.values())
    if result.dropped:
        strict = fastagg.aggregator(name, **options)
        with pytest.raises(fastagg.NonFiniteError, match=r"client 2 \(id 'a'\)") as caught:
            run(name, g, clients, ids=IDS, server=strict, inputs=info)
        assert caught.value.clients == [BAD]


def test_too_far_for_float64():
    g, clients = make(4, {"w": (5,)}, torch.float64)
    clients[3]["w"][:] = 1e200
    with pytest.raises(fastagg.NonFiniteError, match="client 3: its distance to the global model is too large"):
        fastagg.simprox(g, clients)
    result = fastagg.simprox(g, clients, on_bad_client="drop")
    assert list(result.dropped) == [3]
    assert_same_bits(result, fastagg.simprox(g, clients[:3]))
    with pytest.raises(fastagg.InputError, match="the global model is too large for float64"):
        fastagg.simprox(clients[3], clients[:3], on_bad_client="drop")


def test_a_global_model_that_is_not_finite_cannot_be_dropped():
    g, clients = cohort()
    g["bn.running_var"][0] = math.nan
    with pytest.raises(fastagg.InputError, match=r"the global model: key 'bn.running_var' has values"):
        fastagg.fednova(g, clients, local_steps=[1] * K, on_bad_client="drop")
    g["fc.bias"][0] = math.nan
    for method in (fastagg.fedawa, fastagg.krum, fastagg.centred_clipping):
        with pytest.raises(fastagg.InputError, match=r"the global model: keys 'fc.bias', 'bn.running_var' have values"):
            method(g, clients, on_bad_client="drop")


def test_what_is_not_read_of_the_global_model_is_not_looked_at():
    """Nor can it get into the result, as a NaN or otherwise."""
    g, clients = cohort()
    bad = dict(g, **{"bn.running_var": g["bn.running_var"] * math.nan})
    for name in ("fedawa", "simprox", "krum", "geometric_median", "fedamp"):
        for got, expected in zip(models(run(name, bad, clients)), models(run(name, g, clients)), strict=True):
            assert_same_bits(got, expected)
    bad["fc.bias"] = g["fc.bias"] * math.inf
    assert_same_bits(run("fedavg", bad, clients), run("fedavg", g, clients))


def test_dropping_leaves_no_data():
    g, clients = cohort()
    clients[3]["fc.bias"][0] = math.nan
    with pytest.raises(fastagg.InputError, match="sizes sum to zero: no client has data"):
        fastagg.fedavg(g, clients, [0, 0, 0, 5, 0, 0, 0], on_bad_client="drop")


def test_dropping_too_many_for_the_method():
    g, clients = cohort(5)
    clients[3]["fc.bias"][0] = math.nan
    with pytest.raises(fastagg.InputError, match="f=1 needs at least 2 f \\+ 3 = 5 clients, got 4"):
        fastagg.krum(g, clients, on_bad_client="drop")


@pytest.mark.parametrize("name", ["fedavg", "fedawa", "simprox", "krum", "fedamp", "cfl"])
def test_out_must_not_overlap_a_dropped_client(name):
    g, clients = cohort()
    clients[3]["conv.weight"][0] = math.nan
    out = copy.deepcopy(clients[0])
    out["fc.weight"] = clients[3]["fc.weight"]
    outs = [copy.deepcopy(clients[0]) for _ in range(K)] if name == "fedamp" else []
    before = snapshot(*clients)
    with pytest.raises(fastagg.InputError, match=r"out(\[\d\])?: key 'fc.weight' shares memory with an input"):
        run(
            name,
            g,
            clients,
            server=fastagg.aggregator(name, on_bad_client="drop"),
            out=[out, *outs[1:]] if outs else out,
        )
    assert_unchanged(clients, before)


def test_out_of_personal_models():
    g, clients = cohort()
    clients[3]["conv.weight"][0] = math.nan
    out = [copy.deepcopy(clients[0]) for _ in range(K)]
    untouched = copy.deepcopy(out[3])
    result = fastagg.fedamp(g, clients, on_bad_client="drop", out=out)
    assert result[3] is None
    assert_same_bits(out[3], untouched)
    for k in (0, 1, 2, 4, 5, 6):
        assert result[k]["fc.weight"] is out[k]["fc.weight"]
    with pytest.raises(fastagg.InputError, match="6 state dicts given, 7 needed"):
        fastagg.fedamp(g, clients, on_bad_client="drop", out=out[:6])


def test_logits_of_the_dropped():
    g, clients = cohort()
    clients[3]["conv.weight"][0] = math.nan
    given = np.linspace(0, 1, K)
    result = fastagg.fedawa(g, clients, on_bad_client="drop", logits=given)
    assert result.logits[3] == given[3]
    again = fastagg.fedawa(g, clients, on_bad_client="drop", logits=result.logits)
    assert again.logits[3] == given[3]


@pytest.mark.parametrize("bad", ["skip", None, True, 0])
def test_the_option_is_checked(bad):
    for name in METHODS:
        with pytest.raises(ValueError, match=f"{name}: on_bad_client={bad!r}; expected one of 'raise', 'drop'"):
            fastagg.aggregator(name, on_bad_client=bad)
    _, clients = cohort()
    with pytest.raises(ValueError, match="expected 'raise' or 'pass'"):
        fastagg.mix(clients, [1] * K, on_nonfinite="drop")


def test_a_round_input_of_the_wrong_length_is_not_cut_to_fit():
    g, clients = cohort()
    clients[3]["conv.weight"][0] = math.nan
    for method, info in ((fastagg.simprox, "lengths"), (fastagg.weiavg, "entropies"), (fastagg.fednova, "local_steps")):
        with pytest.raises(fastagg.InputError, match=info):
            method(g, clients, on_bad_client="drop", **{info: [1.0] * (K + 1)})


def test_errors_travel_between_processes():
    error = pickle.loads(pickle.dumps(fastagg.NonFiniteError("client 3: NaN", {3: "NaN"})))
    assert (str(error), error.clients, error.reasons) == ("client 3: NaN", [3], {3: "NaN"})
