"""FedAWA over rounds: which variant remembers what, of whom."""

import math

import pytest
import torch

import fastagg
from helpers.fedawa import (
    DTYPES,
    LAYERS,
    SCALES,
    SIZES,
    VARIANTS,
    assert_agrees,
    assert_close,
    call,
    first_logits,
    identical,
    make_client,
    make_cohort,
    make_global,
    reference,
)

pytestmark = pytest.mark.filterwarnings("ignore:fedawa. variant='released' learns over rounds")
ROUNDS = (("abc", (5, 1, 2)), ("bd", (1, 3)), ("ecda", (4, 2, 3, 5)), ("ab", (9, 1)), ("fcb", (2, 2, 1)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layerwise", [False, True], ids=["model", "layers"])
@pytest.mark.parametrize(("optimizer", "lr"), [("adam", 0.05), ("sgd", 0.2)])
@pytest.mark.parametrize("variant", VARIANTS)
def test_rounds_with_changing_cohorts(variant, optimizer, lr, layerwise, dtype):
    options = {"variant": variant, "optimizer": optimizer, "lr": lr, "layerwise": layerwise, "steps": 3}
    aggregator = fastagg.FedAWA(**options)
    model, carried = make_global(dtype), {}
    for t, (ids, sizes) in enumerate(ROUNDS):
        clients = [make_client(model, 10 * t + k + 1, SCALES["abcdef".index(i) % 5]) for k, i in enumerate(ids)]
        fresh = first_logits(sizes, variant, LAYERS if layerwise else None)
        start = torch.stack([carried.get(i, fresh[..., k]) for k, i in enumerate(ids)], -1)
        expected = reference(model, clients, sizes, logits=start, **options)
        result = call(aggregator.aggregate, model, clients, sizes, list(ids))
        assert_agrees(result, expected, start, dtype)
        if variant == "released":  # "paper" starts anew in every round
            carried.update(zip(ids, expected[1].unbind(-1), strict=True))
        model = dict(result)
    state = aggregator.state_dict()
    assert state["client_ids"] == list("abcdef" if variant == "released" else "")
    if not carried:
        return
    # errors of at most 5 rounds, each within what assert_agrees allows of a few steps of `lr`
    tolerance = 1e-8 if dtype == torch.float64 else 1e-5
    assert_close(state["logits"], torch.stack([carried[i] for i in state["client_ids"]]), rtol=0, atol=tolerance)


@pytest.mark.parametrize("layerwise", [False, True], ids=["model", "layers"])
def test_logits_continue_a_round_as_the_aggregator_does(layerwise):
    options = {"variant": "released", "steps": 2, "lr": 0.1, "layerwise": layerwise}
    global_sd, clients = make_cohort(torch.float32)
    aggregator = fastagg.FedAWA(**options)
    with pytest.warns(UserWarning, match="forgets what it learns"):
        first = call(fastagg.fedawa, global_sd, clients, SIZES, **options)
    assert identical(aggregator.aggregate(global_sd, clients, SIZES), first)
    again = call(fastagg.fedawa, first, clients, SIZES, logits=first.logits, **options)
    assert identical(call(aggregator.aggregate, first, clients, SIZES), again)
    assert not torch.equal(again.weights, first.weights)


def test_the_paper_starts_anew_in_every_round():
    """Carried over rounds, the weights would collapse onto one client."""
    global_sd, clients = make_cohort(torch.float32)
    server = fastagg.FedAWA()
    first, second = (server.aggregate(global_sd, clients, SIZES, list("abcde")) for _ in range(2))
    assert torch.equal(first.weights, second.weights)
    assert server.state_dict()["client_ids"] == []


@pytest.mark.filterwarnings("error")
def test_only_a_released_call_that_forgets_its_logits_warns():
    global_sd, clients = make_cohort(torch.float32)
    with pytest.warns(UserWarning, match="forgets what it learns") as caught:
        fastagg.fedawa(global_sd, clients, variant="released")
    assert caught[0].filename == __file__
    fastagg.fedawa(global_sd, clients, variant="released", logits=torch.zeros(5))
    fastagg.FedAWA(variant="released").aggregate(global_sd, clients)
    fastagg.fedawa(global_sd, clients)


def test_logits_by_position_stay_where_they_are():
    """What the authors' code does with partial participation: the logit belongs to the place, whoever stands there."""
    rounds = [("abc", (5, 1, 2)), ("cab", (2, 5, 1)), ("xyz", (1, 1, 1))]
    server, logits, model = fastagg.FedAWA(variant="released", logits_by="position", lr=0.05), None, make_global()
    for t, (ids, sizes) in enumerate(rounds):
        clients = [make_client(model, 10 * t + k + 1, SCALES[k]) for k in range(3)]
        start = first_logits(sizes, "released") if logits is None else logits
        expected = reference(model, clients, sizes, variant="released", logits=start, lr=0.05)
        result = server.aggregate(model, clients, sizes, list(ids))
        assert_agrees(result, expected, start, torch.float64)
        logits, model = expected[1], dict(result)
    loaded = fastagg.FedAWA(variant="released", logits_by="position")
    loaded.load_state_dict(server.state_dict())
    assert loaded.state_dict()["client_ids"] == [0, 1, 2]
    fewer = loaded.aggregate(model, clients[:2])  # positions need no ids
    assert_close(fewer.weights, logits[:2].softmax(0), rtol=1e-9)


def test_logits_by_position_pass_over_a_dropped_client():
    global_sd, clients = make_cohort(torch.float32, 3)
    server = fastagg.FedAWA(variant="released", logits_by="position", on_bad_client="drop", lr=0.05)
    server.aggregate(global_sd, clients, None, list("cab"))
    before = server.state_dict()["logits"].clone()
    bad = {key: value * math.nan if value.is_floating_point() else value for key, value in clients[1].items()}
    result = server.aggregate(global_sd, [clients[0], bad, clients[2]], None, list("cab"))
    after = dict(zip(server.state_dict()["client_ids"], server.state_dict()["logits"].tolist(), strict=True))
    assert list(result.dropped) == ["a"]
    old = dict(zip(server.state_dict()["client_ids"], before.tolist(), strict=True))
    assert after[1] == old[1]
    assert after[0] != old[0]
    assert after[2] != old[2]
