"""Client algorithms against naive transcriptions of their papers' equations, in float64."""

from __future__ import annotations

import copy
import math
import warnings
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fastagg
from fastagg.sim import data, local, ranks
from fastagg.sim.config import from_dict
from fastagg.sim.local import ALGORITHMS, Algorithm, FedProx, Moon, Scaffold
from fastagg.sim.outcomes import outcomes
from fastagg.sim.report import read_metrics
from fastagg.sim.run import simulate
from fastagg.sim.simulation import Simulation
from fastagg.sim.together import FEW
from fastagg.sim.train import Job, Local, Trainer

LR, DECAY = 0.1, 0.01


class Small(nn.Module):
    """Four numbers, three features, three classes"""

    def __init__(self):
        super().__init__()
        self.body, self.fc = nn.Linear(4, 3), nn.Linear(3, 3)

    def forward(self, x):
        return self.fc(torch.tanh(self.body(x)))


def problem(clients=FEW + 1, seed=0):
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(60, 4, generator=rng, dtype=torch.float64)
    y = torch.randint(3, (60,), generator=rng)
    model = Small().double()
    start = {k: torch.randn(v.shape, generator=rng, dtype=torch.float64) for k, v in model.state_dict().items()}
    jobs = [Job(k, start, np.arange(9 * k, 9 * k + 7 + k % 3), seed=k, epochs=2) for k in range(clients)]
    return model, x, y, start, jobs


def parts(sd):
    return {k: v.numpy().copy() for k, v in sd.items()}


def forward(w, x):
    z = np.tanh(x @ w["body.weight"].T + w["body.bias"])
    return z, z @ w["fc.weight"].T + w["fc.bias"]


def slopes(w, x, y, add=None):
    """Gradient of the mean cross-entropy, by hand; add is the gradient of something else by the features"""
    z, scores = forward(w, x)
    p = np.exp(scores) / np.exp(scores).sum(1, keepdims=True)
    e = (p - np.eye(3)[y]) / len(x)
    back = e @ w["fc.weight"] + (0 if add is None else add(z))
    back = back * (1 - z**2)
    return {"body.weight": back.T @ x, "body.bias": back.sum(0), "fc.weight": e.T @ z, "fc.bias": e.sum(0)}


def sgd(x, y, job, change, momentum=0.9, v=None, size=4, add=None):
    """Local training, a formula at a time; change(w, g) is what an algorithm makes of the gradient"""
    x, y, w = x.numpy(), y.numpy(), parts(job.start)
    v = v or {k: np.zeros_like(a) for k, a in w.items()}
    generator, steps = np.random.default_rng(job.seed), 0
    for _ in range(job.epochs):
        order = generator.permutation(job.indices)
        for i in range(0, len(order), size):
            batch = order[i : i + size]
            g = change(w, slopes(w, x[batch], y[batch], add and (lambda z, rows=x[batch]: add(z, rows))))
            v = {k: momentum * v[k] + g[k] + DECAY * w[k] for k in w}
            w = {k: w[k] - LR * v[k] for k in w}
            steps += 1
    return w, v, steps


def close(found, expected):
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        np.testing.assert_allclose(found[key], value, rtol=1e-9, atol=1e-11)


def trainer_of(model, x, y, algorithm, batched=False, **options):
    settings = Local(batch_size=4, weight_decay=DECAY, algorithm=algorithm, **options)
    return Trainer(model, x, y, settings, head="fc.weight", batched=batched)


def nothing(w, g):
    return g


@pytest.mark.parametrize("batched", [False, True])
def test_fedprox(batched):
    model, x, y, start, jobs = problem()
    w0 = parts(start)
    updates = trainer_of(model, x, y, FedProx(mu=0.3), batched).train(jobs, LR)
    for job, update in zip(jobs, updates, strict=True):
        w, _, _ = sgd(x, y, job, lambda w, g: {k: g[k] + 0.3 * (w[k] - w0[k]) for k in w})
        close(update.state, w)
        assert update.memory is update.sent is update.momentum is None


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("batched", [False, True])
def test_scaffold_over_rounds(batched, momentum):
    """Algorithm 1 of Karimireddy et al. with option II and a global step of 1; three of five clients in each round"""
    model, x, y, start, jobs = problem()
    N, algorithm = len(jobs), Scaffold()
    trainer = trainer_of(model, x, y, algorithm, batched, momentum=momentum)
    c, c_k = {k: np.zeros_like(v) for k, v in parts(start).items()}, {}
    shared, memory, server = algorithm.shared(start, list(start)), {}, start
    for chosen in ((0, 1, 2, 3), (1, 3, 4, 0), (0, 2, 1, 4)):
        now = [replace(jobs[k], start=server, memory=memory.get(k), shared=shared) for k in chosen]
        updates = trainer.train(now, LR)
        x0, models, changes = parts(server), [], []
        for k, job, update in zip(chosen, now, updates, strict=True):
            mine = c_k.get(k, {name: np.zeros_like(v) for name, v in x0.items()})
            w, _, steps = sgd(
                x, y, job, lambda w, g, mine=mine, c=c: {n: g[n] - mine[n] + c[n] for n in w}, momentum=momentum
            )
            # a gradient of step i is still in the model's way steps - i times, less each time: no momentum, once
            weight = sum(sum(momentum**j for j in range(steps - i)) for i in range(steps))
            new = {n: mine[n] - c[n] + (x0[n] - w[n]) / (weight * LR) for n in w}
            close(update.state, w)
            close(update.memory, new)
            close(update.sent, {n: new[n] - mine[n] for n in w})
            models.append(w)
            changes.append({n: new[n] - mine[n] for n in w})
            c_k[k], memory[k] = new, update.memory
        c = {n: c[n] + sum(d[n] for d in changes) / N for n in c}
        mean = {n: torch.from_numpy(sum(w[n] for w in models) / len(models)) for n in c}
        sent, states = [u.sent for u in updates], [u.state for u in updates]
        server, shared = algorithm.server(mean, server, states, sent, shared, N)
        close(shared, c)
        close(server, mean)
    close({n: sum(m[n] for m in memory.values()) / N for n in c}, c)  # c is the mean of the c_k of all clients


def test_moon_over_rounds():
    """Equation 3 of Li et al., its gradient by the features written out"""
    model, x, y, start, jobs = problem(3)
    mu, tau = 2.0, 0.7
    trainer = trainer_of(model, x, y, Moon(mu=mu, temperature=tau))
    assert not trainer.batched
    plain = trainer_of(model, x, y, "sgd").train(jobs, LR)
    first = trainer.train(jobs, LR)
    for a, b in zip(first, plain, strict=True):  # nothing to tell from the global model yet
        close(a.state, b.state)
        close(a.memory, a.state)
    again = {k: v + 0.1 for k, v in start.items()}
    now = [replace(job, start=again, memory=u.memory) for job, u in zip(jobs, first, strict=True)]
    for job, update in zip(now, trainer.train(now, LR), strict=True):
        w_glob, w_prev = parts(job.start), parts(job.memory)

        def add(z, rows, w_glob=w_glob, w_prev=w_prev):
            cosines, slopes_of = [], []
            for other in (w_glob, w_prev):
                a = forward(other, rows)[0]
                na, nz = np.linalg.norm(a, axis=1, keepdims=True), np.linalg.norm(z, axis=1, keepdims=True)
                cosine = (a * z).sum(1, keepdims=True) / na / nz
                cosines.append(cosine)
                slopes_of.append(a / na / nz - cosine * z / nz**2)
            p = np.exp(cosines[0] / tau) / (np.exp(cosines[0] / tau) + np.exp(cosines[1] / tau))
            return mu / tau * (1 - p) * (slopes_of[1] - slopes_of[0]) / len(z)

        w, _, _ = sgd(x, y, job, nothing, add=add)
        close(update.state, w)
        close(update.memory, w)
        assert not np.allclose(w["body.weight"], sgd(x, y, job, nothing)[0]["body.weight"], rtol=1e-3)


def test_moon_uses_the_eval_mode_of_other_models_and_leaves_ours_alone():
    x = torch.randn(12, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    y = torch.arange(12) % 3
    from fastagg.sim.models import make

    model = make("resnet8", (1, 8, 8), 3, 0)
    job = Job(0, {k: v.clone() for k, v in model.state_dict().items()}, np.arange(12), 0, 1)
    both = [Trainer(model, x, y, Local(batch_size=6, algorithm=a), head="fc.weight") for a in ("sgd", "moon")]
    a, b = (trainer.train([job], 0.01)[0].state for trainer in both)
    for key in a:  # the extra forward passes neither counted a batch nor moved a mean
        torch.testing.assert_close(a[key], b[key], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("algorithm", ["sgd", "fedprox"])
def test_kept_momentum(batched, algorithm):
    model, x, y, start, jobs = problem()
    trainer = trainer_of(model, x, y, algorithm, batched, keep_momentum=True, mu=0.2)
    pull, w0 = 0.2 if algorithm == "fedprox" else 0.0, parts(start)
    change = lambda w, g: {k: g[k] + pull * (w[k] - w0[k]) for k in w}  # noqa: E731
    first = trainer.train(jobs, LR)
    kept = [{k: v.clone() for k, v in u.momentum.items()} for u in first]
    second = trainer.train([replace(j, momentum=u.momentum) for j, u in zip(jobs, first, strict=True)], LR)
    for job, a, b, before in zip(jobs, first, second, kept, strict=True):
        w, v, _ = sgd(x, y, job, change)
        close(a.state, w)
        close(a.momentum, v)
        close(a.momentum, parts(before))  # the second round has left it alone
        w, v, _ = sgd(x, y, job, change, v=v)
        close(b.state, w)
        close(b.momentum, v)


@pytest.mark.parametrize("algorithm", ["fedprox", "feddyn", "scaffold", "moon"])
def test_wdr_adds_to_any(algorithm):
    model, x, y, _, jobs = problem()
    jobs = [replace(job, class_dist=np.array([1.0, 2.0, 5.0])) for job in jobs]
    states = {}
    for wdr in (0.0, 0.4):
        trainer = Trainer(model, x, y, Local(algorithm=algorithm, wdr=wdr), head="fc.weight", batched=False)
        states[wdr] = trainer.train(jobs, LR)[0].state
    head = model.fc.weight.detach()
    assert not torch.equal(states[0.0]["fc.weight"], states[0.4]["fc.weight"])
    penalties = [fastagg.wdr_penalty(states[wdr]["fc.weight"], [1.0, 2.0, 5.0]) for wdr in (0.0, 0.4)]
    assert penalties[1] < penalties[0]
    assert torch.equal(model.fc.weight, head)


# The server


@pytest.fixture(scope="module")
def digits():
    found = data.load("digits")
    return replace(found, x=found.x.double(), test_x=found.test_x.double())


@pytest.fixture
def in_float64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


SMALL = {"clients": 6, "rounds": 4, "epochs": 1, "alpha": 0.5, "samples": 300, "participation": 0.5, "batched": False}


def rounds_by_hand(sim, weigh, server):
    """Two rounds of a simulation next to what the equations say of them"""
    for r in (1, 2):
        before, present = parts(sim.models[0]), sim.chosen(r)
        jobs = [sim.job(r, k) for k in present]
        updates = sim.trainer.train(jobs, sim.options.lr * sim.options.lr_decay ** (r - 1))
        weights = weigh(sim, present, updates)
        result = {k: sum(w * u.state[k].numpy() for w, u in zip(weights, updates, strict=True)) for k in before}
        expected = server(result, before, [parts(u.state) for u in updates], jobs, r)
        sim.next_round()
        close(sim.models[0], expected)


def plain_mean(sim, present, updates):
    return np.full(len(present), 1 / len(present))


def of_fedawa(sim, present, updates):
    states = [u.state for u in updates]
    return fastagg.fedawa(sim.models[0], states, sim.sizes(present), params=sim.module).weights.numpy()


@pytest.mark.usefixtures("in_float64")
@pytest.mark.parametrize(("method", "weigh"), [("fedavg", plain_mean), ("fedawa", of_fedawa)])
def test_feddyn_corrects_the_methods_result(method, weigh, digits):
    """Acar et al., Algorithm 1: h <- h - mu/m sum (w_k - w), w <- mean - h/mu, the mean being the method's result"""
    mu = 0.1
    sim = Simulation(from_dict(SMALL | {"method": method, "algorithm": "feddyn", "mu": mu}), digits)
    h = {k: np.zeros_like(v) for k, v in parts(sim.models[0]).items()}

    def server(result, before, states, jobs, r):
        for k in h:
            h[k] = h[k] - mu / 6 * sum(w[k] - before[k] for w in states)
        return {k: result[k] - h[k] / mu for k in h}

    rounds_by_hand(sim, weigh, server)
    close(sim.shared, h)


@pytest.mark.usefixtures("in_float64")
@pytest.mark.parametrize("method", ["fedavg", "fedawa"])
def test_scaffold_in_a_run(method, digits):
    """The method's result is the model; c moves by the participants' changes over all clients"""
    sim = Simulation(from_dict(SMALL | {"method": method, "algorithm": "scaffold", "momentum": 0.0}), digits)
    c = {k: np.zeros_like(v) for k, v in parts(sim.models[0]).items()}
    c_k = dict.fromkeys(range(6), c)

    def server(result, before, states, jobs, r):
        nonlocal c
        change = {k: np.zeros_like(v) for k, v in c.items()}
        for job, w in zip(jobs, states, strict=True):
            steps = math.ceil(len(job.indices) / sim.options.batch_size)
            lr = sim.options.lr * sim.options.lr_decay ** (r - 1)
            new = {n: c_k[job.client][n] - c[n] + (before[n] - w[n]) / (steps * lr) for n in c}
            change = {n: change[n] + (new[n] - c_k[job.client][n]) / 6 for n in c}
            c_k[job.client] = new
        c = {n: c[n] + change[n] for n in c}
        return result

    rounds_by_hand(sim, plain_mean if method == "fedavg" else of_fedawa, server)
    close(sim.shared, c)
    for k, memory in sim.memory.items():
        close(memory, c_k[k])


@pytest.mark.usefixtures("in_float64")
@pytest.mark.parametrize(("method", "options"), [("fedavg", {"server_lr": 0.5}), ("fedawa", {})])
def test_scaffold_counts_clients_alike_where_only_sizes_would_tell(method, options, digits):
    sim = Simulation(from_dict(SMALL | {"method": method, "options": options, "algorithm": "scaffold"}), digits)
    record = sim.next_round()
    K = len(record["clients"])
    assert len(set(sim.sizes(record["clients"]))) > 1
    assert (record["weights"] == pytest.approx([1 / K] * K, abs=1e-6)) == (method != "fedawa")


@pytest.mark.parametrize("algorithm", ["feddyn", "scaffold"])
@pytest.mark.parametrize("method", ["fedamp", "cfl"])
def test_a_servers_part_needs_one_model(method, algorithm):
    with pytest.raises(ValueError, match=f"algorithm={algorithm} corrects one global model, and {method} has several"):
        from_dict(SMALL | {"method": method, "algorithm": algorithm})


@pytest.mark.parametrize("method", ["cfl", "fedamp"])
@pytest.mark.parametrize("options", [{"algorithm": "moon"}, {"keep_momentum": True}])
def test_clients_with_models_of_their_own_remember_too(method, options):
    clusters = {"options": {"eps1": 100.0, "eps2": 0.0}} if method == "cfl" else {}
    sim = Simulation(from_dict(SMALL | options | clusters | {"method": method}), data.load("digits"))
    sim.next_round()
    sim.next_round()
    kept = sim.memory if "algorithm" in options else sim.momentum
    assert kept.keys() == set(sim.chosen(1)) | set(sim.chosen(2))


def test_a_dropped_client_remembers_nothing():
    options = {"algorithm": "scaffold", "participation": 1.0, "options": {"on_bad_client": "drop"}}
    sim = Simulation(from_dict(SMALL | options), data.load("digits"))
    train = sim.trainer.train

    def spoiled(jobs, lr):
        updates = train(jobs, lr)
        updates[2].model["fc.bias"][0] = math.nan
        return updates

    sim.trainer.train = spoiled
    sim.next_round()
    assert sorted(sim.memory) == [0, 1, 3, 4, 5]
    for key, c in sim.shared.items():  # still the mean of what clients remember
        torch.testing.assert_close(c, sum(m[key] for m in sim.memory.values()) / 6)


# Checkpoints


@pytest.mark.parametrize(
    "options",
    [
        {"algorithm": "scaffold"}, {"algorithm": "moon"}, {"keep_momentum": True},
        {"algorithm": "moon", "keep_momentum": True, "method": "fedamp"}, {"algorithm": "feddyn", "method": "fedawa"},
    ],
    ids=lambda o: "-".join(map(str, o.values())),
)  # fmt: skip
def test_a_run_that_goes_on_remembers(options, tmp_path):
    whole, part = (from_dict(SMALL | options | {"rounds": n}) for n in (4, 2))
    found, curves = data.load("digits"), []
    simulate(whole, tmp_path / "whole", dataset=found)
    simulate(part, tmp_path / "parts", dataset=found)
    simulate(whole, tmp_path / "parts", dataset=found, resume=True)
    for name in ("whole", "parts"):
        lines = read_metrics(tmp_path / name / "metrics.jsonl")
        curves.append([(line["loss"], line["personal_accuracy"], line.get("train_loss")) for line in lines])
    assert curves[0] == curves[1]
    forgetful = Simulation(whole, found)  # the memory is what makes the difference
    forgetful.next_round()
    forgetful.next_round()
    forgetful.memory, forgetful.momentum = {}, {}
    forgetful.shared = forgetful.trainer.algorithm.shared(forgetful.models[0], forgetful.parameters)
    forgetful.next_round()
    assert forgetful.next_round()["train_loss"] != curves[0][-1][2]


@pytest.mark.parametrize("where", ["memory", "momentum", "shared"])
def test_a_checkpoint_with_a_memory_of_another_form(where):
    algorithm = "scaffold" if where != "momentum" else "sgd"
    sim = Simulation(
        from_dict(SMALL | {"algorithm": algorithm, "keep_momentum": where == "momentum"}), data.load("digits")
    )
    sim.next_round()
    state = sim.state_dict()
    sim.load_state_dict(state)
    kept = state["shared"] if where == "shared" else next(iter(state[where].values()))
    kept["fc.bias"] = torch.zeros(3)
    with pytest.raises(ValueError, match="what it remembers of clients is not of the model's form"):
        sim.load_state_dict(state)


# Own algorithms


def descend(client):
    """Plain gradient descent, which counts its rounds"""
    for x, y in client.batches():
        loss = client.loss(client.model(x), y)
        for p, g in zip(
            client.model.parameters(), torch.autograd.grad(loss, list(client.model.parameters())), strict=True
        ):
            p.data -= client.lr * g
    client.memory["rounds"] = client.memory.get("rounds", torch.tensor(0)) + 1
    client.memory["seen"] = torch.tensor([client.id, client.round, client.epochs])


def test_a_function_of_ones_own():
    model, x, y, _, jobs = problem()
    trainer = trainer_of(model, x, y, descend)
    jobs[1] = replace(jobs[1], memory={"rounds": torch.tensor(6)}, round=7)
    usual = Trainer(model, x, y, Local(batch_size=4, momentum=0, weight_decay=0), head="fc.weight", batched=False)
    for job, a, b in zip(jobs, trainer.train(jobs, LR), usual.train(jobs, LR), strict=True):
        close(a.state, b.state)
        assert (a.loss, a.steps) == (pytest.approx(b.loss), b.steps)
        assert a.memory["rounds"] == (7 if job.client == 1 else 1)
        assert a.memory["seen"].tolist() == [job.client, 7 if job.client == 1 else 1, 2]
    assert jobs[1].memory == {"rounds": torch.tensor(6)}


def test_functions_that_say_too_little():
    model, x, y, _, jobs = problem()
    with pytest.raises(ValueError, match=r"neither called client\.loss\(outputs, y\) nor returned"):
        trainer_of(model, x, y, lambda client: None).train(jobs, LR)
    assert trainer_of(model, x, y, lambda client: 0.25).train(jobs, LR)[0].loss == 0.25

    def forgets(client):
        client.memory["a"] = [1, 2]
        return 1.0

    with pytest.raises(ValueError, match=r"client\.memory must be a dict of tensors"):
        trainer_of(model, x, y, forgets).train(jobs, LR)

    def replaces(client):
        client.model = copy.deepcopy(client.model)
        return 1.0

    with pytest.raises(ValueError, match=r"client\.model is another module now"):
        trainer_of(model, x, y, replaces).train(jobs, LR)


def test_a_function_cannot_change_what_others_start_from():
    model, x, y, _, jobs = problem()

    def wrecks(client):
        for value in client.start.values():
            value.zero_()
        return 1.0

    before = copy.deepcopy([job.start for job in jobs])
    trainer_of(model, x, y, wrecks).train(jobs, LR)
    for job, start in zip(jobs, before, strict=True):
        assert all(torch.equal(job.start[key], value) for key, value in start.items())


@dataclass(frozen=True)
class Signs(Algorithm):
    """A tenth of the gradients' signs, and a server that counts"""

    name = "signs"
    batched = True
    size: float = 0.1

    def gradient(self, client, parameters, gradients):
        for g in gradients.values():
            g.copy_(self.size * g.sign())

    def shared(self, start, parameters):
        return {"rounds": torch.zeros(())}

    def server(self, result, before, states, sent, shared, clients):
        return {k: 0.5 * (v + before[k]) for k, v in result.items()}, {"rounds": shared["rounds"] + 1}


@pytest.mark.parametrize("batched", [False, True])
def test_an_algorithm_of_ones_own(batched):
    model, x, y, _, jobs = problem()
    for job, update in zip(jobs, trainer_of(model, x, y, Signs, batched).train(jobs, LR), strict=True):
        w, _, _ = sgd(x, y, job, lambda w, g: {k: 0.1 * np.sign(g[k]) for k in w})
        close(update.state, w)


def test_which_algorithms_there_are():
    assert list(ALGORITHMS) == ["sgd", "fedprox", "feddyn", "scaffold", "moon"]
    assert local.make("fedprox", 0.5) == local.make(FedProx(mu=0.5)) == FedProx(mu=0.5)
    assert local.make("moon") == Moon(mu=1.0, temperature=0.5)
    assert local.make("scaffold", 0.5) == Scaffold()
    for what in (3, None, dict):
        with pytest.raises(TypeError, match="expected one of sgd"):
            local.make(what)
    with pytest.raises(ValueError, match="moon: temperature=0"):
        Moon(temperature=0)
    with pytest.raises(ValueError, match="scaffold takes its gradients from the way a client went"):
        Local(algorithm="scaffold", keep_momentum=True)
    model, x, y, _, _ = problem()
    with pytest.raises(ValueError, match="batched=True needs an algorithm that can do with all clients at once"):
        trainer_of(model, x, y, "moon", batched=True)
    with pytest.raises(ValueError, match="moon need the output layer's key"):
        Trainer(model, x, y, Local(algorithm="moon"), head=None)


# Other data, losses, models


def regression(seed=0):
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(80, 5, generator=rng)
    y = x @ torch.tensor([1.0, -2.0, 0.5, 0.0, 1.0]) + 0.05 * torch.randn(80, generator=rng)
    return nn.Sequential(nn.Linear(5, 1)), x, y


@pytest.mark.parametrize("batched", [False, True])
def test_numbers_instead_of_classes(batched):
    model, x, y = regression()
    start = {k: v.detach().clone() for k, v in model.state_dict().items()}
    jobs = [Job(k, start, np.arange(16 * k, 16 * k + 16), k, 20) for k in range(5)]
    updates = Trainer(model, x, y, Local(batch_size=8), head="0.weight", batched=batched).train(jobs, 0.05)
    before, after = (outcomes(model, sd, x, y) for sd in (start, updates[0].state))
    predicted = nn.functional.linear(x, updates[0].state["0.weight"], updates[0].state["0.bias"])[:, 0]
    r2 = 1 - (predicted - y).square().sum() / (y - y.mean()).square().sum()
    assert after.of() == pytest.approx((r2.item(), (predicted - y).square().mean().item()), rel=1e-4)
    assert after.of()[0] > 0.9 > before.of()[0]
    with pytest.raises(ValueError, match=r"outputs \(80, 2\) do not fit targets \(80,\)"):
        outcomes(nn.Linear(5, 2), nn.Linear(5, 2).state_dict(), x, y).of()


@pytest.mark.parametrize("batched", [False, True])
def test_own_loss_and_metric(batched):
    model, x, y = regression()
    start = {k: v.detach().clone() for k, v in model.state_dict().items()}
    jobs = [Job(k, start, np.arange(16 * k, 16 * k + 16), k, 1) for k in range(5)]
    far = lambda o, t: (o[:, 0] - t).abs()  # noqa: E731
    one = Trainer(model, x, y, Local(batch_size=16, loss=far, momentum=0), head="0.weight", batched=batched)
    for job, update in zip(jobs, one.train(jobs, 0.1), strict=True):
        xs, ys = x[job.indices], y[job.indices]
        signs = (xs @ start["0.weight"][0] + start["0.bias"] - ys).sign()
        slope = (signs[:, None] * xs).mean(0) + 5e-4 * start["0.weight"][0]
        torch.testing.assert_close(update.state["0.weight"][0], start["0.weight"][0] - 0.1 * slope)
    seen = outcomes(model, start, x, y, loss=far, metric=lambda o, t: far(o, t).max())
    assert seen.of()[0] == far(model(x), y).max().item()
    scalar = Local(batch_size=16, loss=lambda o, t: far(o, t).mean(), momentum=0)
    mean = Trainer(model, x, y, scalar, head="0.weight")
    assert not mean.batched  # it has no value per sample
    torch.testing.assert_close(mean.train(jobs, 0.1)[0].state, one.train(jobs, 0.1)[0].state)
    with pytest.raises(ValueError, match="batched=True needs a loss that returns a value per sample"):
        Trainer(model, x, y, scalar, head="0.weight", batched=True).train(jobs, 0.1)


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.fc = nn.Embedding(30, 8), nn.Linear(8, 2)

    def forward(self, x):
        return self.fc(self.words(x).mean(1))


def test_text():
    rng = torch.Generator().manual_seed(0)
    x = torch.randint(30, (60, 7), generator=rng)
    y = (x < 10).sum(1).gt(2).long()
    torch.manual_seed(0)
    model = Words()
    start = {k: v.detach().clone() for k, v in model.state_dict().items()}
    jobs = [Job(k, start, np.arange(12 * k, 12 * k + 12), k, 3) for k in range(5)]
    trainers = [Trainer(model, x, y, Local(batch_size=6), head="fc.weight", batched=b) for b in (False, True, None)]
    assert trainers[2].batched
    one, many, _ = (trainer.train(jobs, 0.5) for trainer in trainers)
    for a, b in zip(one, many, strict=True):
        torch.testing.assert_close(a.state, b.state, rtol=1e-4, atol=1e-5)
    losses = [outcomes(model, sd, x[:12], y[:12]).of()[1] for sd in (start, one[0].state)]
    assert losses[1] < losses[0]


def test_what_torch_would_do_client_after_client_is_not_batched():
    """And says so in a warning at each step"""
    model = nn.Sequential(nn.EmbeddingBag(30, 8), nn.Linear(8, 2))
    x, y = torch.arange(20).view(10, 2), torch.arange(10) % 2
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not Trainer(model, x, y, Local(), head=None).batched


class Dropping(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 3)

    def forward(self, x):
        return self.fc(F.dropout(x, 0.5, self.training))


def test_dropout_comes_from_the_seed_of_the_job():
    _, x, y, _, jobs = problem()
    model = Dropping().double()
    start = {k: v.detach().clone() for k, v in model.state_dict().items()}
    jobs = [replace(job, start=start) for job in jobs]
    trainer = Trainer(model, x, y, Local(batch_size=4), head="fc.weight")
    assert not trainer.batched
    before = torch.random.get_rng_state()
    together, alone = trainer.train(jobs, LR), trainer.train(jobs[2:3], LR)[0]
    assert torch.equal(before, torch.random.get_rng_state())
    assert torch.equal(together[2].state["fc.weight"], alone.state["fc.weight"])
    other = trainer.train([replace(jobs[2], seed=99, indices=jobs[2].indices[:1])], LR)[0]
    assert not torch.equal(other.state["fc.weight"], alone.state["fc.weight"])


@pytest.mark.parametrize("batched", [False, True])
def test_bfloat16_is_near_float32(batched):
    found = data.load("digits")
    from fastagg.sim.models import make

    model = make("mlp", (1, 8, 8), 10, 0)
    jobs = [Job(k, model.state_dict(), np.arange(20 * k, 20 * k + 20), k, 1) for k in range(5)]
    a, b = (
        Trainer(model, found.x, found.y, Local(precision=p), head="fc.weight", batched=batched).train(jobs, 0.05)
        for p in ("float32", "bfloat16")
    )
    for one, other in zip(a, b, strict=True):
        assert other.state["fc.weight"].dtype == torch.float32
        assert other.loss != one.loss
        assert other.loss == pytest.approx(one.loss, rel=2**-6)
    seen = [outcomes(model, a[0].state, found.x[:99], found.y[:99], precision=p).of() for p in ("float32", "bfloat16")]
    assert seen[0] != seen[1]
    assert seen[1][1] == pytest.approx(seen[0][1], rel=2**-6)


def test_frozen_and_unused_parameters_stay():
    _, x, y, _, jobs = problem()
    model = Small().double()
    model.body.weight.requires_grad_(False)
    model.unused = nn.Parameter(torch.ones(2, dtype=torch.float64))
    start = {k: v.detach().clone() for k, v in model.state_dict().items()}
    local = Local(batch_size=4, weight_decay=0, algorithm="scaffold")
    [update] = Trainer(model, x, y, local, head="fc.weight").train([replace(jobs[0], start=start)], LR)
    assert torch.equal(update.state["body.weight"], start["body.weight"])
    assert torch.equal(update.state["unused"], start["unused"])
    assert not torch.equal(update.state["body.bias"], start["body.bias"])
    assert set(update.memory) == set(start) - {"body.weight"}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"algorithm": "feddyn"}, "feddyn needs all clients in one process .it corrects the model from all updates"),
        ({"algorithm": "scaffold"}, "scaffold needs all clients in one process .it corrects"),
        ({"algorithm": "moon"}, "moon needs all clients in one process .clients remember"),
        ({"keep_momentum": True}, "keep_momentum needs all clients in one process .clients remember"),
        ({"algorithm": "fedprox"}, None),
    ],
)
def test_who_needs_all_clients_in_one_process(options, words):
    settings = from_dict(SMALL | options)
    server = fastagg.aggregator("fedavg")
    if words is None:
        ranks.check(settings, settings.local.rule, server, {})
        return
    with pytest.raises(ValueError, match=words):
        ranks.check(settings, settings.local.rule, server, {})
