"""Server-FT, FedDF and FedBE against their equations on flattened models, forward pass and Adam written out."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch
from torch import nn

import fastagg
from fastagg.methods.fedbe import FedBE
from helpers.cohort import assert_same_bits, assert_unchanged, flat, snapshot
from helpers.proxy import SIZES, C, D, H, N, cohort_of, mlp, normed, proxy_of

NAMES = ("server_ft", "feddf", "fedbe")
each = pytest.mark.parametrize("name", NAMES)


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)  # the models are tiny


def logits(w, x):
    """Of the two-layer network whose flattened parameters are w"""
    a, b, c = D * H, D * H + H, D * H + H + H * C
    h = torch.tanh(x.double() @ w[:a].reshape(H, D).T + w[a:b])
    return h @ w[b:c].reshape(C, H).T + w[c:]


def probabilities(z):
    return z.exp() / z.exp().sum(1, keepdim=True)


def cross_entropy(w, x, target):
    z = logits(w, x)
    return sum(z[i].exp().sum().log() - z[i, t] for i, t in enumerate(target)) / len(target)


def divergence(w, x, p):
    """KL(p || the model's prediction), mean over samples"""
    q = probabilities(logits(w, x))
    return sum(p[i, c] * (p[i, c].log() - q[i, c].log()) for i in range(len(p)) for c in range(C)) / len(p)


def adam(w, batches, loss_of, epochs, lr, cosine=False):
    """The parameters after every epoch, and its mean loss"""
    m, v, step, after, losses = torch.zeros_like(w), torch.zeros_like(w), 0, [], []
    for epoch in range(epochs):
        rate = lr * (1 + math.cos(math.pi * epoch / epochs)) / 2 if cosine else lr
        total = 0.0
        for number, batch in enumerate(batches):
            w = w.clone().requires_grad_()
            loss = loss_of(w, number, batch)
            [gradient] = torch.autograd.grad(loss, w)
            step += 1
            m, v = 0.5 * m + 0.5 * gradient, 0.999 * v + 0.001 * gradient**2
            w = w.detach() - rate * m / (1 - 0.5**step) / ((v / (1 - 0.999**step)).sqrt() + 1e-8)
            total += loss.item()
        after.append(w)
        losses.append(total / len(batches))
    return after, losses


def check(result, expected, losses):
    torch.testing.assert_close(flat(result), expected, rtol=1e-9, atol=1e-11)
    assert result.losses == pytest.approx(losses, rel=1e-9)
    torch.testing.assert_close(result.weights, N, rtol=1e-15, atol=0)


def mean_of(clients):
    return sum(n * flat(sd) for n, sd in zip(N, clients, strict=True))


def test_server_ft_is_training_from_the_mean():
    model, batches = mlp(), proxy_of()
    g, clients = cohort_of(model)
    before = snapshot(g, *clients, model.state_dict())
    result = fastagg.server_ft(g, clients, SIZES, model=model, proxy=batches, epochs=4, lr=0.02)
    after, losses = adam(mean_of(clients), batches, lambda w, _, batch: cross_entropy(w, *batch), 4, 0.02)
    check(result, after[-1], losses)
    assert_unchanged([g, *clients, model.state_dict()], before)


def test_feddf_distils_the_mean_of_the_logits():
    model, batches = mlp(), proxy_of()
    g, clients = cohort_of(model)
    teachers = [probabilities(sum(logits(flat(sd), x) for sd in clients) / 4) for x, _ in batches]
    after, losses = adam(
        mean_of(clients), batches, lambda w, i, batch: divergence(w, batch[0], teachers[i]), 5, 0.02, cosine=True
    )
    result = fastagg.feddf(g, clients, SIZES, model=model, proxy=batches, epochs=5, lr=0.02)
    check(result, after[-1], losses)
    for unlabelled in ([x for x, _ in batches], [(x,) for x, _ in batches], iter([x for x, _ in batches])):
        again = fastagg.feddf(g, clients, SIZES, model=model, proxy=unlabelled, epochs=5, lr=0.02)
        assert_same_bits(again, result)


@pytest.mark.parametrize("swa", [True, False])
@pytest.mark.parametrize("distribution", ["gaussian", "dirichlet"])
def test_fedbe_distils_the_mean_of_probabilities(distribution, swa, monkeypatch):
    model, batches = mlp(), proxy_of()
    g, clients = cohort_of(model)
    found, real = [], FedBE.drawn
    monkeypatch.setattr(FedBE, "drawn", lambda *args: found.append(real(*args)) or found[-1])
    options = {"distribution": distribution, "swa": swa, "samples": 3, "epochs": 5, "lr": 0.02}
    result = fastagg.fedbe(g, clients, SIZES, model=model, proxy=batches, **options)
    [drawn] = found
    assert len(drawn) == 3
    drawn = [flat({key: sd[key] for key in g}) for sd in drawn]
    members = [flat(sd) for sd in clients] + [mean_of(clients)] + drawn
    teachers = [sum(probabilities(logits(w, x)) for w in members) / 8 for x, _ in batches]
    after, losses = adam(mean_of(clients), batches, lambda w, i, b: divergence(w, b[0], teachers[i]), 5, 0.02)
    check(result, sum(after[2:]) / 3 if swa else after[-1], losses)


def test_the_gaussian_has_the_clients_mean_and_variance(monkeypatch):
    model = mlp()
    g, clients = cohort_of(model)
    found, real = [], FedBE.drawn
    monkeypatch.setattr(FedBE, "drawn", lambda *args: found.append(real(*args)) or found[-1])
    fastagg.fedbe(g, clients, SIZES, model=model, proxy=proxy_of(batches=1, size=2), samples=4000, epochs=1)
    drawn = torch.stack([flat({key: sd[key] for key in g}) for sd in found[0]])
    mu = mean_of(clients)
    variance = sum(n * (flat(sd) - mu) ** 2 for n, sd in zip(N, clients, strict=True))
    z = (drawn - mu) / variance.sqrt()  # standard normal, independent in every coordinate
    assert z.mean(0).abs().max() < 5 / math.sqrt(4000)
    assert (z.square().mean(0) - 1).abs().max() < 5 * math.sqrt(2 / 4000)
    correlations = z.T @ z / 4000 - torch.diag(z.square().mean(0))
    assert correlations.abs().max() < 5.5 / math.sqrt(4000)


def test_the_dirichlet_has_random_weights_of_the_clients(monkeypatch):
    model = mlp()
    g, clients = cohort_of(model)
    found, real = [], FedBE.drawn
    monkeypatch.setattr(FedBE, "drawn", lambda *args: found.append(real(*args)) or found[-1])
    options = {"distribution": "dirichlet", "alpha": 0.7, "samples": 50, "epochs": 1, "seed": 5}
    fastagg.fedbe(g, clients, SIZES, model=model, proxy=proxy_of(batches=1, size=2), **options)
    expected = np.random.default_rng([5, 0]).dirichlet([0.7] * 4, 50) * N.numpy()
    expected /= expected.sum(1, keepdims=True)
    models = torch.stack([flat(sd) for sd in clients])
    drawn = torch.stack([flat({key: sd[key] for key in g}) for sd in found[0]])
    torch.testing.assert_close(drawn, torch.from_numpy(expected) @ models, rtol=1e-12, atol=1e-13)


def test_fedbe_draws_anew_in_every_round():
    model = mlp()
    g, clients = cohort_of(model)
    options = {"model": model, "epochs": 2, "lr": 0.01}
    server, other = (fastagg.aggregator("fedbe", **options) for _ in range(2))
    first, second = (server.aggregate(g, clients, proxy=proxy_of()) for _ in range(2))
    assert not torch.equal(flat(first), flat(second))
    assert_same_bits(first, fastagg.fedbe(g, clients, proxy=proxy_of(), **options))
    other.load_state_dict({"method": "fedbe", "rounds": 1})
    assert_same_bits(second, other.aggregate(g, clients, proxy=proxy_of()))
    assert server.state_dict() == other.state_dict() == {"method": "fedbe", "rounds": 2}
    seeded = fastagg.fedbe(g, clients, proxy=proxy_of(), seed=1, **options)
    assert not torch.equal(flat(first), flat(seeded))
    for bad in (-1, 1.0, True, None):
        with pytest.raises(fastagg.InputError, match="fedbe state: rounds="):
            other.load_state_dict({"method": "fedbe", "rounds": bad})


def test_a_model_with_batch_norm_is_trained_as_torch_does():
    """Running statistics start at the clients' mean, and follow; integers are the clients' maximum"""
    model, batches = normed(), proxy_of()
    g, clients = cohort_of(model)
    result = fastagg.server_ft(g, clients, SIZES, model=model, proxy=batches, epochs=3, lr=0.02)
    plain = copy.deepcopy(model).train()
    mean = fastagg.fedavg(g, clients, SIZES)
    plain.load_state_dict(mean)
    optimizer = torch.optim.Adam(plain.parameters(), lr=0.02, betas=(0.5, 0.999))
    for batch in batches * 3:
        optimizer.zero_grad()
        nn.functional.cross_entropy(plain(batch[0]), batch[1]).backward()
        optimizer.step()
    for key, value in plain.state_dict().items():
        if value.is_floating_point():
            torch.testing.assert_close(result[key], value, rtol=1e-9, atol=1e-11)
            assert not torch.equal(result[key], mean[key])
    assert result["1.num_batches_tracked"] == 6


def test_teachers_use_their_own_statistics():
    model, batches = normed(), proxy_of()
    g, clients = cohort_of(model)
    changed = copy.deepcopy(clients)
    changed[0]["1.running_mean"] += 5
    changed[3]["1.running_mean"] -= 5 * SIZES[0] / SIZES[3]  # the mean, where the student starts, is as it was
    a, b = (fastagg.feddf(g, some, SIZES, model=model, proxy=batches, epochs=1) for some in (clients, changed))
    assert abs(a.losses[0] - b.losses[0]) > 1e-3


@each
def test_batches_that_are_not_a_list_are_read_in_every_epoch(name):
    model, batches = mlp(), proxy_of()
    g, clients = cohort_of(model)

    class Loader:
        read = 0

        def __iter__(self):
            self.read += 1
            return iter([(x.clone(), y) for x, y in batches])

    loader = Loader()
    result = getattr(fastagg, name)(g, clients, SIZES, model=model, proxy=loader, epochs=3)
    assert loader.read == 3
    assert_same_bits(result, getattr(fastagg, name)(g, clients, SIZES, model=model, proxy=batches, epochs=3))


@each
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_smaller_dtypes(name, dtype):
    """The parameters are float32 while they are trained: steps are not lost that bfloat16 has no digits for"""
    model = mlp(dtype)
    g, clients = cohort_of(model)
    options = {"proxy": proxy_of(dtype), "model": model, "epochs": 30, "lr": 1e-4}
    result = getattr(fastagg, name)(g, clients, SIZES, **options)
    mean = fastagg.fedavg(g, clients, SIZES)
    assert all(value.dtype == dtype for value in result.values())
    moved = (flat(result) - flat(mean)).abs()
    assert 1e-3 < moved.max() < 1e-2
    assert result.losses[-1] < result.losses[0]


@each
def test_tied_parameters_stay_tied(name):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(D, H, bias=False, dtype=torch.float64)
            self.b = nn.Linear(H, C, bias=False, dtype=torch.float64)
            self.c = self.a

        def forward(self, x):
            return self.b(torch.tanh(self.a(x) + self.c(x)))

    torch.manual_seed(0)
    net = Net()
    g, clients = cohort_of(net)
    for sd in clients:
        sd["c.weight"] = sd["a.weight"].clone()
    result = getattr(fastagg, name)(g, clients, SIZES, model=net, proxy=proxy_of(), epochs=2, lr=0.1)
    assert torch.equal(result["a.weight"], result["c.weight"])
    assert not torch.allclose(result["a.weight"], fastagg.fedavg(g, clients, SIZES)["a.weight"])


@each
def test_bad_proxy_and_model(name):
    model = mlp()
    g, clients = cohort_of(model)
    method = getattr(fastagg, name)
    with pytest.raises(ValueError, match=f"{name}: no model"):
        method(g, clients, proxy=proxy_of())
    with pytest.raises(ValueError, match=f"{name}: model is a str"):
        fastagg.aggregator(name, model="resnet")
    for bad, message in (
        (None, f"{name} needs proxy: proxy data"),
        (torch.ones(2, 3), "proxy is a Tensor"),
        ([], "no batch in epoch 0"),
        ([3], "a batch is a int, expected"),
        (
            [(torch.full((2, D), math.nan, dtype=torch.float64), torch.tensor([0, 1]))],
            f"{name}: the loss on proxy batch 0",
        ),
    ):
        with pytest.raises(fastagg.InputError, match=message):
            method(g, clients, model=model, proxy=bad)
    with pytest.raises(fastagg.InputError, match=rf"{name}: key '1.bias' is in model only"):
        method(g, clients, model=normed(), proxy=proxy_of())
    clients[2]["0.bias"][1] = math.nan
    with pytest.raises(fastagg.NonFiniteError, match=r"client 2: key '0.bias'"):
        method(g, clients, model=model, proxy=proxy_of())


def test_a_client_far_away_is_left_out():
    model = mlp()
    g, clients = cohort_of(model)
    clients[1] = {key: value * 1e200 for key, value in clients[1].items()}
    result = fastagg.fedbe(g, clients, SIZES, model=model, proxy=proxy_of(), epochs=2, on_bad_client="drop")
    assert list(result.dropped) == [1]
    rest = [0, 2, 3]
    expected = fastagg.fedbe(
        g, [clients[k] for k in rest], [SIZES[k] for k in rest], model=model, proxy=proxy_of(), epochs=2
    )
    assert_same_bits(result, expected)


def test_server_ft_takes_any_loss():
    model, batches = mlp(), proxy_of()
    g, clients = cohort_of(model)
    squares = [(x, nn.functional.one_hot(y, C).double()) for x, y in batches]
    a = fastagg.server_ft(g, clients, SIZES, model=model, proxy=squares, loss=nn.functional.mse_loss)
    expected = adam(mean_of(clients), squares, lambda w, _, b: ((logits(w, b[0]) - b[1]) ** 2).mean(), 2, 1e-3)
    check(a, expected[0][-1], expected[1])
    with pytest.raises(ValueError, match="server_ft: loss='mse'; expected a function"):
        fastagg.aggregator("server_ft", loss="mse")
