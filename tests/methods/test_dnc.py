"""DnC against singular vectors of flattened models."""

import pytest
import torch

import fastagg
from fastagg.methods.dnc import DnC, outlier_scores
from helpers import robust


def scores(w):
    apart = w - w.mean(0)
    _, _, vh = torch.linalg.svd(apart, full_matrices=False)
    return (apart @ vh[0]) ** 2


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("K", "f", "c", "out"), [(3, 1, 1.0, 1), (6, 0, 1.0, 0), (9, 3, 1.0, 3), (9, 3, 1.5, 4),
                                                  (9, 3, 0.5, 1), (9, 1, 8.0, 8)])  # fmt: skip
def test_equals_the_definition(K, f, c, out, seed, dtype):
    g, clients = robust.cohort(K, dtype, seed)
    s = scores(robust.rows(clients))
    result = fastagg.dnc(g, clients, f=f, c=c)
    distances = result.gram.squared_distances().numpy()
    torch.testing.assert_close(torch.from_numpy(outlier_scores(distances)), s, **robust.tolerance(dtype))
    chosen = s.argsort()[: K - out].tolist()
    weights = torch.tensor([(k in chosen) / (K - out) for k in range(K)], dtype=torch.float64)
    torch.testing.assert_close(result.weights, weights, rtol=1e-15, atol=0)
    robust.assert_mixed(result, g, clients, weights)


@pytest.mark.parametrize("magnitude", [1e2, 1e20, 1e36])
def test_a_client_far_away_is_left_out(magnitude):
    g, clients = robust.cohort(9, torch.float32)
    assert fastagg.dnc(g, robust.far_away(clients, 1, magnitude), f=1).weights.tolist() == [0] + [1 / 8] * 8
    together = robust.far_away(clients, 1, magnitude)[:1] * 3 + clients[3:]
    assert fastagg.dnc(g, together, f=3).weights.tolist() == [0] * 3 + [1 / 6] * 6


def test_degenerate_cohorts_and_order():
    robust.check_degenerate(fastagg.dnc, f=2)
    robust.check_order(fastagg.dnc, f=3)
    g, clients = robust.cohort(4)
    same = fastagg.dnc(g, [dict(clients[0]) for _ in range(4)], f=1)
    assert same.weights.tolist() == [1 / 3] * 3 + [0]  # the first


def test_bad_f_and_c():
    robust.check_f(fastagg.dnc, DnC)
    g, clients = robust.cohort(5)
    with pytest.raises(fastagg.InputError, match=r"dnc: c=2\.5 with f=2 leaves out 5 of 5 clients; expected at most 4"):
        fastagg.dnc(g, clients, f=2, c=2.5)
    assert DnC(f=2, c=3.0).min_clients == 7
    for c in (0, -1, float("nan"), "1", None):
        with pytest.raises(ValueError, match="dnc: c="):
            DnC(c=c)
