"""FedAWA's state: saved and loaded, refused where it is bad, and unchanged by a round that raises."""

import copy
import math

import pytest
import torch

import fastagg
from helpers.fedawa import LAYERS, SIZES, VARIANTS, call, identical, make_cohort

pytestmark = pytest.mark.filterwarnings("ignore:fedawa. variant='released' learns over rounds")


def aggregator_after_rounds(**options):
    aggregator = fastagg.FedAWA(**{"variant": "released", **options})
    for t, ids in enumerate(("abc", "cd")):
        global_sd, clients = make_cohort(torch.float32, len(ids), seed=t)
        aggregator.aggregate(global_sd, clients, SIZES[: len(ids)], list(ids))
    return aggregator


def same_state(a, b):
    return list(a) == list(b) and all(
        torch.equal(a[key], b[key]) if isinstance(a[key], torch.Tensor) else a[key] == b[key] for key in a
    )


@pytest.mark.parametrize("layerwise", [False, True], ids=["model", "layers"])
@pytest.mark.parametrize("variant", [*VARIANTS, "cos"])
def test_a_saved_state_continues_bit_for_bit(variant, layerwise, tmp_path):
    options = {"variant": variant, "layerwise": layerwise, "steps": 3, "lr": 0.1}
    aggregator = aggregator_after_rounds(**options)
    torch.save(aggregator.state_dict(), tmp_path / "state.pt")
    loaded = fastagg.FedAWA(**options)
    loaded.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert same_state(loaded.state_dict(), aggregator.state_dict())
    for t, ids in enumerate(("bcae", "ef", "abcd")):
        global_sd, clients = make_cohort(torch.float32, len(ids), seed=5 + t)
        results = [call(a.aggregate, global_sd, clients, None, list(ids)) for a in (aggregator, loaded)]
        assert identical(*results)
        assert torch.equal(results[0].weights, results[1].weights)
        assert same_state(loaded.state_dict(), aggregator.state_dict())


def test_a_state_dict_is_a_snapshot():
    aggregator = aggregator_after_rounds(lr=0.1)
    snapshot, kept = aggregator.state_dict(), copy.deepcopy(aggregator.state_dict())
    result = aggregator.aggregate(*make_cohort(torch.float32, 3), None, list("abz"))
    assert same_state(snapshot, kept)
    after = copy.deepcopy(aggregator.state_dict())
    assert not same_state(after, kept)
    for state in (snapshot, aggregator.state_dict()):
        state["logits"].zero_()
        state["client_ids"].clear()
    result.logits.zero_()
    assert same_state(aggregator.state_dict(), after)
    loaded = fastagg.FedAWA(variant="released", lr=0.1)
    loaded.load_state_dict(kept)
    kept["logits"].zero_()
    assert loaded.state_dict()["logits"].abs().min() > 0


def replaced(key, value):
    return lambda state: {**state, key: value(state[key]) if callable(value) else value}


BAD_STATES = {
    "method": replaced("method", "fedavg"),
    "variant": replaced("variant", "paper"),
    "logits by position": replaced("logits_by", "position"),
    "too few logits": replaced("logits", lambda T: T[:-1]),
    "too many logits": replaced("logits", lambda T: torch.cat([T, T])),
    "one axis more": replaced("logits", lambda T: T[..., None]),
    "NaN": replaced("logits", lambda T: T.index_fill(0, torch.tensor([1]), math.nan)),
    "layers": replaced("layers", lambda layers: list(LAYERS) if layers is None else None),
    "twice the same client": replaced("client_ids", lambda ids: [ids[0], *ids[:-1]]),
    "empty": lambda state: {},
    **{
        f"no {k}": lambda s, k=k: {x: s[x] for x in s if x != k}
        for k in ("method", "variant", "logits_by", "layers", "client_ids", "logits")
    },
}


@pytest.mark.parametrize("layerwise", [False, True], ids=["model", "layers"])
@pytest.mark.parametrize("bad", BAD_STATES)
def test_bad_states_are_refused_and_change_nothing(bad, layerwise):
    aggregator = aggregator_after_rounds(layerwise=layerwise)
    before = copy.deepcopy(aggregator.state_dict())
    donor = aggregator_after_rounds(layerwise=layerwise, steps=4, lr=0.2).state_dict()
    with pytest.raises(fastagg.InputError):
        aggregator.load_state_dict(BAD_STATES[bad](donor))
    assert same_state(aggregator.state_dict(), before)


@pytest.mark.parametrize("layerwise", [False, True], ids=["model", "layers"])
def test_a_state_of_the_other_scope_is_refused(layerwise):
    aggregator = aggregator_after_rounds(layerwise=layerwise)
    before = copy.deepcopy(aggregator.state_dict())
    with pytest.raises(fastagg.InputError):
        aggregator.load_state_dict(aggregator_after_rounds(layerwise=not layerwise).state_dict())
    assert same_state(aggregator.state_dict(), before)


def test_a_model_of_other_layers_is_refused():
    aggregator = aggregator_after_rounds(layerwise=True)
    before = copy.deepcopy(aggregator.state_dict())
    for new_ids in (list("abc"), list("xyz")):
        global_sd, clients = make_cohort(torch.float32, 3)
        with pytest.raises(fastagg.InputError, match="layers"):
            aggregator.aggregate(without(global_sd, "scale"), [without(sd, "scale") for sd in clients], None, new_ids)
    assert same_state(aggregator.state_dict(), before)


def without(sd, key):
    return {k: v for k, v in sd.items() if k != key}


def bad_round(case, g, clients, ids):
    sizes, out = SIZES[: len(ids)], None
    if case == "shape":
        clients[-1]["fc2.weight"] = clients[-1]["fc2.weight"].T.contiguous()
    elif case == "dtype":
        clients[-1]["bn1.running_var"] = clients[-1]["bn1.running_var"].double()
    elif case == "key":
        clients[-1] = without(clients[-1], "fc1.bias")
    elif case == "no clients":
        clients = []
    elif case == "sizes":
        sizes = (1, 2)
    elif case == "negative size":
        sizes = (1, 2, -1)
    elif case == "ids":
        ids = ["a", "b", "a"]
    elif case == "out":
        out = without(g, "fc1.bias")
    elif case == "out is an input":
        out = clients[0]
    return g, clients, sizes, ids, out


@pytest.mark.parametrize(
    "case", ["shape", "dtype", "key", "no clients", "sizes", "negative size", "ids", "out", "out is an input"]
)
@pytest.mark.parametrize("layerwise", [False, True], ids=["model", "layers"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_round_that_raises_leaves_the_state(variant, layerwise, case):
    aggregator = aggregator_after_rounds(variant=variant, layerwise=layerwise)
    before = copy.deepcopy(aggregator.state_dict())
    g, clients, sizes, ids, out = bad_round(case, *make_cohort(torch.float32, 3), ["a", "d", "new"])
    with pytest.raises(fastagg.InputError):
        aggregator.aggregate(g, clients, sizes, ids, out=out)
    assert same_state(aggregator.state_dict(), before)
