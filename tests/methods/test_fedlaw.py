"""FedLAW against its equations on flattened models: forward pass, Adam and schedules written out."""

from __future__ import annotations

import copy
import math
import sys
import types

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import fastagg
from fastagg._engine import backends
from fastagg._engine.cohort import Cohort
from fastagg._engine.weights import Weights
from fastagg.methods.fedlaw import FedLAW, Trainer, client_weights, shrinking
from helpers.cohort import assert_same_bits, assert_unchanged, flat, snapshot
from helpers.proxy import SIZES, C, D, H, N, cohort_of, mlp, normed, proxy_of


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)  # the models are tiny


class Transposed(nn.Module):
    """Its weight's gradient comes back transposed, not contiguous"""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(C, D, generator=torch.Generator().manual_seed(0), dtype=torch.float64))

    def forward(self, x):
        return x @ self.weight.t().contiguous()


def naive_loss(w, batch):
    """Cross-entropy of the two-layer network whose flattened parameters are w"""
    x, target = batch
    a, b, c = D * H, D * H + H, D * H + H + H * C
    h = torch.tanh(x.double() @ w[:a].reshape(H, D).T + w[a:b])
    z = h @ w[b:c].reshape(C, H).T + w[c:]
    return sum(z[i].exp().sum().log() - z[i, t] for i, t in enumerate(target)) / len(target)


def naive(clients, n, proxy, epochs, base, learned, x=None, y=None, swa=False):
    """Eq. 8 and 10 by Adam (betas 0.5, 0.999), the model a sum of K scaled vectors: (x, y, losses)"""
    w = [flat(sd) for sd in clients]
    if x is None:
        x = n.log() if base == "exp" else n.sqrt()
        y = torch.tensor(0.0 if base == "exp" else 1.0, dtype=torch.float64)
    moments = {name: [torch.zeros_like(v), torch.zeros_like(v)] for name, v in (("x", x), ("y", y))}
    losses, seen, step, lr = [], [], 0, 0.01
    for epoch in range(epochs):
        if not swa:
            lr = 0.01 * 0.5 ** (epoch // 20)
        total = 0.0
        for batch in proxy:
            v = {"x": x.clone().requires_grad_(), "y": y.clone().requires_grad_()}
            powers = v["x"].exp() if base == "exp" else v["x"] ** 2
            gamma = v["y"].exp() if base == "exp" else v["y"] ** 2
            loss = naive_loss(sum(gamma * powers[k] / powers.sum() * w[k] for k in range(len(w))), batch)
            loss.backward()
            total += loss.item()
            step += 1
            for name in learned:
                m, s = moments[name]
                m.mul_(0.5).add_(0.5 * v[name].grad)
                s.mul_(0.999).add_(0.001 * v[name].grad ** 2)
                update = m / (1 - 0.5**step) / ((s / (1 - 0.999**step)).sqrt() + 1e-8)
                if name == "x":
                    x = x - lr * update
                else:
                    y = y - lr * update
        losses.append(total / len(proxy))
        if swa and epoch >= 6:  # the rate rises to 0.05 over ten epochs along a half cosine
            seen.append(x)
            along = (1 - math.cos(math.pi * min(len(seen) / 10, 1))) / 2
            lr = 0.05 * along + 0.01 * (1 - along)
    return (torch.stack(seen).mean(0) if swa else x), y, losses


def made_of(x, y, base):
    powers = x.exp() if base == "exp" else x**2
    return powers / powers.sum(), float(y.exp() if base == "exp" else y**2)


def check(result, clients, weights, gamma, losses, tolerance):
    torch.testing.assert_close(result.weights, weights, rtol=tolerance, atol=tolerance)
    assert result.gamma == pytest.approx(gamma, rel=tolerance)
    assert isinstance(result.gamma, float)
    assert result.losses == pytest.approx(losses, rel=tolerance)
    expected = sum(gamma * weights[k] * flat(sd) for k, sd in enumerate(clients))
    torch.testing.assert_close(flat(result), expected, rtol=tolerance, atol=tolerance)


def fedlaw(model, g, clients, proxy, sizes=None, **options):
    return fastagg.fedlaw(g, clients, sizes, model=model, proxy=proxy, **options)


LEARNED = {"both": "xy", "gws": "y", "law": "x"}


@pytest.mark.parametrize("base", ["exp", "quad"])
@pytest.mark.parametrize("mode", ["both", "gws", "law"])
def test_the_equations(mode, base):
    model = mlp()
    g, clients = cohort_of(model)
    proxy = proxy_of()
    result = fedlaw(model, g, clients, proxy, SIZES, mode=mode, base=base, epochs=25)
    x, y, losses = naive(clients, N, proxy, 25, base, LEARNED[mode])
    check(result, clients, *made_of(x, y, base), losses, 1e-9)
    assert len(result.losses) == 25
    assert (mode == "gws") == torch.allclose(result.weights, N)
    assert (mode == "law") == (result.gamma == 1)
    assert result.gram.K == 4


def test_float32_models():
    model = mlp(torch.float32)
    g, clients = cohort_of(model)
    proxy = proxy_of(torch.float32)
    result = fedlaw(model, g, clients, proxy, SIZES, epochs=10)
    x, y, losses = naive(clients, N, proxy, 10, "exp", "xy")
    check(result, clients, *made_of(x, y, "exp"), losses, 1e-6)


@pytest.mark.parametrize("base", ["exp", "quad"])
@pytest.mark.parametrize("mode", ["both", "law"])
def test_swa(mode, base):
    model = mlp()
    g, clients = cohort_of(model)
    proxy = proxy_of()
    result = fedlaw(model, g, clients, proxy, SIZES, mode=mode, base=base, swa=True, epochs=40)
    stage = 20 if mode == "both" else 40
    x, y, losses = naive(clients, N, proxy, stage, base, "x", swa=True)
    if mode == "both":
        x, y, more = naive(clients, N, proxy, stage, base, "y", x, y)
        losses = losses + more
    check(result, clients, *made_of(x, y, base), losses, 1e-9)
    short = fedlaw(model, g, clients, proxy, SIZES, mode=mode, base=base, swa=True, epochs=3)
    assert not torch.allclose(short.weights, N, atol=1e-3)  # few epochs still count
    fedlaw(model, g, clients, proxy, SIZES, mode=mode, base=base, swa=True, epochs=1)


def trainer_of(model, clients, g, base):
    cohort = Cohort.of(g, clients, N)
    [start] = cohort.mix(Weights(N.numpy()))
    return Trainer(FedLAW(model=model, base=base), cohort.table, start, [])


@pytest.mark.parametrize("base", ["exp", "quad"])
@pytest.mark.parametrize("make", [mlp, normed, Transposed])
def test_gradients_by_finite_differences(make, base):
    model = make()
    g, clients = cohort_of(model)
    trainer = trainer_of(model, clients, g, base)
    [batch] = proxy_of(batches=1)

    def loss(x, y):
        weights = shrinking(y, base) * client_weights(x, base)
        return trainer.loss_of(trainer.mix(trainer.clients, weights), batch)

    x = torch.tensor([0.3, -0.2, 0.5, 0.7], dtype=torch.float64, requires_grad=True)
    y = torch.tensor(0.9, dtype=torch.float64, requires_grad=True)
    dx, dy = torch.autograd.grad(loss(x, y), (x, y))
    assert dx.abs().min() > 1e-4
    assert dy.abs() > 1e-4
    step = 1e-5
    for k, e in enumerate(step * torch.eye(4, dtype=torch.float64)):
        slope = (loss(x + e, y) - loss(x - e, y)).item() / (2 * step)
        assert dx[k].item() == pytest.approx(slope, rel=1e-6)
    slope = (loss(x, y + step) - loss(x, y - step)).item() / (2 * step)
    assert dy.item() == pytest.approx(slope, rel=1e-6)


def test_shrinking_finds_the_best_factor():
    model = mlp()
    g, clients = cohort_of(model)
    proxy = proxy_of(batches=1)
    result = fedlaw(model, g, clients, proxy, SIZES, mode="gws", epochs=200, lr=0.05)
    mean = sum(N[k] * flat(sd) for k, sd in enumerate(clients))
    grid = np.linspace(0.01, 2, 400)
    best = grid[int(np.argmin([float(naive_loss(gamma * mean, proxy[0])) for gamma in grid]))]
    assert abs(best - 1) > 0.05
    assert result.gamma == pytest.approx(best, abs=0.01)


@pytest.mark.parametrize("base", ["exp", "quad"])
@pytest.mark.parametrize("swa", [False, True])
def test_a_corrupted_client_is_dropped(base, swa):
    torch.manual_seed(0)
    model = mlp()
    good = nn.Sequential(nn.Linear(D, H), nn.Tanh(), nn.Linear(H, C)).double()
    with torch.no_grad():
        for p in good.parameters():
            p.mul_(3)
    g, clients = cohort_of(good, K=5, scale=0.1)
    for key in ("2.weight", "2.bias"):
        clients[3][key].neg_()  # every logit has the wrong sign
    inputs = torch.randn(60, D, dtype=torch.float64)
    proxy = [(inputs, good(inputs).detach().argmax(1))]
    result = fedlaw(model, g, clients, proxy, base=base, swa=swa, lr=0.05)
    assert result.weights[3] < 0.05  # of a share of 0.2
    assert result.weights[[0, 1, 2, 4]].min() > result.weights[3]
    fedavg = fastagg.fedavg(g, clients)
    assert naive_loss(flat(result), proxy[0]) < 0.8 * naive_loss(flat(fedavg), proxy[0])
    assert result.losses[-1] < result.losses[0]


def test_normalisation_layers():
    model = normed().eval()
    g, clients = cohort_of(model)
    before = snapshot(g, *clients, model.state_dict())
    proxy = proxy_of(batches=1)
    model(proxy[0][0])
    result = fedlaw(model, g, clients, proxy, SIZES, epochs=5)
    assert_unchanged([g, *clients, model.state_dict()], before)
    assert not model.training
    assert not model[1].training
    assert all(p.grad is None for p in model.parameters())
    mean = copy.deepcopy(model).train()  # the first loss is that of FedAvg's model with the statistics of the batch
    mean.load_state_dict(fastagg.fedavg(g, clients, SIZES))
    start = nn.functional.cross_entropy(mean(proxy[0][0]), proxy[0][1])
    assert result.losses[0] == pytest.approx(start.item(), rel=1e-9)
    assert result.gamma != 1
    for key in ("1.running_mean", "1.running_var"):
        expected = sum(result.weights[k] * sd[key] for k, sd in enumerate(clients))
        torch.testing.assert_close(result[key], expected, rtol=1e-12, atol=1e-12)
    assert result["1.num_batches_tracked"] == 6
    expected = result.gamma * sum(result.weights[k] * sd["1.weight"] for k, sd in enumerate(clients))
    torch.testing.assert_close(result["1.weight"], expected, rtol=1e-12, atol=1e-12)
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            assert_same_bits(fedlaw(model, g, clients, proxy, SIZES, epochs=5), result)
    model.load_state_dict(result)


class Odd(nn.Module):
    """Tied weights, weights that are not used, a buffer of its own, one that changes and is not saved, an LSTM"""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(D, D, bias=False), nn.Linear(D, D, bias=False)
        self.second.weight = self.first.weight
        self.lstm, self.out, self.unused = nn.LSTM(D, H, batch_first=True), nn.Linear(H, C), nn.Linear(2, 2)
        self.register_buffer("shift", torch.ones(C))
        self.register_buffer("calls", torch.zeros(()), persistent=False)

    def forward(self, x):
        self.calls += 1
        hidden, _ = self.lstm(self.second(torch.relu(self.first(x)))[:, None])
        return self.out(hidden[:, 0]) + self.shift


def test_models_of_all_kinds():
    torch.manual_seed(0)
    model = Odd().double()
    g, clients = cohort_of(model)
    for sd in clients:
        sd["second.weight"] = sd["first.weight"]
    before = snapshot(*clients, model.state_dict())
    proxy = proxy_of(batches=1)
    result = fedlaw(model, g, clients, proxy, SIZES, epochs=3)
    assert_unchanged([*clients, model.state_dict()], before)
    assert model.calls == 0
    assert torch.equal(result["first.weight"], result["second.weight"])
    expected = sum(result.weights[k] * sd["shift"] for k, sd in enumerate(clients))
    torch.testing.assert_close(result["shift"], expected)
    mean = copy.deepcopy(model)
    mean.load_state_dict(fastagg.fedavg(g, clients, SIZES))
    start = nn.functional.cross_entropy(mean(proxy[0][0]), proxy[0][1])
    assert result.losses[0] == pytest.approx(start.item(), rel=1e-9)
    assert result.losses[-1] < result.losses[0]


def test_one_read_forward_and_one_backward(monkeypatch):
    calls = {"mix": [], "dots": [], "gram_mix": []}
    for name, seen in calls.items():
        real = getattr(backends.cpu, name)

        def counted(table, *rest, real=real, seen=seen, **more):
            seen.append(table.K)
            return real(table, *rest, **more)

        monkeypatch.setattr(backends.cpu, name, counted)
    model = mlp()
    g, clients = cohort_of(model)
    fedlaw(model, g, clients, proxy_of(batches=3), epochs=2)
    assert calls == {"mix": [4] * 7, "dots": [4] * 6, "gram_mix": [4]}
    for seen in calls.values():
        seen.clear()
    fedlaw(model, g, clients, proxy_of(batches=3), epochs=2, mode="gws")  # the steps read one model, not the clients
    assert calls == {"mix": [4] + [1] * 6 + [4], "dots": [1] * 6, "gram_mix": [4]}


def test_proxy_in_many_forms():
    model = mlp()
    g, clients = cohort_of(model)
    proxy = proxy_of(batches=3)
    expected = fedlaw(model, g, clients, proxy, epochs=4)
    data = torch.utils.data.TensorDataset(*(torch.cat(part) for part in zip(*proxy, strict=True)))
    for same in (iter(proxy), (batch for batch in proxy), tuple(proxy), torch.utils.data.DataLoader(data, 12)):
        result = fedlaw(model, g, clients, same, epochs=4)
        assert_same_bits(result, expected)
        assert torch.equal(result.weights, expected.weights)
        assert result.losses == expected.losses
    arrays = [{key: value.numpy() for key, value in sd.items()} for sd in (g, *clients)]
    result = fedlaw(model, arrays[0], arrays[1:], proxy, epochs=4)
    assert all(np.array_equal(result[key], expected[key]) for key in expected)


def test_the_loss_is_replaceable():
    model = mlp()
    g, clients = cohort_of(model)
    batch = (torch.randn(9, D, dtype=torch.float64), torch.randn(9, C, dtype=torch.float64))
    result = fedlaw(model, g, clients, [batch], epochs=3, loss=nn.functional.mse_loss)
    mean = mlp()
    mean.load_state_dict(fastagg.fedavg(g, clients))
    assert result.losses[0] == pytest.approx(((mean(batch[0]) - batch[1]) ** 2).mean().item(), rel=1e-9)


def test_through_the_registry_and_into_out():
    model = mlp()
    g, clients = cohort_of(model)
    before = snapshot(g, *clients)
    expected = fedlaw(model, g, clients, proxy_of(), SIZES, epochs=3, mode="law")
    server = fastagg.aggregator("fedlaw", model=model, epochs=3, mode="law")
    result = server.aggregate(g, clients, SIZES, client_ids=list("abcd"), proxy=proxy_of())
    assert_same_bits(result, expected)
    out = {key: torch.full_like(value, float("nan")) for key, value in result.items()}
    again = fedlaw(model, g, clients, proxy_of(), SIZES, epochs=3, mode="law", out=out)
    assert_same_bits(again, expected)
    assert all(again[key] is out[key] for key in out)
    server.load_state_dict(server.state_dict())
    assert_unchanged([g, *clients], before)
    with pytest.raises(fastagg.InputError, match="shares memory with an input"):  # said before anything is learned
        fedlaw(model, g, clients, proxy_of(), out=clients[0], loss=lambda *_: pytest.fail("learned"))


@settings(deadline=None, max_examples=15, derandomize=True)
@given(seed=st.integers(0, 999), K=st.integers(1, 5), base=st.sampled_from(["exp", "quad"]), swa=st.booleans())
def test_permuted_with_the_clients(seed, K, base, swa):
    model = mlp()
    g, clients = cohort_of(model, K, seed=seed)
    generator = np.random.default_rng(seed)
    sizes, order = generator.integers(1, 9, K), generator.permutation(K)
    one = fedlaw(model, g, clients, proxy_of(), sizes, base=base, swa=swa, epochs=4)
    two = fedlaw(model, g, [clients[k] for k in order], proxy_of(), sizes[order], base=base, swa=swa, epochs=4)
    torch.testing.assert_close(two.weights, one.weights[order], rtol=1e-7, atol=1e-9)
    assert two.gamma == pytest.approx(one.gamma, rel=1e-7)
    assert (one.weights >= 0).all()
    assert float(one.weights.sum()) == pytest.approx(1, abs=1e-12)
    same = fedlaw(model, g, [clients[0]] * K, proxy_of(), sizes, base=base, swa=swa, epochs=4)
    torch.testing.assert_close(flat(same), same.gamma * flat(clients[0]), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("base", ["exp", "quad"])
def test_cohorts_that_degenerate(base):
    model = mlp()
    g, clients = cohort_of(model)
    far = [{key: value * 1e6 for key, value in sd.items()} for sd in clients]
    near = [{key: g[key] + 1e-20 * value for key, value in sd.items()} for sd in clients]
    for group in (clients[:1], [clients[0]] * 3, [g, g], far, near):
        result = fedlaw(model, g, group, proxy_of(), base=base, epochs=3)
        assert torch.isfinite(flat(result)).all()
        assert float(result.weights.sum()) == pytest.approx(1)
    assert fedlaw(model, g, clients[:1], proxy_of(), mode="law", epochs=3).weights.tolist() == [1]
    for swa in (False, True):
        absent = fedlaw(model, g, clients, proxy_of(), [1, 0, 2, 3], base=base, swa=swa, epochs=20)
        assert absent.weights[1] == pytest.approx(0, abs=1e-12)
        assert torch.isfinite(absent.weights).all()
    clients[2]["0.bias"][1] = float("nan")
    with pytest.raises(fastagg.InputError, match=r"client 2: key '0.bias'"):
        fedlaw(model, g, clients, proxy_of())


def test_bad_proxy_model_and_loss():
    model = mlp()
    g, clients = cohort_of(model)
    with pytest.raises(ValueError, match="no model"):
        fastagg.aggregator("fedlaw").aggregate(g, clients, proxy=proxy_of())
    for bad, message in (
        (None, "fedlaw needs proxy: proxy data"),
        (3, "proxy is a int"),
        (torch.ones(2, 3), "proxy is a Tensor"),
        ([], "no batch in epoch 0"),
        (iter([]), "no batch in epoch 0"),
        ([torch.ones(2, D)], "a batch is a Tensor, expected a pair"),
        ([(torch.ones(2, D),)], "a batch is a tuple, expected a pair"),
        (
            [(torch.full((2, D), float("nan"), dtype=torch.float64), torch.tensor([0, 1]))],
            "loss on proxy batch 0 is nan",
        ),
    ):
        with pytest.raises(fastagg.InputError, match=message):
            fedlaw(model, g, clients, bad, epochs=2)
    for loss, message in (
        (lambda a, b: 3.0, "loss gave a float"),
        (lambda a, b: a, r"loss gave a shape \(12, 3\)"),
        (lambda a, b: a.detach().sum(), "does not depend on the model's parameters"),
    ):
        with pytest.raises(fastagg.InputError, match=message):
            fedlaw(model, g, clients, proxy_of(), loss=loss)
    with pytest.raises(fastagg.InputError, match=r"key '1.bias' is in model only"):
        fedlaw(normed(), g, clients, proxy_of())
    with pytest.raises(fastagg.InputError, match=r"key '2.bias' is in the clients only"):
        fedlaw(model[:2], g, clients, proxy_of())
    wide = nn.Sequential(nn.Linear(D, H + 1), nn.Tanh(), nn.Linear(H + 1, C))
    with pytest.raises(fastagg.InputError, match=r"key '0.weight' has shape \(8, 5\) in model, \(7, 5\)"):
        fedlaw(wide, g, clients, proxy_of())


@pytest.mark.parametrize(
    ("option", "value"),
    [("model", "resnet"), ("mode", "all"), ("base", "tanh"), ("swa", 1), ("epochs", 0), ("epochs", 2.5),
     ("epochs", True), ("lr", 0), ("lr", math.nan), ("swa_lr", -1), ("loss", "mse"), ("progress", "yes")],
)  # fmt: skip
def test_bad_options(option, value):
    with pytest.raises(ValueError, match=f"fedlaw: {option}"):
        FedLAW(**{option: value})
    with pytest.raises(ValueError, match="mode='gws' does not learn"):
        FedLAW(mode="gws", swa=True)


def test_progress_bar(monkeypatch):
    bars = []

    class Bar:
        def __init__(self, **options):
            self.options, self.updates, self.closed = options, 0, False
            bars.append(self)

        def set_postfix(self, **values):
            self.last = values

        def update(self):
            self.updates += 1

        def close(self):
            self.closed = True

    model = mlp()
    g, clients = cohort_of(model)
    monkeypatch.setitem(sys.modules, "tqdm", types.SimpleNamespace(tqdm=Bar))
    fedlaw(model, g, clients, proxy_of(), epochs=3)
    fedlaw(model, g, clients, proxy_of(), epochs=3, progress=False)
    assert not bars  # stderr is not a terminal
    result = fedlaw(model, g, clients, proxy_of(), epochs=5, swa=True, progress=True)
    assert (bars[0].options["total"], bars[0].updates, bars[0].closed) == (5, 5, True)
    assert bars[0].last == {"loss": result.losses[-1]}
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    with pytest.raises(fastagg.InputError):
        fedlaw(model, g, clients, [], epochs=3)
    assert bars[1].closed
    monkeypatch.setitem(sys.modules, "tqdm", None)  # not installed
    fedlaw(model, g, clients, proxy_of(), epochs=1, progress=True)


def test_early_stopped():
    """Learned weights in the first rounds, then the data shares (Figure 5)"""
    model = mlp()
    g, clients = cohort_of(model)
    options = {"model": model, "epochs": 3, "progress": False}
    server = fastagg.aggregator("fedlaw", stop_after=2, **options)
    learned = fedlaw(model, g, clients, proxy_of(), SIZES, epochs=3)
    assert not torch.allclose(learned.weights, N, rtol=1e-3, atol=0)
    for number in range(4):
        result = server.aggregate(g, clients, SIZES, proxy=proxy_of())
        assert_same_bits(result, learned if number < 2 else fastagg.fedavg(g, clients, SIZES))
        assert result.gram is not None
        if number >= 2:
            assert (result.gamma, result.losses) == (1.0, [])
    other = fastagg.aggregator("fedlaw", stop_after=2, **options)
    other.load_state_dict(server.state_dict())
    assert_same_bits(other.aggregate(g, clients, SIZES, proxy=proxy_of()), result)
