"""mix, gram_mix, client_vectors and what they return."""

from __future__ import annotations

import copy
import io
import pickle
import re

import numpy as np
import pytest
import torch

import fastagg
from helpers.cohort import assert_same_bits, flat, make

SHAPES = {"a.weight": (40, 3), "a.bias": (40,), "b.weight": (7,)}


@pytest.fixture
def cohort():
    return make(4, SHAPES)


def test_one_output_or_several(cohort):
    _, clients = cohort
    weights = torch.rand(3, 4)
    several = fastagg.mix(clients, weights)
    assert isinstance(several, list)
    assert len(several) == 3
    for m, sd in enumerate(several):
        assert_same_bits(sd, fastagg.mix(clients, weights[m]))
        assert torch.equal(sd.weights, weights[m].double())


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_weights_per_layer(cohort, backend):
    g, clients = cohort
    weights = torch.rand(2, 4, dtype=torch.float64)  # layers a and b
    got = fastagg.mix(clients, weights, layerwise=True, backend=backend)
    assert got.layers == ("a", "b")
    for layer, row in zip("ab", weights, strict=True):
        part = [{k: v for k, v in sd.items() if k.startswith(layer)} for sd in clients]
        assert_same_bits({k: v for k, v in got.items() if k.startswith(layer)}, fastagg.mix(part, row, backend=backend))
    gram, mixed = fastagg.gram_mix(g, clients, weights, layerwise=True)
    assert_same_bits(mixed, fastagg.mix(clients, weights, layerwise=True))
    assert torch.equal(gram.matrix, fastagg.gram(g, clients, layerwise=True).matrix)
    several = fastagg.mix(clients, torch.stack([weights, 2 * weights], 1), layerwise=True)
    assert_same_bits(several[0], fastagg.mix(clients, weights, layerwise=True))


@pytest.mark.parametrize("weights", [[1, 2, 3], [[1, 2, 3]], 1.0, np.ones((2, 3, 4)), np.ones((0, 4))], ids=str)
def test_weights_of_the_wrong_shape(cohort, weights):
    with pytest.raises(fastagg.InputError, match="weights have shape"):
        fastagg.mix(cohort[1], weights)


def test_weights_that_are_not_numbers(cohort):
    for bad in (float("nan"), float("inf")):
        with pytest.raises(fastagg.InputError, match=f"the weight of client 2 is {bad}"):
            fastagg.mix(cohort[1], [1, 1, bad, 1])
    with pytest.raises(fastagg.InputError, match=r"expected \[L, K\] or \[L, M, K\] with L = 2, K = 4"):
        fastagg.mix(cohort[1], torch.ones(4), layerwise=True)


def test_client_vectors(cohort):
    g, clients = cohort
    vectors = fastagg.client_vectors(g, clients)
    assert vectors.shape == (4, 167)
    assert torch.equal(vectors, torch.stack([flat(sd).float() - flat(g).float() for sd in clients]))
    G = fastagg.gram(g, clients)
    torch.testing.assert_close(vectors.double() @ vectors.double().T, G.updates(), rtol=1e-6, atol=1e-9)
    with pytest.raises(fastagg.InputError, match="no parameters"):
        fastagg.client_vectors({"running_mean": torch.ones(2)}, [{"running_mean": torch.ones(2)}])


@pytest.mark.parametrize("call", [fastagg.fedavg, fastagg.fedawa, fastagg.FedAWA(layerwise=True).aggregate])
def test_out_is_written_in_place(cohort, call):
    g, clients = cohort
    fresh = call(g, clients)
    out = {key: torch.full_like(value, float("nan")) for key, value in g.items()}
    again = call(g, clients, out=out)
    if isinstance(call, type(fastagg.fedavg)):
        assert_same_bits(again, fresh)
    for key in g:
        assert again[key] is out[key]
        assert torch.isfinite(out[key]).all()


OVERLAPS = {
    "a client": lambda g, clients: clients[2],
    "the global model": lambda g, clients: g,
    "a client, by one element": lambda g, clients: {**clean(g), "a.bias": tail_of(clients[1])},
}


def clean(g):
    return {key: torch.empty_like(value) for key, value in g.items()}


def tail_of(client):
    big = torch.zeros(79)
    client["a.bias"] = big[:40]
    return big[39:]


@pytest.mark.parametrize("case", OVERLAPS)
def test_out_must_not_overlap_an_input(cohort, case):
    g, clients = cohort
    out = OVERLAPS[case](g, clients)
    with pytest.raises(fastagg.InputError, match="shares memory with an input"):
        fastagg.fedavg(g, clients, out=out)


@pytest.mark.parametrize("kind", [torch.float64, torch.float32, "numpy"], ids=str)
def test_out_must_not_overlap_the_weights(kind):
    dtype = torch.float64 if kind == "numpy" else kind
    memory = torch.full((6,), 0.5, dtype=dtype)
    weights = memory[:3].numpy() if kind == "numpy" else memory[:3]
    g, clients = make(3, {"w": (3,)}, dtype)
    for call in (
        lambda out: fastagg.mix(clients, weights, out=out),
        lambda out: fastagg.gram_mix(g, clients, weights, out=out),
    ):
        for first in (0, 2):
            with pytest.raises(fastagg.InputError, match="out: key 'w' shares memory with an input"):
                call({"w": memory[first : first + 3]})
        assert (memory[:3] == 0.5).all()
        call({"w": memory[3:]})


def test_out_next_to_an_input_is_fine(cohort):
    g, clients = cohort
    memory = torch.zeros(80)
    clients[0]["a.bias"] = memory[:40]
    fastagg.fedavg(g, clients, out={**clean(g), "a.bias": memory[40:]})
    assert (memory[:40] == 0).all()


BAD_OUT = {
    "missing": (lambda o: o.pop("b.weight"), "out: key 'b.weight' is missing"),
    "extra": (lambda o: o.update(x=torch.ones(1)), "out: key 'x' is not in the model"),
    "shape": (
        lambda o: o.update({"b.weight": torch.ones(1, 7)}),
        "out: key 'b.weight' has shape (1, 7), expected (7,)",
    ),
    "dtype": (
        lambda o: o.update({"b.weight": torch.ones(7).double()}),
        "has dtype torch.float64, expected torch.float32",
    ),
    "strides": (lambda o: o.update({"b.weight": torch.ones(14)[::2]}), "out: key 'b.weight' is not contiguous"),
    "negative": (
        lambda o: o.update({"b.weight": torch.ones(7, dtype=torch.cfloat).conj().imag}),
        "out: key 'b.weight' is not contiguous",
    ),
    "byte order": (lambda o: o.update({"b.weight": np.ones(7, np.dtype(np.float32).newbyteorder())}), "byte order"),
    "no tensor": (
        lambda o: o.update({"b.weight": [1.0] * 7}),
        "out: key 'b.weight' is a list, expected a torch tensor",
    ),
    "grad": (lambda o: o.update({"b.weight": torch.ones(7, requires_grad=True)}), "requires grad"),
    "read-only": (lambda o: o.update({"b.weight": np.frombuffer(bytes(28), np.float32)}), "read-only"),
    "itself": (lambda o: o.update({"b.weight": o["a.bias"][:7]}), "two of its tensors share memory"),
}


def test_a_number_cannot_be_written_to():
    models = [{"c": torch.tensor(float(k))} for k in range(3)]
    with pytest.raises(fastagg.InputError, match="out: key 'c' is a float32, expected a tensor or array"):
        fastagg.fedavg(None, models, out={"c": np.float32(1)})


@pytest.mark.parametrize("case", BAD_OUT)
def test_bad_out(cohort, case):
    g, clients = cohort
    out = clean(g)
    spoil, message = BAD_OUT[case]
    spoil(out)
    with pytest.raises(fastagg.InputError, match=re.escape(message)):
        fastagg.fedavg(g, clients, out=out)


def test_out_for_several(cohort):
    g, clients = cohort
    outs = [clean(g), clean(g)]
    results = fastagg.mix(clients, torch.rand(2, 4), out=outs)
    assert results[1]["a.bias"] is outs[1]["a.bias"]
    with pytest.raises(fastagg.InputError, match="1 state dicts given, 2 needed"):
        fastagg.mix(clients, torch.rand(2, 4), out=outs[:1])
    with pytest.raises(fastagg.InputError, match="share memory"):
        fastagg.mix(clients, torch.rand(2, 4), out=[outs[0], outs[0]])


def test_a_result_is_a_state_dict():
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    g = {k: v.clone() for k, v in model.state_dict().items()}
    result = fastagg.fedawa(model.state_dict(), [g, g])
    assert result._metadata == model.state_dict()._metadata
    model.load_state_dict(result)
    assert fastagg.fedavg(result, [result, result]).keys() == result.keys()  # the next round's global model

    file = io.BytesIO()
    torch.save(result, file)
    file.seek(0)
    assert_same_bits(torch.load(file, weights_only=True), result)
    assert_same_bits(pickle.loads(pickle.dumps(result)), result)

    for twin in (copy.deepcopy(result), copy.copy(result), result.copy()):
        assert_same_bits(twin, result)
        assert torch.equal(twin.weights, result.weights)
        assert torch.equal(twin.gram.matrix, result.gram.matrix)


def test_set_backend(cohort):
    g, clients = cohort
    fastagg.set_backend("reference")
    reference = fastagg.fedawa(g, clients)
    fastagg.set_backend("cpu")
    native = fastagg.fedawa(g, clients)
    torch.testing.assert_close(flat(native), flat(reference), rtol=2e-7, atol=0)
    with pytest.raises(ValueError, match="unknown backend 'gpu'; expected one of"):
        fastagg.set_backend("gpu")
    with pytest.raises(ValueError, match="unknown backend"):
        fastagg.gram(g, clients, backend="gpu")


def test_one_client_one_tensor():
    g, clients = make(1, {"w": (5,)})
    assert_same_bits(fastagg.fedavg(g, clients), clients[0])
    assert fastagg.fedavg(None, clients).weights.tolist() == [1.0]


def test_out_must_not_overlap_an_input_that_had_to_be_copied():
    memory = torch.arange(6.0).reshape(2, 3)
    ones = {"w": torch.ones(3, 2)}
    with pytest.raises(fastagg.InputError, match="shares memory with an input"):
        fastagg.mix([{"w": memory.T}, ones], [0.5, 0.5], out={"w": memory.reshape(3, 2)})
    array = np.arange(4, dtype=np.float32)
    with pytest.raises(fastagg.InputError, match="shares memory with an input"):
        fastagg.mix([{"w": array[::-1]}, {"w": np.ones(4, np.float32)}], [0.5, 0.5], out={"w": array})
    assert array.tolist() == [0, 1, 2, 3]


def test_out_overlapping_the_longer_of_two_nested_inputs():
    memory = torch.zeros(100)
    clients = [{"a": memory[:90], "b": memory[5:15]}, {"a": torch.ones(90), "b": torch.ones(10)}]
    out = {"a": torch.empty(90), "b": memory[60:70]}
    with pytest.raises(fastagg.InputError, match="key 'b' shares memory"):
        fastagg.mix(clients, [0.5, 0.5], out=out)


@pytest.mark.parametrize("bad", [np.zeros(4, ">f4"), np.zeros(4, np.float32)[::-1], np.float32(1)], ids=repr)
def test_out_that_could_not_be_written_in_place(bad):
    clients = [{"w": np.ones(4, np.float32)}] * 2
    with pytest.raises(fastagg.InputError, match="out: key 'w'"):
        fastagg.mix(clients, [0.5, 0.5], out={"w": bad})


def test_writing_out_invalidates_graphs_that_saved_it():
    x, y = {"w": torch.ones(3)}, {"w": torch.ones(3) * 2}
    weights = torch.tensor([0.5, 0.5], requires_grad=True)
    loss = fastagg.mix([x, y], weights)["w"].sum()
    fastagg.mix([y, y], [100.0, 100.0], out=x)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_weights_of_a_result_are_its_own(cohort):
    weights = torch.rand(4, dtype=torch.float64)
    result = fastagg.mix(cohort[1], weights)
    weights.zero_()
    assert (result.weights > 0).all()


def test_backend_with_gradients(cohort):
    with pytest.raises(fastagg.InputError, match="backend: cannot be chosen per call"):
        fastagg.mix(cohort[1], torch.ones(4, requires_grad=True), backend="cpu")


def test_torchs_default_device_does_not_matter():
    g, clients = make(3, {"a.weight": (50,)})
    expected = fastagg.fedawa(g, clients)
    torch.set_default_device("meta")  # stands in for a GPU
    try:
        got = fastagg.fedawa(g, clients)
        assert_same_bits(fastagg.fedavg(g, clients, [1, 2, 3]), fastagg.mix(clients, [1 / 6, 2 / 6, 3 / 6]))
        assert got.gram.numel.device.type == got.gram.matrix.device.type == "cpu"
    finally:
        torch.set_default_device(None)
    assert_same_bits(got, expected)


def test_results_of_large_tensors_are_whole():
    """Their memory is asked for in large pages, from the first whole page in it to the last"""
    clients = [{"w": torch.full((3_000_001,), float(k)), "b": torch.full((7,), float(k))} for k in (1, 3)]
    mean = fastagg.mix(clients, [0.5, 0.5])
    assert all((x == 2).all() for x in mean.values())
