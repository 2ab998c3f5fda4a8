"""FedFomo against its equation, in loops on flattened models."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import fastagg
from fastagg.methods.fedfomo import first_order
from helpers.cohort import assert_same_bits, assert_unchanged, flat, make, snapshot
from helpers.forming import never_formed

SHAPES = {"a.weight": (6, 5), "a.bias": (6,), "bn.running_var": (6,), "c.weight": (3, 6)}


def parameters(sd):
    return flat({key: value for key, value in sd.items() if "running" not in key})


def naive(starts, clients, losses, start_losses):
    """w_n of client i: (L_i(start) - L_i(n)) / ||n - start||, cut off at 0 and divided by their sum"""
    rows = []
    for i, start in enumerate(starts):
        row = []
        for n, sd in enumerate(clients):
            distance = float(torch.linalg.vector_norm(parameters(sd) - parameters(start)))
            row.append(max((start_losses[i] - losses[i][n]) / distance, 0.0))
        rows.append([u / sum(row) for u in row] if sum(row) else [float(n == i) for n in range(len(clients))])
    return torch.tensor(rows, dtype=torch.float64)


def a_round(K=5, dtype=torch.float64, seed=0):
    g, clients = make(K, SHAPES, dtype, scale=0.3, seed=seed)
    rng = np.random.default_rng(seed)
    return g, clients, rng.random((K, K)) + 0.2, rng.random(K) + 0.4


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
@pytest.mark.parametrize("seed", range(3))
def test_the_equation_from_one_model(dtype, tolerance, seed):
    g, clients, losses, start_losses = a_round(dtype=dtype, seed=seed)
    before = snapshot(g, *clients)
    result = fastagg.fedfomo(g, clients, losses=losses, start_losses=start_losses)
    assert_unchanged([g, *clients], before)
    expected = naive([g] * 5, clients, losses, start_losses)
    assert (expected == 0).any()
    assert ((expected > 0) & (expected < 1)).any()
    torch.testing.assert_close(result.mixing, expected, rtol=tolerance, atol=0)
    for i, model in enumerate(result):
        for key in SHAPES:
            mean = sum(w * sd[key].double() for w, sd in zip(expected[i], clients, strict=True))
            torch.testing.assert_close(model[key].double(), mean, rtol=tolerance, atol=tolerance)


def test_the_equation_from_models_of_their_own():
    g, clients, losses, start_losses = a_round()
    _, starts = make(5, SHAPES, torch.float64, scale=0.5, seed=9)
    distances = [[torch.linalg.vector_norm(parameters(w) - parameters(s)).item() for w in clients] for s in starts]
    result = fastagg.fedfomo(g, clients, losses=losses, start_losses=start_losses, distances=distances)
    expected = naive(starts, clients, losses, start_losses)
    torch.testing.assert_close(result.mixing, expected, rtol=1e-12, atol=0)
    assert result.gram is None
    assert not torch.allclose(expected, naive([g] * 5, clients, losses, start_losses), rtol=1e-3)


def test_a_gram_that_is_not_formed():
    """Lengths are all it needs of one"""
    g, clients, losses, start_losses = a_round()
    with never_formed():
        result = fastagg.fedfomo(g, clients, losses=losses, start_losses=start_losses)
    assert not result.gram.formed
    torch.testing.assert_close(result.mixing, naive([g] * 5, clients, losses, start_losses), rtol=1e-12, atol=0)


def test_who_gains_nothing_keeps_its_own_model():
    g, clients, losses, start_losses = a_round()
    start_losses[2] = 0.1
    result = fastagg.fedfomo(g, clients, losses=losses, start_losses=start_losses)
    assert result.mixing[2].tolist() == [0, 0, 1, 0, 0]
    assert_same_bits(result[2], clients[2])


def test_rows_and_columns_follow_the_clients():
    g, clients, losses, start_losses = a_round()
    ids, order = ["d", "b", "e", "a", "c"], [3, 0, 4, 2, 1]
    one = fastagg.fedfomo(g, clients, client_ids=ids, losses=losses, start_losses=start_losses)
    two = fastagg.fedfomo(
        g, [clients[k] for k in order], client_ids=[ids[k] for k in order], losses=losses[np.ix_(order, order)],
        start_losses=dict(zip(ids, start_losses, strict=True)),
    )  # fmt: skip
    assert torch.equal(two.mixing, one.mixing[order][:, order])
    clients[1]["a.bias"][0] = float("nan")
    dropped = fastagg.fedfomo(
        g, clients, client_ids=ids, losses=losses, start_losses=start_losses, on_bad_client="drop"
    )
    rest = [0, 2, 3, 4]
    expected = naive([g] * 4, [clients[k] for k in rest], losses[np.ix_(rest, rest)], start_losses[rest])
    torch.testing.assert_close(dropped.mixing[rest][:, rest], expected, rtol=1e-12, atol=0)
    assert dropped[1] is None


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_model_without_a_loss_is_taken_by_nobody(bad):
    """Others cannot evaluate a model that is not finite: that is no fault of theirs, and of no consequence to them"""
    g, clients, losses, start_losses = a_round()
    distances = np.ones((5, 5))
    for given in ({}, {"distances": distances}):
        losses[:, 3] = bad
        result = fastagg.fedfomo(g, clients, losses=losses, start_losses=start_losses, **given)
        assert result.mixing[:, 3].tolist() == [0] * 5
        broken = [dict(sd, **{"a.bias": sd["a.bias"] * bad}) if k == 3 else sd for k, sd in enumerate(clients)]
        distances[:, 3] = bad
        with pytest.raises(fastagg.NonFiniteError, match=r"client 3: key 'a\.bias'"):
            fastagg.fedfomo(g, broken, losses=losses, start_losses=start_losses, **given)
        dropped = fastagg.fedfomo(g, broken, losses=losses, start_losses=start_losses, **given, on_bad_client="drop")
        assert list(dropped.dropped) == [3]
        rest = [0, 1, 2, 4]
        some = {name: value[np.ix_(rest, rest)] for name, value in given.items()}
        alone = fastagg.fedfomo(
            g, [clients[k] for k in rest], losses=losses[np.ix_(rest, rest)], start_losses=start_losses[rest], **some
        )
        assert torch.equal(dropped.mixing[rest][:, rest], alone.mixing)


def test_extreme_numbers():
    huge = np.finfo(np.float64).max
    start, eye = np.array([1.0, huge, 1.0]), np.eye(3)
    losses = np.array([[huge, 0.5, -huge], [0.0, -huge, 1.0], [1.0, 2.0, huge]])
    distances = np.array([[1e300, 1e-300, 5e-324], [0.0, 1e300, 1e-300], [1.0, 0.0, 1.0]])
    weights = first_order(losses, start, distances)
    assert np.isfinite(weights).all()
    np.testing.assert_allclose(weights.sum(1), 1, rtol=1e-15)
    assert weights[0].tolist() == [0, 0, 1]
    assert weights[1, 0] == 0  # no distance at all
    assert weights[2].tolist() == eye[2].tolist()


def test_bad_input():
    g, clients, losses, start_losses = a_round()
    method = fastagg.aggregator("fedfomo")
    for given, words in (
        ({"start_losses": start_losses}, "fedfomo needs losses: the loss of every client's model"),
        ({"losses": losses}, "fedfomo needs start_losses: the loss of the model that each client started from"),
        ({"losses": losses[:, :3], "start_losses": start_losses}, r"losses have shape \(5, 3\), expected \(5, 5\)"),
        ({"losses": losses[:3], "start_losses": start_losses}, r"losses have shape \(3, 5\)"),
        ({"losses": losses, "start_losses": start_losses * np.nan}, "client 0: its entry in start_losses is nan"),
        ({"losses": losses, "start_losses": start_losses, "distances": -losses}, "its entry in distances is"),
    ):
        with pytest.raises(fastagg.InputError, match=words):
            method.aggregate(g, clients, **given)
