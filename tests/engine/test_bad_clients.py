"""One policy for clients that cannot be aggregated, in every method: named in an error, or left out with the reason."""

from __future__ import annotations

import copy
import logging
import math

import numpy as np
import pytest
import torch

import fastagg
from helpers.cohort import assert_same_bits
from helpers.every_method import IDS, METHODS, OPTIONS, K, cohort, models, round_inputs, run, some_of

BAD = 2
KEEP = [k for k in range(K) if k != BAD]


def missing(sd):
    del sd["fc.bias"]


def extra(sd):
    sd["more"] = torch.ones(2)


def shape(sd):
    sd["fc.weight"] = torch.ones(4, 1)


def dtype(sd):
    sd["fc.weight"] = sd["fc.weight"].double()


def kind(sd):
    sd["fc.weight"] = "no tensor"


def not_finite(sd):
    sd["conv.weight"][0] = math.nan


FAULTS = {
    missing: "key 'fc.bias' is missing",
    extra: "key 'more' is not in the model it is compared with",
    shape: "key 'fc.weight' has shape (4, 1), expected (4, 24)",
    dtype: "key 'fc.weight' has dtype torch.float64, expected torch.float32",
    kind: "key 'fc.weight' is a str, expected a torch tensor or NumPy array",
    not_finite: "key 'conv.weight' has values that are not finite (NaN or infinity)",
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("name", METHODS)
def test_it_is_named_or_left_out(name, fault, caplog):
    sizes, inputs = torch.arange(1.0, K + 1), round_inputs(name)
    g, clients = cohort()
    fault(clients[BAD])
    with pytest.raises(fastagg.BadClientError) as caught:
        run(name, g, clients, sizes, ids=IDS)
    assert str(caught.value) == f"client {BAD} (id 'a'): {FAULTS[fault]}"
    assert caught.value.reasons == {BAD: FAULTS[fault]}
    dropping = fastagg.aggregator(name, on_bad_client="drop", **OPTIONS[name])
    with caplog.at_level(logging.WARNING, "fastagg"):
        result = run(name, g, clients, sizes, ids=IDS, server=dropping, inputs=inputs)
    assert result.dropped == {"a": FAULTS[fault]}
    assert f"{name}: client {BAD} (id 'a'): {FAULTS[fault]}; left out of this round" in caplog.text
    rest = some_of(name, inputs, KEEP)
    expected = run(name, g, [clients[k] for k in KEEP], sizes[KEEP], ids=[IDS[k] for k in KEEP], inputs=rest)
    assert dict(expected.dropped) == {}
    for a, b in zip((sd for sd in models(result) if sd is not None), models(expected), strict=True):
        assert_same_bits(a, b)
        assert torch.equal(a.weights[..., KEEP], b.weights)
        assert not a.weights[..., BAD].any()


@pytest.mark.parametrize("size", [math.nan, -1, math.inf, None, "many", [1, 2]])
def test_a_size_that_is_none(size):
    g, clients = cohort()
    sizes = [size if k == BAD else 1.0 + k for k in range(K)]
    words = f"its entry in sizes is {size!r}, expected a finite number >= 0"
    with pytest.raises(fastagg.BadClientError) as caught:
        fastagg.fedavg(g, clients, sizes)
    assert str(caught.value) == f"client {BAD}: {words}"
    result = fastagg.fedavg(g, clients, sizes, on_bad_client="drop")
    assert result.dropped == {BAD: words}
    assert_same_bits(result, fastagg.fedavg(g, [clients[k] for k in KEEP], [1.0 + k for k in KEEP]))


@pytest.mark.parametrize(
    ("name", "what", "good", "bad"),
    [
        ("fednova", "local_steps", 3.0, [0, -1, math.nan, None, [1, 2]]),
        ("feddisco", "label_dist", [1, 2, 3], [[0, 0, 0], [1, -1, 0], [1, 2], [math.inf, 1, 1], 4, "x", None]),
        ("cwfedavg", "class_dist", [1, 0, 3], [[1, -1, 0], [1, 2], [math.nan, 1, 1], []]),
        ("weiavg", "entropies", 0.5, [-0.1, math.nan]),
        ("simprox", "lengths", 0.5, [-0.1, math.inf]),
    ],
)
def test_an_entry_of_a_round_input(name, what, good, bad):
    g, clients = cohort()
    for entry in bad:
        values = [entry if k == BAD else good for k in range(K)]
        with pytest.raises(fastagg.BadClientError, match=f"client {BAD}: its entry in {what} "):
            fastagg.aggregator(name).aggregate(g, clients, **{what: values})
        result = fastagg.aggregator(name, on_bad_client="drop").aggregate(g, clients, **{what: values})
        assert list(result.dropped) == [BAD]
        rest = fastagg.aggregator(name).aggregate(g, [clients[k] for k in KEEP], **{what: [good] * len(KEEP)})
        for a, b in zip((sd for sd in models(result) if sd is not None), models(rest), strict=True):
            assert_same_bits(a, b)


def test_what_the_server_provides_is_never_a_clients_fault():
    g, clients = cohort()
    logits = np.zeros(K)
    logits[BAD] = math.nan
    with pytest.raises(fastagg.InputError, match="logits") as caught:
        fastagg.fedawa(g, clients, logits=logits, on_bad_client="drop")
    assert not isinstance(caught.value, fastagg.BadClientError)


def test_an_error_in_the_place_of_a_model():
    """A program that could not read a client's model says why"""
    g, clients = cohort()
    clients[BAD] = fastagg.InputError("its upload was cut off")
    with pytest.raises(fastagg.BadClientError, match=r"^client 2: its upload was cut off$"):
        fastagg.fedawa(g, clients)
    assert fastagg.fedawa(g, clients, on_bad_client="drop").dropped == {BAD: "its upload was cut off"}
    clients[3] = ["not", "a", "state dict"]
    said = fastagg.fedavg(g, clients, on_bad_client="drop").dropped
    assert said == {BAD: "its upload was cut off", 3: "it is a list, expected a state dict (name -> tensor)"}


def test_without_a_global_model_most_clients_are_right():
    _, clients = cohort()
    shape(clients[0])
    result = fastagg.fedavg(None, clients, on_bad_client="drop")
    assert result.dropped == {0: "key 'fc.weight' has shape (4, 1), expected (4, 24)"}
    assert_same_bits(result, fastagg.fedavg(None, clients[1:]))


def test_nobody_is_left_and_several_are():
    g, clients = cohort()
    for sd in clients:
        missing(sd)
    with pytest.raises(fastagg.InputError, match=r"no client is left: none of 7 can be used\. .*'fc.bias' is missing"):
        fastagg.fedawa(g, clients, on_bad_client="drop")
    g, clients = cohort()
    missing(clients[0])
    not_finite(clients[4])
    clients[5]["bn.running_var"][0] = math.inf
    result = fastagg.fedavg(g, clients, [1, 1, -1, 1, 1, 1, 1], on_bad_client="drop")
    assert sorted(result.dropped) == [0, 2, 4, 5]
    assert_same_bits(result, fastagg.fedavg(g, [clients[k] for k in (1, 3, 6)]))


def test_a_client_that_is_left_out_is_not_written_to():
    g, clients = cohort()
    before = copy.deepcopy(clients[BAD])
    out = {key: value.clone() for key, value in g.items()}
    out["fc.bias"] = clients[BAD]["fc.bias"]
    shape(clients[BAD])
    with pytest.raises(fastagg.InputError, match=r"out: key 'fc\.bias' shares memory with an input"):
        fastagg.fedavg(g, clients, out=out, on_bad_client="drop")
    assert torch.equal(clients[BAD]["fc.bias"], before["fc.bias"])


def test_inputs_by_id_and_iterators():
    g, clients = cohort()
    not_finite(clients[BAD])
    logits = {name: 0.1 * k for k, name in enumerate(IDS)}
    server = fastagg.aggregator("fedawa", on_bad_client="drop")
    result = server.aggregate(g, clients, client_ids=IDS, logits=logits)
    assert result.logits[BAD] == pytest.approx(0.1 * BAD)
    sizes = [1.0, 2.0, math.nan, 4.0, 5.0, 6.0, 7.0]
    with pytest.raises(fastagg.BadClientError, match="client 2: its entry in sizes is nan"):
        fastagg.fedavg(g, clients, iter(sizes))
    assert list(fastagg.fedavg(g, clients, iter(sizes), on_bad_client="drop").dropped) == [BAD]
    with pytest.raises(fastagg.InputError, match=r"client 2 \(id 'a'\): its entry in logits is nan"):
        server.aggregate(g, clients, client_ids=IDS, logits=logits | {"a": math.nan})
    with pytest.raises(fastagg.InputError, match="logits: expected as many numbers for every client"):
        server.aggregate(g, clients, client_ids=IDS, logits=logits | {"a": [1.0, 2.0]})


def test_valid_entries_decide_what_is_usual():
    g, clients = cohort()
    result = fastagg.fedavg(g, clients, [1, 2, 3, [1, 2], [1, 2], [1, 2], [1, 2]], on_bad_client="drop")
    assert sorted(result.dropped) == [3, 4, 5, 6]


def test_a_form_that_cannot_be_aggregated_at_all():
    clients = [{"w": torch.ones(2, dtype=torch.complex64)}, {"w": torch.ones(2)}]
    result = fastagg.fedavg(None, clients, on_bad_client="drop")
    assert "complex64" in result.dropped[0]
    assert torch.equal(result["w"], torch.ones(2))
