"""Local training against loops written out by hand, against torch.optim, and batched against one by one."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

import fastagg
from fastagg.sim.models import make
from fastagg.sim.outcomes import outcomes
from fastagg.sim.together import FEW, penalty
from fastagg.sim.train import Job, Local, Trainer

CLASSES = 10


@pytest.fixture(scope="module")
def digits():
    data = pytest.importorskip("sklearn.datasets").load_digits()
    x = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
    return x, torch.tensor(data.target, dtype=torch.int64)


class Linear(nn.Module):
    """Three classes of four numbers"""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 3)

    def forward(self, x):
        return self.fc(x)


def tiny(seed=0, n=11):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 4, generator=generator, dtype=torch.float64)
    y = torch.randint(3, (n,), generator=generator)
    start = {
        "fc.weight": torch.randn(3, 4, generator=generator, dtype=torch.float64),
        "fc.bias": torch.randn(3, generator=generator, dtype=torch.float64),
    }
    return Linear().double(), x, y, start


def orders(job):
    generator = np.random.default_rng(job.seed)
    return [generator.permutation(job.indices) for _ in range(job.epochs)]


def by_hand(x, y, local, job, lr):
    """NumPy, a formula at a time: softmax regression, its gradient, the penalties' gradients, momentum"""
    x, y = x.numpy(), y.numpy()
    w0 = {key: value.numpy() for key, value in job.start.items()}
    w, v = {k: a.copy() for k, a in w0.items()}, {k: np.zeros_like(a) for k, a in w0.items()}
    h = {k: np.zeros_like(a) if job.memory is None else job.memory[k].numpy() for k, a in w0.items()}
    losses, steps = [], 0
    for order in orders(job):
        for i in range(0, len(order), local.batch_size):
            batch = order[i : i + local.batch_size]
            z = x[batch] @ w["fc.weight"].T + w["fc.bias"]
            p = np.exp(z) / np.exp(z).sum(1, keepdims=True)
            losses += [-math.log(p[j, y[b]]) for j, b in enumerate(batch)]
            e = (p - np.eye(3)[y[batch]]) / len(batch)
            g = {"fc.weight": e.T @ x[batch], "fc.bias": e.sum(0)}
            if local.wdr:
                share = np.asarray(job.class_dist) / np.sum(job.class_dist)
                norms = np.linalg.norm(w["fc.weight"], axis=1)
                gap = norms / norms.sum() - share
                by_norm = (gap - (gap @ norms) / norms.sum()) / np.linalg.norm(gap) / norms.sum()
                g["fc.weight"] = g["fc.weight"] + local.wdr * (by_norm / norms)[:, None] * w["fc.weight"]
            for k in w:
                d = g[k] + local.weight_decay * w[k]
                if local.algorithm in ("fedprox", "feddyn"):
                    d = d + local.mu * (w[k] - w0[k])
                if local.algorithm == "feddyn":
                    d = d - h[k]
                v[k] = local.momentum * v[k] + d
                w[k] = w[k] - lr * v[k]
            steps += 1
    return w, np.mean(losses), steps, {k: h[k] - local.mu * (w[k] - w0[k]) for k in w}


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("wdr", [0.0, 0.7])
@pytest.mark.parametrize("algorithm", ["sgd", "fedprox", "feddyn"])
def test_algorithms_by_hand(algorithm, wdr, batched):
    model, x, y, start = tiny()
    local = Local(batch_size=3, algorithm=algorithm, mu=0.3, wdr=wdr, weight_decay=0.01)
    memory = {k: torch.full_like(v, 0.05) for k, v in start.items()}
    jobs = [
        Job(k, start, np.arange(11)[k:], seed=k, epochs=2 + k % 2, class_dist=np.array([1, 2, 5.0]),
            memory=memory if algorithm == "feddyn" and k % 2 else None)
        for k in range(FEW + 1)
    ]  # fmt: skip
    trainer = Trainer(model, x, y, local, head="fc.weight", batched=batched)
    assert trainer.batched is batched
    for job, update in zip(jobs, trainer.train(jobs, lr=0.1), strict=True):
        w, loss, steps, correction = by_hand(x, y, local, job, 0.1)
        for key, value in w.items():
            np.testing.assert_allclose(update.state[key], value, rtol=1e-10, atol=1e-12)
            if algorithm == "feddyn":
                np.testing.assert_allclose(update.memory[key], correction[key], rtol=1e-10, atol=1e-12)
        assert update.loss == pytest.approx(loss, rel=1e-10)
        assert update.steps == steps
        assert (update.memory is not None) == (algorithm == "feddyn")


@pytest.mark.parametrize("name", ["mlp", "cnn", "resnet8"])
@pytest.mark.parametrize(("momentum", "decay"), [(0.9, 5e-4), (0.0, 0.0), (0.5, 0.1)])
def test_torch_optim(digits, name, momentum, decay):
    x, y = digits
    model = make(name, (1, 8, 8), CLASSES, 0)
    start = {k: v.clone() for k, v in model.state_dict().items()}
    local = Local(batch_size=16, momentum=momentum, weight_decay=decay)
    job = Job(0, start, np.arange(40), seed=5, epochs=2)
    [update] = Trainer(model, x, y, local, head="fc.weight", batched=False).train([job], lr=0.05)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.05, momentum=momentum, weight_decay=decay)
    for order in orders(job):
        for batch in torch.from_numpy(order).split(16):
            optimiser.zero_grad()
            nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
            optimiser.step()
    for key, value in model.state_dict().items():
        torch.testing.assert_close(update.state[key], value, rtol=1e-4, atol=1e-6)


def cohort(model, sizes, epochs, feddyn=False):
    """Jobs of unequal sizes and epochs, each from a start of its own"""
    generator = torch.Generator().manual_seed(1)
    jobs, used = [], 0
    for k, (n, e) in enumerate(zip(sizes, epochs, strict=True)):
        start = {a: v + 0.01 * torch.randn(v.shape, generator=generator) for a, v in model.state_dict().items()}
        memory = {a: 0.01 * torch.randn(v.shape, generator=generator) for a, v in start.items()}
        counts = np.random.default_rng(k).integers(0, 9, CLASSES) + np.eye(CLASSES)[k % CLASSES]
        jobs.append(Job(k, start, np.arange(used, used + n), k, e, counts, memory if feddyn and k % 3 else None))
        used += n
    return jobs


@pytest.mark.parametrize("name", ["mlp", "lenet"])
@pytest.mark.parametrize(
    "local",
    [
        Local(batch_size=20),
        Local(batch_size=20, algorithm="fedprox", mu=0.1),
        Local(batch_size=20, algorithm="feddyn", mu=0.1),
        Local(batch_size=20, wdr=2.0, momentum=0.0, weight_decay=0.0),
        Local(batch_size=7, algorithm="feddyn", mu=0.05, wdr=1.0),
    ],
    ids=["sgd", "fedprox", "feddyn", "wdr", "feddyn-wdr"],
)
def test_batched_is_one_by_one(digits, name, local):
    x, y = digits
    model = make(name, (1, 8, 8), CLASSES, 0)
    jobs = cohort(model, [61, 5, 40, 20, 1, 33, 90], [3, 2, 3, 1, 4, 3, 3], local.algorithm == "feddyn")
    one, many = (Trainer(model, x, y, local, head="fc.weight", batched=b).train(jobs, 0.05) for b in (False, True))
    for a, b in zip(one, many, strict=True):
        assert a.steps == b.steps
        assert list(a.state) == list(b.state) == list(model.state_dict())
        assert b.loss == pytest.approx(a.loss, rel=1e-4)
        for key in a.state:
            torch.testing.assert_close(b.state[key], a.state[key], rtol=1e-4, atol=1e-5)
            if a.memory is not None:
                torch.testing.assert_close(b.memory[key], a.memory[key], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["cnn", "vit"])
@pytest.mark.parametrize("K", [1, FEW - 1, FEW])
def test_batched_other_models_and_few_clients(digits, name, K):
    x, y = digits
    model = make(name, (1, 8, 8), CLASSES, 0)
    jobs = cohort(model, [20, 9, 30, 25][:K], [1, 2, 1, 1][:K])
    local = Local(batch_size=10)
    one, many = (Trainer(model, x, y, local, head="fc.weight", batched=b).train(jobs, 0.05) for b in (False, True))
    for a, b in zip(one, many, strict=True):
        for key in a.state:
            torch.testing.assert_close(b.state[key], a.state[key], rtol=1e-4, atol=1e-5)


def test_penalty_is_wdr_penalty():
    generator = torch.Generator().manual_seed(0)
    heads = torch.randn(4, 5, 7, generator=generator, dtype=torch.float64)
    heads[1, 2] = 0  # a row without a length
    heads[2] = 0
    counts = np.random.default_rng(0).integers(0, 9, (4, 5)) + 1.0
    shares = torch.from_numpy(counts / counts.sum(1, keepdims=True))
    values = torch.func.vmap(penalty)(heads, shares)
    slopes = torch.func.vmap(torch.func.grad(penalty))(heads, shares)
    for k in range(4):
        head = heads[k].clone().requires_grad_()
        expected = fastagg.wdr_penalty(head, counts[k])
        torch.testing.assert_close(values[k], expected.detach())
        torch.testing.assert_close(slopes[k], torch.autograd.grad(expected, head)[0])


@pytest.mark.parametrize("batched", [False, True])
def test_repeats_bit_for_bit_and_changes_nothing(digits, batched):
    x, y = digits[0].clone(), digits[1].clone()
    model = make("mlp", (1, 8, 8), CLASSES, 0)
    jobs = cohort(model, [61, 5, 40, 20, 33], [2, 2, 1, 1, 2], feddyn=True)
    kept = [{k: v.clone() for k, v in job.start.items()} for job in jobs]
    memories = [job.memory and {k: v.clone() for k, v in job.memory.items()} for job in jobs]
    own, global_rng = model.fc.weight.clone(), torch.random.get_rng_state()
    trainer = Trainer(model, x, y, Local(batch_size=8, algorithm="feddyn", wdr=1.0), head="fc.weight", batched=batched)
    first = trainer.train(jobs, 0.05)
    copies = [{k: v.clone() for k, v in update.state.items()} for update in first]
    second = trainer.train(jobs, 0.05)
    for a, copy, b in zip(first, copies, second, strict=True):
        assert a.loss == b.loss
        for key in a.state:
            assert torch.equal(a.state[key], b.state[key])
            assert torch.equal(a.state[key], copy[key])  # the second call left the first's result alone
            assert not a.state[key].requires_grad
    assert torch.equal(x, digits[0])
    assert torch.equal(y, digits[1])
    assert torch.equal(model.fc.weight, own)
    assert torch.equal(torch.random.get_rng_state(), global_rng)
    for job, start, memory in zip(jobs, kept, memories, strict=True):
        assert all(torch.equal(job.start[key], start[key]) for key in start)
        assert memory is None or all(torch.equal(job.memory[key], memory[key]) for key in memory)


def test_clients_do_not_depend_on_each_other(digits):
    x, y = digits
    model = make("mlp", (1, 8, 8), CLASSES, 0)
    trainer = Trainer(model, x, y, Local(batch_size=8), head="fc.weight", batched=False)
    jobs = cohort(model, [30, 20, 10], [1, 2, 1])
    together, alone = trainer.train(jobs, 0.05), [trainer.train([job], 0.05)[0] for job in reversed(jobs)]
    for a, b in zip(together, reversed(alone), strict=True):
        assert all(torch.equal(a.state[key], b.state[key]) for key in a.state)


def test_batch_norm_is_each_clients_own(digits):
    x, y = digits
    model = make("resnet8", (1, 8, 8), CLASSES, 0)
    start = {k: v.clone() for k, v in model.state_dict().items()}
    local = Local(batch_size=8)
    trainer = Trainer(model, x, y, local, head="fc.weight")
    assert not trainer.batched
    jobs = [Job(0, start, np.arange(17), 0, 2), Job(1, start, np.arange(40, 64), 0, 2)]
    a, b = trainer.train(jobs, 0.05)
    assert (a.steps, b.steps) == (4, 6)  # 17 = 8 + 8 + 1, and the one is skipped
    counter, mean = "body.1.num_batches_tracked", "body.1.running_mean"
    assert (a.state[counter], b.state[counter], start[counter]) == (4, 6, 0)
    assert not torch.equal(a.state[mean], start[mean])
    assert not torch.equal(a.state[mean], b.state[mean])
    again = trainer.train(jobs[1:], 0.05)[0]
    assert all(torch.equal(again.state[key], b.state[key]) for key in b.state)


@pytest.mark.parametrize("batched", [False, True])
def test_divergence_is_seen_and_stays_with_its_client(digits, batched):
    x, y = digits[0].clone(), digits[1]
    x[0] = math.inf
    model = make("mlp", (1, 8, 8), CLASSES, 0)
    trainer = Trainer(model, x, y, Local(batch_size=8), head="fc.weight", batched=batched)
    updates = trainer.train(cohort(model, [20] * 5, [1] * 5), 0.05)
    assert not math.isfinite(updates[0].loss)
    for update in updates[1:]:
        assert math.isfinite(update.loss)
        assert all(value.isfinite().all() for value in update.state.values())


def test_training_learns(digits):
    x, y = digits
    model = make("mlp", (1, 8, 8), CLASSES, 0)
    start = model.state_dict()
    trainer = Trainer(model, x, y, Local(), head="fc.weight")
    [update] = trainer.train([Job(0, start, np.arange(1200), 0, 5)], 0.05)
    before, after = (outcomes(model, state, x[1200:], y[1200:]).of() for state in (start, update.state))
    assert before[0] < 0.3
    assert after[0] > 0.85
    assert after[1] < before[1]


def test_outcomes(digits):
    x, y = digits
    model = make("resnet8", (1, 8, 8), CLASSES, 0)
    model.body[0].eval()
    state = {k: v.clone() for k, v in make("resnet8", (1, 8, 8), CLASSES, 1).state_dict().items()}
    own, given = [{k: v.clone() for k, v in sd.items()} for sd in (model.state_dict(), state)]
    seen = outcomes(model, state, x[:250], y[:250], batch_size=60)
    assert model.training
    assert not model.body[0].training
    for sd, kept in ((model.state_dict(), own), (state, given)):
        assert all(torch.equal(sd[key], kept[key]) for key in kept)
    other = make("resnet8", (1, 8, 8), CLASSES, 1).eval()
    with torch.no_grad():
        scores = other(x[:250])
    for rows in (np.arange(250), np.array([3, 100, 7, 240])):
        right = (scores.argmax(1) == y[:250])[rows].double().mean().item()
        loss = nn.functional.cross_entropy(scores[rows], y[rows]).item()
        assert seen.of(rows) == pytest.approx((right, loss), rel=1e-4)
    assert seen.of() == seen.of(np.arange(250))
    with pytest.raises(ValueError, match="at least one sample"):
        outcomes(model, state, x[:0], y[:0])
    with pytest.raises(ValueError, match="batch_size=0"):
        outcomes(model, state, x, y, 0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"epochs": 0}, "epochs=0; expected an integer >= 1"),
        ({"batch_size": 2.5}, "batch_size=2.5"),
        ({"lr": 0}, "lr=0; expected a number > 0"),
        ({"momentum": 1.5}, "momentum=1.5"),
        ({"weight_decay": -1}, "weight_decay=-1"),
        ({"algorithm": "adam"}, "algorithm='adam'; expected one of 'sgd', 'fedprox', 'feddyn', 'scaffold', 'moon'"),
        ({"mu": math.nan}, "mu=nan"),
        ({"algorithm": "feddyn", "mu": 0}, "mu=0; expected a number > 0"),
        ({"wdr": -0.1}, "wdr=-0.1"),
    ],
)
def test_local_errors(options, message):
    with pytest.raises(ValueError, match=message):
        Local(**options)


def test_trainer_errors(digits):
    x, y = digits
    resnet, mlp = (make(name, (1, 8, 8), CLASSES, 0) for name in ("resnet8", "mlp"))
    with pytest.raises(ValueError, match=r"batched=True needs a model without buffers.*'body\.1\.running_mean'"):
        Trainer(resnet, x, y, Local(), head="fc.weight", batched=True)
    with pytest.raises(ValueError, match="BatchNorm needs two"):
        Trainer(resnet, x, y, Local(batch_size=1), head="fc.weight")
    with pytest.raises(ValueError, match="head='out' is not a parameter"):
        Trainer(mlp, x, y, Local(), head="out")
    with pytest.raises(ValueError, match="expected floats"):
        Trainer(mlp, x, y[:-1], Local(), head="fc.weight")
    with pytest.raises(ValueError, match="expected floats"):
        Trainer(mlp, x, y.int(), Local(), head="fc.weight")


@pytest.mark.parametrize("batched", [False, True])
def test_job_errors(digits, batched):
    x, y = digits
    model = make("mlp", (1, 8, 8), CLASSES, 0)
    trainer = Trainer(model, x, y, Local(wdr=1.0, algorithm="feddyn"), head="fc.weight", batched=batched)
    good = Job(7, model.state_dict(), np.arange(9), 0, 1, np.ones(CLASSES))
    assert trainer.train([], 0.1) == []
    less = {k: v for k, v in good.start.items() if k != "fc.bias"}
    for change, message in [
        ({"epochs": 0}, "client 7: epochs=0"),
        ({"indices": np.arange(0)}, "client 7: indices .* at least one"),
        ({"indices": np.array([0.5])}, "client 7: indices"),
        ({"indices": np.array([len(x)])}, "client 7: indices must lie between 0 and 1796"),
        ({"indices": np.array([-1])}, "client 7: indices must lie"),
        ({"start": less}, "client 7: start does not fit the model, first at key 'fc.bias'"),
        ({"start": {**good.start, "more": torch.zeros(1)}}, "client 7: .* 'more'"),
        ({"start": {**good.start, "fc.bias": torch.zeros(3)}}, "client 7: .* 'fc.bias'"),
        ({"memory": less}, "client 7: memory does not fit"),
        ({"class_dist": None}, "client 7: wdr=1.0 needs class_dist"),
        ({"class_dist": np.ones(3)}, "client 7: class_dist: expected 10"),
    ]:
        with pytest.raises(ValueError, match=message):
            trainer.train([good, replace(good, **change)], 0.1)
    with pytest.raises(ValueError, match="lr=0"):
        trainer.train([good], 0)
    resnet = make("resnet8", (1, 8, 8), CLASSES, 0)
    trainer, job = Trainer(resnet, x, y, Local(), head="fc.weight"), replace(good, start=resnet.state_dict())
    with pytest.raises(ValueError, match="client 7 has one sample, and BatchNorm needs two"):
        trainer.train([replace(job, indices=np.arange(1))], 0.1)


def test_default_way(digits):
    x, y = digits
    assert Trainer(make("mlp", (1, 8, 8), CLASSES, 0), x, y, Local(), head="fc.weight").batched
    large = torch.zeros(2, 1, 28, 28)
    assert not Trainer(make("mlp", (1, 28, 28), CLASSES, 0), large, y[:2], Local(), head="fc.weight").batched


@pytest.mark.parametrize("name", ["mlp", "lenet", "resnet8"])
def test_any_number_of_threads_gives_the_same_bits(digits, name):
    x, y = digits
    model = make(name, (1, 8, 8), CLASSES, 0)
    trainer = Trainer(model, x, y, Local(batch_size=20), head="fc.weight", batched=False)
    jobs = [
        Job(k, model.state_dict(), np.arange(30 * k, 30 * k + 20 + 3 * k), k, 1 + k % 2) for k in range(7)
    ]  # those with most steps begin first
    results = []
    for threads in (1, 2, 3, 16):
        torch.set_num_threads(threads)
        results.append(trainer.train(jobs, 0.05))
        assert torch.get_num_threads() == threads
    for updates in results[1:]:
        for a, b in zip(results[0], updates, strict=True):
            assert (a.loss, a.steps) == (b.loss, b.steps)
            assert all(torch.equal(a.state[key], b.state[key]) for key in a.state)
            assert all(value.is_contiguous() for value in b.state.values())


def test_an_error_on_one_thread_is_raised(digits):
    x, y = digits

    def loss(outputs, targets):
        raise ZeroDivisionError

    model = make("mlp", (1, 8, 8), CLASSES, 0)
    trainer = Trainer(model, x, y, Local(loss=loss), head="fc.weight", batched=False)
    torch.set_num_threads(2)
    with pytest.raises(ZeroDivisionError):
        trainer.train([Job(k, model.state_dict(), np.arange(20), k, 1) for k in range(50)], 0.05)
    assert torch.get_num_threads() == 2
