"""Bad adapters are named, with the key; or left out."""

from __future__ import annotations

import math

import pytest
import torch

import fastagg
from helpers.adapters import PREFIX, adapter, cohort

KEY = PREFIX + "layers.0.v_proj.lora_A.weight"
OTHER = KEY.replace("lora_A", "lora_B")


def spoil(sd, what):
    if what == "nan":
        sd[KEY][0, 0] = math.nan
    elif what == "infinite":
        sd[OTHER][3, 1] = math.inf
    elif what == "no B":
        del sd[OTHER]
    elif what == "ranks":
        sd[KEY] = sd[KEY][:2]
    elif what == "nothing":
        sd[KEY], sd[OTHER] = torch.ones(4, 0), torch.ones(24, 4)
    elif what == "size":
        sd[KEY] = torch.ones(4, 41)
    elif what == "another module":
        sd[KEY.replace("v_proj", "x_proj")] = sd.pop(KEY)
        sd[OTHER.replace("v_proj", "x_proj")] = sd.pop(OTHER)
    elif what == "integers":
        sd[KEY] = torch.ones(4, 40, dtype=torch.int64)
    elif what == "two adapters":
        sd[KEY.replace(".weight", ".other.weight")] = sd[KEY]
    elif what == "DoRA":
        sd[PREFIX + "layers.0.v_proj.lora_magnitude_vector"] = torch.ones(24)
    elif what == "KaSA":
        sd[PREFIX + "layers.0.v_proj.lora_diag"] = torch.ones(4)
    elif what == "a list":
        sd[KEY] = [1.0]
    elif what == "empty":
        sd.clear()
    elif what == "kernel":
        sd[KEY] = sd[KEY].reshape(4, 10, 2, 2)
    elif what == "by another name":
        for key in [*sd]:
            sd[key.removeprefix(PREFIX)] = sd.pop(key)
    elif what == "no PEFT names":
        sd[KEY.removesuffix(".weight")], sd[OTHER.removesuffix(".weight")] = sd.pop(KEY), sd.pop(OTHER)
    elif what == "names of Diffusers":
        sd[KEY.replace("lora_A", "lora.down")], sd[KEY.replace("lora_A", "lora.up")] = sd.pop(KEY), sd.pop(OTHER)
    elif what == "no module":
        sd["lora_A.weight"], sd["lora_B.weight"] = sd.pop(KEY), sd.pop(OTHER)
    elif what == "plain":
        sd[PREFIX + "head.weight"] = torch.ones(2)
    return sd


FAULTS = {
    "nan": r"v_proj.lora_A.weight' has values that are not finite",
    "infinite": r"v_proj.lora_B.weight' has values that are not finite",
    "no B": r"v_proj.lora_A.weight' has no counterpart lora_B",
    "ranks": r"of shape \(2, 40\) and .* of shape \(24, 4\) are no factors",
    "nothing": r"of shape \(4, 0\) and .* of shape \(24, 4\) are no factors",
    "size": r"module 'base_model.model.layers.0.v_proj' is 24 x 41, expected 24 x 40",
    "kernel": r"module 'base_model.model.layers.0.v_proj' is 24 x 10 x 2 x 2, expected 24 x 40",
    "by another name": r"module 'layers.0.q_proj' is 'base_model.model.layers.0.q_proj' in other adapters",
    "no PEFT names": r"v_proj.lora_A' is no factor by PEFT's names",
    "names of Diffusers": r"v_proj.lora.down.weight' is no factor by PEFT's names",
    "no module": r"key 'lora_A.weight' is no factor by PEFT's names",
    "another module": r"module '.*x_proj' is not in the global adapter",
    "integers": r"v_proj.lora_A.weight' is torch.int64; factors are floating-point",
    "two adapters": r"are two adapters of one module",
    "DoRA": r"lora_magnitude_vector': the weights of DoRA are scaled column by column",
    "KaSA": r"lora_diag': KaSA multiplies with lora_diag between B and A",
    "a list": r"v_proj.lora_A.weight' is a list",
    "empty": r"it has no tensors",
    "plain": r"head.weight' is not in the model it is compared with",
}


@pytest.mark.parametrize("what", FAULTS)
@pytest.mark.parametrize(("method", "form"), [("fedawa", "rank"), ("fedavg", "rank"), ("fedavg", "exact"),
                                              ("fedavg", "separate")])  # fmt: skip
def test_a_bad_client_is_named_or_left_out(what, method, form):
    g, clients = cohort(4)
    spoil(clients[2], what)
    sizes, ids = [1, 2, 3, 4], list("abcd")
    with pytest.raises(fastagg.InputError, match=rf"client 2 \(id 'c'\): .*{FAULTS[what]}"):
        fastagg.lora.aggregate(g, clients, sizes, method=method, form=form, client_ids=ids)
    found = fastagg.lora.aggregate(g, clients, sizes, method=method, form=form, client_ids=ids, on_bad_client="drop")
    rest = fastagg.lora.aggregate(
        g, [*clients[:2], clients[3]], [1, 2, 4], method=method, form=form, client_ids=["a", "b", "d"]
    )
    assert list(found.dropped) == ["c"]
    assert all(torch.equal(found[key], value) for key, value in rest.items())
    assert torch.equal(found.weights[[0, 1, 3]], rest.weights)
    assert found.weights[2] == 0


def test_a_client_without_data_is_looked_at_all_the_same():
    g, clients = cohort(3)
    spoil(clients[1], "nan")
    with pytest.raises(fastagg.NonFiniteError, match=r"client 1: .*lora_A.weight"):
        fastagg.lora.aggregate(g, clients, [1, 0, 1], method="fedavg")


def test_several_bad_clients_and_none_left():
    g, clients = cohort(3)
    for sd, what in zip(clients, ("nan", "size", "no B"), strict=True):
        spoil(sd, what)
    with pytest.raises(fastagg.InputError, match="no client is left"):
        fastagg.lora.aggregate(g, clients, on_bad_client="drop")
    good = adapter(4, seed=50)
    result = fastagg.lora.aggregate(g, [*clients, good], on_bad_client="drop")
    assert set(result.dropped) == {0, 1, 2}
    assert result.weights.tolist() == [0, 0, 0, 1]


@pytest.mark.parametrize("method", ["fedawa", "fedavg"])
def test_a_bad_global_adapter_is_nobody_elses_fault(method):
    g, clients = cohort(3)
    spoil(g, "nan")
    more = {} if method == "fedawa" else {"server_lr": 0.5}
    with pytest.raises(fastagg.InputError, match=r"the global (adapter|model): key '.*lora_A.weight'"):
        fastagg.lora.aggregate(g, clients, method=method, **more, on_bad_client="drop")


def test_a_result_that_no_dtype_holds():
    g, clients = cohort(2, dtype=torch.float16)
    for sd in clients:
        sd[KEY].fill_(200.0)
        sd[OTHER].fill_(200.0)
    with pytest.raises(fastagg.InputError, match=r"module '.*v_proj' is too large for its dtype"):
        fastagg.lora.aggregate(g, clients, method="fedavg", form="exact", scaling=lambda r: 1.0, server_lr=1000.0)


def test_a_client_of_another_rank_whose_scaling_nobody_knows():
    _, clients = cohort(3)
    clients.insert(1, adapter(7, seed=50))
    with pytest.raises(fastagg.BadClientError, match=r"client 1: adapters of rank 4 and 7 come without a config"):
        fastagg.lora.aggregate(None, clients)
    assert list(fastagg.lora.aggregate(None, clients, on_bad_client="drop").dropped) == [1]
    config = fastagg.lora.Adapter(clients[0], {"lora_alpha": 8})
    assert list(fastagg.lora.aggregate(None, [config, *clients], on_bad_client="drop").dropped) == [0, 2]
    for some in (clients[:2], [*clients[:2], adapter(9)]):  # who is right?
        with pytest.raises(fastagg.InputError, match=r"adapters of rank 4 and 7") as raised:
            fastagg.lora.aggregate(None, some, on_bad_client="drop")
        assert not isinstance(raised.value, fastagg.BadClientError)
    with pytest.raises(fastagg.InputError, match=r"adapters of rank 4 and 7"):
        fastagg.lora.aggregate(adapter(7), [clients[0]] * 3, on_bad_client="drop")


def test_a_client_that_was_left_out_leaves_no_trace():
    """Neither its rank, nor its dtype, config or modules"""
    _, clients = cohort(3)
    extra = {"layers.9.q_proj": (10, 10)}
    bad = adapter(6, {"layers.0.v_proj": (24, 40), **extra}, torch.float64, seed=9)
    bad[KEY][0, 0] = math.nan
    some = [fastagg.lora.Adapter(sd, {"lora_alpha": 8}) for sd in clients]
    given = [some[0], fastagg.lora.Adapter(bad, {"lora_alpha": 99}), *some[1:]]
    for method in ("fedawa", "fedavg"):
        found = fastagg.lora.aggregate(None, given, method=method, on_bad_client="drop")
        expected = fastagg.lora.aggregate(None, some, method=method)
        assert list(found.dropped) == [1]
        assert set(found) == set(expected)
        for key, value in expected.items():
            assert found[key].dtype == value.dtype
            assert torch.equal(found[key], value)
        assert (found.ranks, found.scaling, found.config) == (expected.ranks, expected.scaling, expected.config)


def test_without_a_global_adapter_most_clients_are_right():
    _, clients = cohort(4)
    spoil(clients[0], "size")
    result = fastagg.lora.aggregate(None, clients, on_bad_client="drop")
    assert list(result.dropped) == [0]


@pytest.mark.parametrize("at", [0, 2])
def test_without_a_global_adapter_most_clients_say_what_modules_are_called(at):
    """And which shape a convolution has"""
    _, clients = cohort(4)
    spoil(clients[at], "by another name")
    assert list(fastagg.lora.aggregate(None, clients, on_bad_client="drop").dropped) == [at]
    clients = [
        {
            PREFIX + "conv.lora_A.weight": torch.randn(2, 4, *kernel),
            PREFIX + "conv.lora_B.weight": torch.ones(5, 2, 1, 1),
        }
        for kernel in ((3, 3), (3, 3), (3, 3))
    ]
    clients[at][PREFIX + "conv.lora_A.weight"] = torch.randn(2, 4, 1, 9)
    assert list(fastagg.lora.aggregate(None, clients, on_bad_client="drop").dropped) == [at]


def test_what_is_no_adapter_at_all():
    g, clients = cohort(2)
    with pytest.raises(fastagg.InputError, match="client 1: a int is no adapter: expected a state dict, or its folder"):
        fastagg.lora.aggregate(g, [clients[0], 7])
    with pytest.raises(fastagg.InputError, match="client_adapters is a dict; expected a sequence"):
        fastagg.lora.aggregate(g, clients[0])
    with pytest.raises(fastagg.InputError, match="no clients"):
        fastagg.lora.aggregate(g, [])


def test_the_factors_of_one_live_model(recwarn):
    """peft.get_peft_model_state_dict gives references, as state_dict() does"""
    g, clients = cohort(3)
    for center, plain in ((g, {}), (None, {}), (None, {PREFIX + "head.weight": torch.ones(2)})):
        same = {**clients[0], **plain}
        with pytest.warns(UserWarning, match=r"client 0 \(id 7\), client 2 \(id 5\) are the same tensors") as said:
            fastagg.lora.aggregate(center, [same, {**clients[1], **plain}, same], method="fedavg", client_ids=[7, 3, 5])
        assert len(said) == 1
    for sd in clients:
        sd.update({key: g[key] for key in g if "lora_A" in key})  # a frozen A is one
    fastagg.lora.aggregate(g, clients, method="fedavg", form="frozen_a")
    parts = [{key: value for key, value in sd.items() if "layers.0" in key} for sd in clients]
    fastagg.lora.aggregate(None, [clients[2], *parts], method="fedavg")
    assert not recwarn.list
