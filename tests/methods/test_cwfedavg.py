"""cwFedAvg against its equations, class models and all, on flattened tensors."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fastagg
from fastagg import cwfedavg
from fastagg.methods.cwfedavg import CwFedAvg, cwfedavg_class_models, wdr_penalty
from helpers.cohort import assert_same_bits, assert_unchanged, flat, make, snapshot

C = 4
SHAPES = {"conv.weight": (5, 3, 2), "conv.bias": (5,), "fc.weight": (C, 6), "fc.bias": (C,)}
quick = settings(deadline=None, max_examples=25, derandomize=True)


def counts(K, seed=0, classes=C):
    generator = np.random.default_rng(seed)
    return generator.integers(0, 50, (K, classes)) + np.eye(K, classes, dtype=int)


def naive(clients, sizes, p):
    """Class models (Eq. 5, 6) and from them the personal ones (Eq. 7), a sample count at a time"""
    w = [flat(sd) for sd in clients]
    total = sum(sizes)
    class_models = []
    for j in range(len(p[0])):
        below = sum(sizes[i] / total * p[i][j] for i in range(len(w)))
        q = [sizes[i] / total * p[i][j] / below if below else sizes[i] / total for i in range(len(w))]
        class_models.append(sum(q[i] * w[i] for i in range(len(w))))
    personal = [sum(p[i][j] * class_models[j] for j in range(len(p[0]))) for i in range(len(w))]
    return class_models, personal


def wdr(weight, rows):
    return wdr_penalty(weight.detach(), rows)


def shares(rows):
    return [[x / sum(row) for x in row] for row in np.asarray(rows, dtype=float).tolist()]


def close(a, b, tolerance):
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 1e-6)])
def test_the_equations(dtype, tolerance):
    g, clients = make(6, SHAPES, dtype, scale=0.5)
    before = snapshot(g, *clients)
    sizes, rows = [10, 20, 5, 40, 1, 7], counts(6)
    class_models, personal = naive(clients, sizes, shares(rows))
    results = cwfedavg(g, clients, sizes, class_dist=rows)
    assert len(results) == 6
    for result, expected in zip(results, personal, strict=True):
        close(flat(result), expected, tolerance)
    models = cwfedavg_class_models(g, clients, sizes, class_dist=rows)
    assert len(models) == C
    for result, expected in zip(models, class_models, strict=True):
        close(flat(result), expected, tolerance)
    close(results.mixing, results.class_dist @ models.mixing, 1e-12)
    close(results.mixing.sum(1), torch.ones(6, dtype=torch.float64), 1e-12)
    assert torch.equal(results[2].weights, results.mixing[2])
    for given_as in (shares(rows), torch.tensor(rows), torch.tensor(shares(rows), dtype=torch.float64)):
        close(cwfedavg(None, clients, sizes, class_dist=given_as).mixing, results.mixing, 1e-12)
    assert_unchanged([g, *clients], before)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 1e-6)])
def test_shares_estimated_from_the_head(dtype, tolerance):
    g, clients = make(5, SHAPES, dtype, scale=0.5)
    norms = [[float(sd["fc.weight"][j].double().pow(2).sum().sqrt()) for j in range(C)] for sd in clients]
    _, personal = naive(clients, [1] * 5, shares(norms))
    results = cwfedavg(g, clients)
    close(results.class_dist, torch.tensor(shares(norms), dtype=torch.float64), tolerance)
    for result, expected in zip(results, personal, strict=True):
        close(flat(result), expected, tolerance)
    conv = cwfedavg(g, clients, head="conv.weight")  # any tensor with a row per class
    assert conv.class_dist.shape == (5, 5)
    close(conv.class_dist[1, 2] * sum(sd.norm() for sd in clients[1]["conv.weight"].double()),
          clients[1]["conv.weight"][2].double().norm(), tolerance)  # fmt: skip


def test_one_class_per_client_is_equation_9():
    g, clients = make(6, SHAPES, torch.float64)
    sizes, label = [3, 1, 4, 1, 5, 9], [0, 2, 2, 0, 1, 2]
    results = cwfedavg(g, clients, sizes, class_dist=np.eye(C)[label])
    models = cwfedavg_class_models(g, clients, sizes, class_dist=np.eye(C)[label])
    for j in range(3):
        members = [i for i in range(6) if label[i] == j]
        expected = sum(sizes[i] * flat(clients[i]) for i in members) / sum(sizes[i] for i in members)
        close(flat(models[j]), expected, 1e-12)
        for i in members:
            close(flat(results[i]), expected, 1e-12)


def test_a_class_nobody_holds_has_fedavg_as_its_model():
    g, clients = make(4, SHAPES, torch.float64)
    sizes, rows = [1, 2, 3, 4], counts(4)
    rows[:, 1] = 0
    mean = flat(fastagg.fedavg(g, clients, sizes))
    close(flat(cwfedavg_class_models(g, clients, sizes, class_dist=rows)[1]), mean, 1e-12)
    without = cwfedavg(g, clients, sizes, class_dist=np.delete(rows, 1, axis=1))
    close(cwfedavg(g, clients, sizes, class_dist=rows).mixing, without.mixing, 1e-12)
    rows = np.array([[5, 0], [1, 0], [2, 2], [0, 3]])  # class 1 is held, but only by clients of size 0
    models = cwfedavg_class_models(g, clients, [1, 1, 0, 0], class_dist=rows)
    close(flat(models[1]), flat(fastagg.fedavg(g, clients, [1, 1, 0, 0])), 1e-12)


def test_a_client_without_a_class_gets_fedavg():
    g, clients = make(4, SHAPES, torch.float64)
    rows = counts(4)
    rows[2] = 0
    results = cwfedavg(g, clients, [1, 2, 3, 4], class_dist=rows)
    close(results.mixing[2], torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64), 1e-12)
    close(results.mixing.sum(1), torch.ones(4, dtype=torch.float64), 1e-12)
    nobody = cwfedavg(g, clients, [1, 2, 3, 4], class_dist=np.zeros((4, 3)))
    close(nobody.mixing, torch.tensor([[0.1, 0.2, 0.3, 0.4]] * 4, dtype=torch.float64), 1e-12)


@quick
@given(K=st.integers(1, 7), classes=st.integers(1, 5), seed=st.integers(0, 999))
def test_iid_shares_are_fedavg_for_everyone(K, classes, seed):
    generator = np.random.default_rng(seed)
    g, clients = make(K, {"w": (30,)}, torch.float64, seed=seed)
    sizes = generator.integers(1, 100, K)
    one = generator.random(classes) + 0.01
    results = cwfedavg(g, clients, sizes, class_dist=one * (generator.random((K, 1)) + 0.01))
    mean = fastagg.fedavg(g, clients, sizes)
    for result in results:
        close(result["w"], mean["w"], 1e-12)


@quick
@given(K=st.integers(1, 7), seed=st.integers(0, 999), scale=st.sampled_from([1e-20, 1.0, 1e6, 2e306]))
def test_convex_and_permuted_with_the_clients(K, seed, scale):
    generator = np.random.default_rng(seed)
    g, clients = make(K, SHAPES, torch.float64, seed=seed)
    rows, sizes = counts(K, seed) * scale, generator.random(K) + 0.01
    A = cwfedavg(g, clients, sizes, class_dist=rows).mixing
    assert (A >= 0).all()
    close(A.sum(1), torch.ones(K, dtype=torch.float64), 1e-12)
    order = generator.permutation(K)
    B = cwfedavg(g, [clients[k] for k in order], sizes[order], class_dist=rows[order]).mixing
    close(B, A[order][:, order], 1e-12)
    same = cwfedavg(g, [clients[0]] * K, sizes, class_dist=rows)
    close(flat(same[K - 1]), flat(clients[0]), 1e-12)


@pytest.mark.parametrize(
    ("scope", "personal"),
    [
        ("output", {"fc.weight", "fc.bias"}),
        ("bias$", {"conv.bias", "fc.bias"}),
        ("^conv", {"conv.weight", "conv.bias"}),
    ],
)
def test_scope(scope, personal):
    g, clients = make(4, SHAPES, torch.float64)
    sizes, rows = [1, 2, 3, 4], counts(4)
    everything = cwfedavg(g, clients, sizes, class_dist=rows)
    mean = fastagg.fedavg(g, clients, sizes)
    results = cwfedavg(g, clients, sizes, class_dist=rows, scope=scope)
    assert torch.equal(results.mixing, everything.mixing)
    for result, whole in zip(results, everything, strict=True):
        for key in SHAPES:
            close(result[key], whole[key] if key in personal else mean[key], 1e-12)
    assert not torch.allclose(everything[0]["fc.bias"], mean["fc.bias"])


def test_buffers_are_convex_and_integers_the_maximum():
    shapes = SHAPES | {"bn.running_var": (3,)}
    g, clients = make(3, shapes)
    for k, sd in enumerate(clients):
        sd["bn.running_var"] = torch.full((3,), float(k + 1))
        sd["bn.num_batches_tracked"] = torch.tensor(7 + k)
    g["bn.num_batches_tracked"] = torch.tensor(0)
    for scope in ("all", "output"):
        for result in cwfedavg(g, clients, class_dist=counts(3), scope=scope):
            assert (result["bn.running_var"] >= 1).all()
            assert (result["bn.running_var"] <= 3).all()
            assert result["bn.num_batches_tracked"] == 9
    close(result["bn.running_var"], torch.full((3,), 2.0), 1e-6)  # outside the scope: the mean


def test_out_is_a_list():
    g, clients = make(3, SHAPES)
    rows = counts(3)
    first = cwfedavg(g, clients, class_dist=rows)
    out = [{key: torch.full_like(value, float("nan")) for key, value in sd.items()} for sd in first]
    again = cwfedavg(g, clients, class_dist=rows, out=out)
    for a, b, o in zip(first, again, out, strict=True):
        assert_same_bits(a, b)
        assert all(b[key] is o[key] for key in o)
    with pytest.raises(fastagg.InputError, match="3 state dicts given, 4 needed"):
        cwfedavg_class_models(g, clients, class_dist=rows, out=out)


def test_the_class_and_its_round_inputs():
    g, clients = make(3, SHAPES)
    server = CwFedAvg(scope="output")
    ids = server.aggregate(g, clients, client_ids=["x", "y", "z"], class_dist=counts(3))
    assert_same_bits(ids[1], cwfedavg(g, clients, class_dist=counts(3), scope="output")[1])
    server.load_state_dict(server.state_dict())
    with pytest.raises(TypeError, match="did you mean 'class_dist'"):
        server.aggregate(g, clients, class_dists=counts(3))


def test_by_labels_every_round_needs_class_dist():
    g, clients = make(3, SHAPES)
    given = {"class_dist": [[1, 0, 2, 1], [0, 3, 1, 0], [2, 2, 2, 2]]}
    for a, b in zip(cwfedavg(g, clients, by="labels", **given), cwfedavg(g, clients, **given), strict=True):
        assert_same_bits(a, b)
    with pytest.raises(fastagg.InputError, match="cwfedavg needs class_dist: each client's class distribution"):
        cwfedavg(g, clients, by="labels")


def test_degenerate_heads():
    g, clients = make(3, SHAPES)
    for sd in clients[:2]:
        sd["fc.weight"].zero_()
    for group in (clients, clients[:2], clients[2:]):
        results = cwfedavg(g, group)
        assert torch.isfinite(results.mixing).all()
        close(results.mixing.sum(1), torch.ones(len(group), dtype=torch.float64), 1e-12)
    for sd in clients:
        sd["fc.weight"].fill_(1e30)
    assert torch.isfinite(cwfedavg(g, clients).mixing).all()


def test_bad_input():
    g, clients = make(3, SHAPES)
    for option in ({"head": 3}, {"head": ""}, {"scope": None}, {"scope": "("}):
        with pytest.raises(ValueError, match=f"cwfedavg: {next(iter(option))}="):
            CwFedAvg(**option)
    with pytest.raises(fastagg.InputError, match=r"head='out.weight' is not a key.* last matrix is 'fc.weight'"):
        cwfedavg(g, clients, head="out.weight")
    with pytest.raises(fastagg.InputError, match=r"head='fc.bias' is not a float matrix"):
        cwfedavg(g, clients, head="fc.bias", scope="output", class_dist=counts(3))
    with pytest.raises(fastagg.InputError, match=r"scope='layer9' is found in no key"):
        cwfedavg(g, clients, scope="layer9")
    for rows in (counts(2), counts(3)[0], np.zeros((3, 0))):
        with pytest.raises(
            fastagg.InputError,
            match=r"class_dist have shape .*, expected one for each of the 3|its entry in class_dist is",
        ):
            cwfedavg(g, clients, class_dist=rows)
    for bad in (-1.0, float("nan")):
        rows = counts(3).astype(float)
        rows[1, 2] = bad
        with pytest.raises(fastagg.InputError, match="client 1: its entry in class_dist is"):
            cwfedavg(g, clients, class_dist=rows)
    clients[2]["fc.weight"][0, 0] = float("inf")
    with pytest.raises(fastagg.InputError, match=r"client 2: key 'fc.weight' has values that are not finite"):
        cwfedavg(g, clients)


def test_penalty_is_equation_8_and_differentiable():
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(C, 3, 2, generator=generator, dtype=torch.float64, requires_grad=True)
    rows = [3, 0, 5, 2]
    norms = [float(row.pow(2).sum().sqrt()) for row in weight.detach()]
    expected = sum((n / sum(norms) - r / 10) ** 2 for n, r in zip(norms, rows, strict=True)) ** 0.5
    assert float(wdr(weight, rows)) == pytest.approx(expected, rel=1e-12)
    assert float(wdr(weight, torch.tensor(rows) / 10)) == pytest.approx(expected, rel=1e-6)
    assert torch.autograd.gradcheck(lambda w: wdr_penalty(w, rows), (weight,))
    assert wdr_penalty(weight.float(), rows).dtype == torch.float32
    assert float(wdr(weight.bfloat16(), rows)) == pytest.approx(expected, rel=0.02)


def test_penalty_has_no_nan_gradient():
    for weight, rows in (
        (torch.zeros(3, 4), [1, 2, 3]),  # no norm at all
        (torch.eye(3, 4), [1, 1, 1]),  # the penalty is zero
        (torch.tensor([[1.0, 2.0], [0.0, 0.0], [3.0, 1.0]]), [1, 1, 1]),  # one row is zero
    ):
        weight.requires_grad_()
        penalty = wdr_penalty(weight, rows)
        penalty.backward()
        assert torch.isfinite(penalty)
        assert torch.isfinite(weight.grad).all()
    assert weight.grad[0].abs().min() > 0


def test_descending_the_penalty_gives_the_shares():
    weight = torch.randn(C, 6, generator=torch.Generator().manual_seed(1)).requires_grad_()
    optimizer = torch.optim.SGD([weight], lr=0.3)
    for _ in range(500):
        optimizer.zero_grad()
        wdr_penalty(weight, [6, 3, 1, 0]).backward()
        optimizer.step()
    assert wdr(weight, [6, 3, 1, 0]) < 0.05


def test_bad_penalty_arguments():
    for weight in (torch.zeros(3), torch.zeros(3, 2, dtype=torch.int64)):
        with pytest.raises(fastagg.InputError, match="head_weight is"):
            wdr_penalty(weight, [1, 1, 1])
    for rows in ([1, 1], [1, -1, 1], [0, 0, 0], [1, 1, float("nan")]):
        with pytest.raises(fastagg.InputError, match="class_dist: expected 3 finite numbers"):
            wdr_penalty(torch.ones(3, 2), rows)
