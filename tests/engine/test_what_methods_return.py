"""What weigh() returns: every form of it, what the result says of it, and an error for what cannot be used."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import fastagg
from fastagg.extend import ClientValue, ClusterAggregator, GlobalAggregator, PersonalisedAggregator, Weights
from helpers.cohort import assert_same_bits, make

SHAPES = {"a.weight": (5, 4), "b.weight": (3,)}
NAN = float("nan")


def method(weigh, base=GlobalAggregator, **facts):
    """A method whose weigh() is this function of the cohort"""
    members = {"name": "mine", "paper": "a test", "weigh": lambda self, cohort: weigh(cohort), **facts}
    return type("Mine", (base,), members)


def result_of(weigh, base=GlobalAggregator, client_ids=None, bad=None, **facts):
    g, clients = make(4, SHAPES)
    if bad is not None:
        clients[bad]["b.weight"][0] = NAN
    return method(weigh, base, **facts)(on_bad_client="drop").aggregate(g, clients, client_ids=client_ids)


@pytest.mark.parametrize(
    "given",
    [
        np.array([1, 0, 2, 0]),
        np.array([1, 0, 2, 0], dtype=np.float32),
        torch.tensor([1, 0, 2, 0]),
        torch.tensor([1.0, 0.0, 2.0, 0.0], requires_grad=True),
        [1, 0, 2, 0],
    ],
)
def test_weights_of_any_kind_are_float64(given):
    expected = result_of(lambda cohort: np.array([1.0, 0.0, 2.0, 0.0]))
    for decided in (
        given,
        Weights(given),
        Weights(given, others=given, center=0),
        Weights(given, center=torch.zeros(())),
    ):
        result = result_of(lambda cohort, decided=decided: decided)
        assert result.weights.dtype == torch.float64
        assert_same_bits(result, expected)
    chosen = Weights(given, others=[0, 0, 0, 1], others_for=torch.tensor([False, True]))
    assert_same_bits(result_of(lambda cohort: chosen), {**expected, "b.weight": make(4, SHAPES)[1][3]["b.weight"]})


@pytest.mark.parametrize(("given", "said"), [(None, "None"), (1, "int"), ("many", "str"), ({}, "dict")])
def test_what_is_no_weights(given, said):
    with pytest.raises(TypeError, match=rf"mine: weigh\(\) returned {said}, expected an array of weights, or Weights"):
        result_of(lambda cohort: given)


def test_weights_of_the_wrong_form():
    for weigh, base, words in (
        (
            lambda c: np.ones(c.K - 1),
            GlobalAggregator,
            r"weights have shape \(1, 3\), expected 4 in the last dimension",
        ),
        (lambda c: np.ones((3, c.K)), GlobalAggregator, "for 3 layers, the model has 2"),
        (lambda c: np.ones((2, c.K)), PersonalisedAggregator, "expected a row per client"),
        (lambda c: np.ones(c.K), PersonalisedAggregator, "expected a row per client"),
    ):
        with pytest.raises(ValueError, match=words):
            result_of(weigh, base)


@pytest.mark.parametrize("clusters", [None, [[0, 1, 2, 3]], "ab"])
def test_clusters_that_are_not_listed(clusters):
    about = {} if clusters is None else {"clusters": clusters}
    for values in (np.eye(2, 4), np.ones(4)):
        with pytest.raises(
            ValueError, match=r"mine: its weights have shape .* about\['clusters'\] is .*; expected a row"
        ):
            result_of(lambda cohort, values=values: Weights(values, about=about), ClusterAggregator)
    both = {"clusters": [[0, 1], [2, 3]]}
    assert result_of(lambda cohort: Weights(np.eye(2, 4), about=both), ClusterAggregator).clusters == both["clusters"]


def test_weights_that_are_not_finite_are_the_methods_fault():
    bad = np.array([0.5, NAN, 0.5, math.inf])
    words = r"^the method's weights are not finite: those of client 1 \(id 'b'\), client 3 \(id 'd'\)$"
    for weigh in (lambda cohort: bad, lambda cohort: bad + 0 * cohort.gram().squares.numpy()):
        with pytest.raises(fastagg.InputError, match=words) as caught:
            result_of(weigh, client_ids=list("abcd"))
        assert not isinstance(caught.value, fastagg.BadClientError)
    with pytest.raises(fastagg.InputError, match="weights are not finite: those of the global model"):
        result_of(lambda cohort: Weights(cohort.shares, center=NAN))


def test_products_beyond_float64_are_still_said_to_be_so():
    g, clients = make(4, SHAPES, torch.float64)
    for sd in clients:
        sd["a.weight"] += 1e100
    with (
        np.errstate(over="ignore"),
        pytest.raises(fastagg.InputError, match="products of the models' squares are beyond float64"),
    ):
        method(lambda cohort: cohort.gram().squares.numpy() ** 2)().aggregate(g, clients)


def test_a_client_that_is_not_there_is_blamed():
    def weigh(cohort):
        raise fastagg.BadClientError("client 9", {9: "it is not there"})

    with pytest.raises(fastagg.BadClientError, match="client 9"):
        result_of(weigh)


@pytest.mark.parametrize("kind", [np.array, torch.tensor])
def test_values_of_clients(kind):
    def values(numbers, missing=NAN, **more):
        said = ClientValue("score", missing=missing)
        weigh = lambda cohort: Weights(cohort.shares, about={"score": kind(numbers[: cohort.K])})  # noqa: E731
        return result_of(weigh, client_values=(said,), **more).score

    for more, expected in (
        ({}, [0, 1, 2, 3]),
        ({"client_ids": list("dcba")}, [3, 2, 1, 0]),
        ({"bad": 1}, [0, NAN, 1, 2]),
    ):
        found = values([0, 1, 2, 3], **more)
        assert found.dtype == torch.float64
        np.testing.assert_array_equal(found.numpy(), expected)
    for more, expected in (({}, [0, 1, 2, 3]), ({"bad": 1}, [0, -1, 1, 2])):
        found = values([0, 1, 2, 3], missing=-1, **more)
        assert found.dtype == torch.int64
        assert found.tolist() == expected
    assert values([True, False, True, True], bad=0).dtype == values([True] * 4).dtype == torch.float64


def test_a_gram_times_a_vector_of_any_dtype():
    gram = fastagg.gram(*make(4, SHAPES))
    v = torch.tensor([1.0, 2.0, 0.0, -1.0])
    for given in (v, v.double(), v.int()):
        found = gram @ given
        assert found.dtype == torch.float64
        assert torch.equal(found, gram @ v.double())
    assert (gram @ torch.ones(4, 2)).shape == (4, 2)
