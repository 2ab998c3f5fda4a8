"""Bulyan against its algorithm on flattened models, with Krum run anew on what is left."""

import statistics

import pytest
import torch

import fastagg
from helpers.cohort import assert_same_bits, make_with_batch_norm, median_of

SHAPES = {"fc.weight": (9, 5), "fc.bias": (9,), "bn.weight": (9,), "bn.running_mean": (9,), "bn.running_var": (9,)}
PARAMS = ("fc.weight", "fc.bias", "bn.weight")


def cohort(K, dtype=torch.float64, seed=0):
    return make_with_batch_norm(K, SHAPES, dtype, seed=seed, scale=0.1)


def flat(sd):
    return torch.cat([sd[key].double().reshape(-1) for key in PARAMS])


def krum(models, f):
    """The one whose nearest others are closest; of all but itself and f + 1, at least one"""
    scores = []
    for i, a in enumerate(models):
        others = sorted(float((a - b).square().sum()) for j, b in enumerate(models) if j != i)
        scores.append(sum(others[: max(len(models) - f - 2, 1)]))
    return scores.index(min(scores))


def chosen_by_krum(clients, f):
    left = {k: flat(sd) for k, sd in enumerate(clients)}
    chosen = []
    while len(chosen) < len(clients) - 2 * f:
        names = list(left)
        taken = names[krum([left[k] for k in names], f)]
        chosen.append(taken)
        del left[taken]
    return chosen


def around_median(values, count):
    center = statistics.median(values)
    return statistics.fmean(sorted(values, key=lambda x: (abs(x - center), x))[:count])


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("K", "f"), [(3, 0), (7, 1), (8, 1), (11, 2), (13, 2)])
def test_the_algorithm(K, f, seed):
    g, clients = cohort(K, seed=seed)
    result = fastagg.bulyan(g, clients, f=f)
    chosen = chosen_by_krum(clients, f)
    expected = [1 / len(chosen) if k in chosen else 0.0 for k in range(K)]
    assert result.weights.tolist() == expected
    for key, value in result.items():
        if key in PARAMS:
            columns = torch.stack([clients[k][key].reshape(-1) for k in chosen]).T.tolist()
            naive = torch.tensor([around_median(column, K - 4 * f) for column in columns], dtype=torch.float64)
            torch.testing.assert_close(value.reshape(-1), naive, rtol=1e-13, atol=1e-15)
        else:
            assert torch.equal(value, median_of([sd[key] for sd in clients]))


def test_attackers_do_not_move_the_result():
    """Two who agree may be chosen in the end, when few are left; the mean around the median leaves them out"""
    g, clients = cohort(11, torch.float32)
    for k in (0, 5):
        clients[k] = {key: x + 1e6 if x.is_floating_point() else x for key, x in clients[k].items()}
    result = fastagg.bulyan(g, clients, f=2)
    for key in PARAMS:
        honest = torch.stack([sd[key] for k, sd in enumerate(clients) if k not in (0, 5)])
        assert (result[key] >= honest.amin(0)).all()
        assert (result[key] <= honest.amax(0)).all()


def test_identical_clients_and_their_order():
    g, clients = cohort(9, torch.float32)
    same = fastagg.bulyan(g, [clients[0]] * 9)
    for key in PARAMS:
        assert torch.equal(same[key], clients[0][key])
    ids = list("ihgfedcba")
    forward, backward = (
        fastagg.bulyan(g, clients, client_ids=ids),
        fastagg.bulyan(g, clients[::-1], client_ids=ids[::-1]),
    )
    assert_same_bits(forward, backward)
    assert forward.weights.tolist() == backward.weights.tolist()[::-1]


def test_too_few_clients():
    g, clients = cohort(10)
    with pytest.raises(
        fastagg.InputError, match=r"f=2 needs at least 4 f \+ 3 = 11 clients, got 10; the largest .* is 1"
    ):
        fastagg.bulyan(g, clients, f=2)
    with pytest.raises(fastagg.InputError, match="at least 3 are needed even with f=0"):
        fastagg.bulyan(g, clients[:2], f=0)
