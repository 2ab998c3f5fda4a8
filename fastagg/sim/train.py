"""What a client does in a round: SGD with momentum from the state it is given, on its own samples.

local.py has what the algorithms add to it, and to each of them wdr times cwFedAvg's penalty on the output layer may be
added. Weight decay is torch's: added to the gradient, before momentum. Momentum starts from zero in every round, or
where the client's last round left it (keep_momentum). FedProx as FedAWA's authors run it is momentum=0.

A Trainer runs its jobs one by one (alone.py), or all of them as one computation with the clients as a further dimension
of every tensor (together.py). Batches and arithmetic are the same, results agree to rounding.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fastagg import wdr_penalty
from fastagg._engine.checks import check_choice, check_integer, check_number
from fastagg.sim import local as algorithms
from fastagg.sim.alone import Alone, call, lying_as, usual_copy
from fastagg.sim.devices import device_of, seeded, widest
from fastagg.sim.local import Algorithm, Client, Function
from fastagg.sim.outcomes import (
    Measure,
    by_channel,
    by_pixel,
    check_samples,
    is_convolutional,
    usual_loss,
)
from fastagg.sim.together import Together
from fastagg.sim.workers import keep_freed_memory, spread

# Numbers in a sample up to which batched is the default. Time of one by one over time of batched, two threads on two
# cores of a shared machine, best of five: digits (8 x 8) with mlp 1.0 to 1.7, 1.3 to 1.9, 2.4 to 3.4 (10, 20, 100
# clients), lenet 1.2 to 1.5 (batches of 10: 2.6 to 3.8), cnn 1.2 to 1.5, vit 1.5 to 1.7; 28 x 28 with mlp 0.8 to 1.9,
# lenet 0.7; 3 x 32 x 32 with mlp 0.7 to 1.3. Larger images keep the cores busy one client at a time, and the weights of
# all clients do not fit in the cache. With one thread: digits 0.8 to 2.0, larger images 0.7 to 0.9.
SMALL = 256


@dataclass(frozen=True)
class Local:
    """Local training of one run.

    lr         the first round's: Trainer.train is told each round's
    algorithm  one of local.ALGORITHMS, an Algorithm or its class, or a function that trains a Client
    mu         the algorithm's, if it has one and is named; None: its default
    wdr        lambda of cwFedAvg's weight distribution regulariser (0: none)
    loss       of outputs and targets, as outcomes.py has them; None: cross-entropy for classes, else the squared error
    precision  "bfloat16": outputs are computed under autocast
    """

    epochs: int = 3
    batch_size: int = 50
    lr: float = 0.05
    momentum: float = 0.9
    weight_decay: float = 5e-4
    keep_momentum: bool = False
    algorithm: Any = "sgd"
    mu: float | None = None
    wdr: float = 0.0
    loss: Measure | None = None
    device: str = "cpu"
    precision: str = "float32"

    def __post_init__(self) -> None:
        check_integer("local training", "epochs", self.epochs, 1)
        check_integer("local training", "batch_size", self.batch_size, 1)
        check_number("local training", "lr", self.lr, 0, float("inf"), strict=True)
        check_number("local training", "momentum", self.momentum, 0, 1)
        check_number("local training", "weight_decay", self.weight_decay, 0, float("inf"))
        check_choice("local training", "keep_momentum", self.keep_momentum, (True, False))
        check_choice("local training", "precision", self.precision, ("float32", "bfloat16"))
        check_number("local training", "wdr", self.wdr, 0, float("inf"))
        if self.mu is not None:
            check_number("local training", "mu", self.mu, 0, float("inf"))
        if isinstance(self.algorithm, str) and ":" in self.algorithm:
            return  # a text that stands for an object; whoever trains has that
        rule = self.rule  # its own checks
        if self.keep_momentum and isinstance(rule, algorithms.Scaffold):
            raise ValueError(
                "local training: scaffold takes its gradients from the way a client went in one round, and "
                "keep_momentum adds to that way what former rounds did; leave it out"
            )

    @property
    def rule(self) -> Algorithm:
        return algorithms.make(self.algorithm, self.mu)


@dataclass(frozen=True)
class Job:
    """One client's part in one round"""

    client: int
    start: Mapping[str, Tensor]  # the state dict it starts from
    indices: np.ndarray  # its samples
    seed: int  # of its batches in this round
    epochs: int  # a straggler may do fewer than the others
    class_dist: np.ndarray | None = None  # its shares or counts of the classes, for wdr
    memory: Mapping[str, Tensor] | None = None  # what the algorithm remembers; None: it is the client's first round
    shared: Mapping[str, Tensor] | None = None  # what the algorithm's server tells all clients; None: in the first
    momentum: Mapping[str, Tensor] | None = None  # by parameter, for keep_momentum; None: zeros
    round: int = 1


@dataclass(frozen=True)
class Update:
    """What comes back. Nothing is hidden: where training diverged, loss and state are not finite."""

    state: dict[str, Tensor] | None  # None where another process has it
    loss: float  # mean loss of the samples as they were seen, over all epochs, without what algorithms add
    steps: int
    memory: dict[str, Tensor] | None = None  # what the algorithm remembers to the client's next round
    sent: dict[str, Tensor] | None = None  # to the algorithm's server
    momentum: dict[str, Tensor] | None = None  # with keep_momentum
    heads: list[float] | None = None  # the classes' shares of the norms of its output layer, where they are recorded

    @property
    def model(self) -> dict[str, Tensor]:
        """The state, where this process is known to have it"""
        assert self.state is not None
        return self.state


class Trainer:
    """Trains clients of one model and data set. The model is copied; it, x, y and the jobs are never changed.

    model     which network; its own weights do not matter
    x, y      all samples and their classes, or numbers: jobs say which are theirs
    head      key of the output layer's weight, for wdr and for algorithms that use features
    batched   train all clients of a round as one computation; None: where that is faster. Needs a model without buffers
              and an algorithm that allows it

    A model with BatchNorm skips a batch of one sample. One by one, clients are spread over torch's threads, each client
    on one of them: the same jobs give the same bits on any number of threads. Batched, with models that draw random
    numbers (dropout; they come from the job's seed) and with functions of the user's own, torch's threads share every
    operation: the same bits for the same number of them.
    """

    batched: bool
    algorithm: Algorithm

    def __init__(
        self, model: nn.Module, x: Tensor, y: Tensor, local: Local, *, head: str | None, batched: bool | None = None
    ):
        check_samples(x, y)
        self.algorithm, self._local, self._head = local.rule, local, head
        self._device = device_of(local.device)
        self._images = is_convolutional(model, x)
        self._x, self._y = x.to(self._device), y.to(self._device)
        self._rows = by_pixel(self._x) if self._images else self._x
        self.loss = local.loss or usual_loss(y)
        self._names = [name for name, value in model.named_parameters() if value.requires_grad]
        self._shapes = {key: value.shape for key, value in model.state_dict().items()}
        self._norm = any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in model.modules())
        if head is not None and head not in self._names:
            raise ValueError(f"head={head!r} is not a parameter of {type(model).__name__}: use head_of(model)")
        if head is None and (local.wdr or self.algorithm.adds_loss):
            raise ValueError(f"wdr and {self.algorithm.name} need the output layer's key: head=head_of(model)")
        if self._norm and local.batch_size == 1:
            raise ValueError("batch_size=1: BatchNorm needs two samples or more")
        self._model = copy.deepcopy(model)
        self._network = self._copy()
        self._more = SimpleQueue[Alone]()  # for further threads, when they are not at work
        self._draws = self._random_numbers()
        keep_freed_memory()
        self._together = Together(self._network.module, self._names, self.loss, self.algorithm, local, head)
        why_not = self._why_not_batched(model)
        if batched and why_not:
            raise ValueError(f"batched=True needs {why_not}")
        small = x[0].numel() <= SMALL
        self.batched = bool(batched) if batched is not None else small and not why_not and self._together.works(x, y)

    def _why_not_batched(self, model: nn.Module) -> str:
        others = [key for key in self._shapes if key not in self._names]
        if others:
            return (
                f"a model without buffers, and {type(model).__name__} has {others[0]!r}: "
                "leave batched out, or choose a model without BatchNorm"
            )
        if not self.algorithm.batched:
            return f"an algorithm that can do with all clients at once, and {self.algorithm.name} cannot: leave it out"
        return ""

    def train(self, jobs: Sequence[Job], lr: float) -> list[Update]:
        """The clients' updates, in the order of the jobs"""
        check_number("local training", "lr", lr, 0, float("inf"), strict=True)
        for job in jobs:
            self._check_job(job)
        plans = [self._batches(job) for job in jobs]
        if self.batched and jobs:
            return self._train_batched(jobs, plans, lr)
        if self._draws or isinstance(self.algorithm, Function) or self._device.type != "cpu":
            return [self._train_one(job, plan, lr, self._network) for job, plan in zip(jobs, plans, strict=True)]
        order = sorted(range(len(jobs)), key=lambda k: -len(plans[k]))
        updates = spread(lambda k: self._train_with_any(jobs[k], plans[k], lr), order)
        return [update for _, update in sorted(zip(order, updates, strict=True), key=lambda pair: pair[0])]

    def _train_with_any(self, job: Job, plan: list[Tensor], lr: float) -> Update:
        """With a network that nobody else is using"""
        try:
            network = self._more.get_nowait()
        except Empty:
            network = self._copy()
        try:
            return self._train_one(job, plan, lr, network)
        finally:
            self._more.put(network)

    def _train_one(self, job: Job, plan: list[Tensor], lr: float, network: Alone) -> Update:
        network.module.load_state_dict(job.start)
        client = self._client(job, plan, lr, network)
        momentum = self._momentum(job, dict(network.module.named_parameters()))
        draws = self._draws or isinstance(self.algorithm, Function)
        with seeded(job.seed, self._device) if draws else nullcontext():
            if isinstance(self.algorithm, Function):
                call(self.algorithm.train, client)
            else:
                network.run(client, momentum, job.class_dist)
        return self._update(client, network.module.state_dict(), momentum)

    def _train_batched(self, jobs: Sequence[Job], plans: list[list[Tensor]], lr: float) -> list[Update]:
        """Those with most steps first: the clients still at work are the first rows of every tensor"""
        order = sorted(range(len(jobs)), key=lambda k: -len(plans[k]))
        jobs, plans = [jobs[k] for k in order], [plans[k] for k in order]
        clients = [self._client(job, plan, lr, self._network) for job, plan in zip(jobs, plans, strict=True)]
        momenta = [self._momentum(job, client.start) for job, client in zip(jobs, clients, strict=True)]
        states, momenta, done = self._together.steps(clients, plans, momenta, self._shares(jobs), self._x, self._y)
        updates = {}
        for k, job, plan, client, state, momentum in zip(order, jobs, plans, clients, states, momenta, strict=True):
            if len(plan) > done:
                self._network.module.load_state_dict(state)
                client.samples = lambda plan=plan: self._samples(plan[done:])
                momentum = lying_as(dict(self._network.module.named_parameters()), momentum)
                self._network.run(client, momentum, job.class_dist)
                state = self._network.module.state_dict()
            updates[k] = self._update(client, {key: state[key] for key in self._shapes}, momentum)
        return [updates[k] for k in range(len(jobs))]

    def _copy(self) -> Alone:
        return Alone(self._model, self.algorithm, self._local, self._head, self._images)

    def _random_numbers(self) -> bool:
        """Whether the model draws any in training: there is one generator for all threads"""
        if self._norm and len(self._x) < 2:
            return False
        with seeded(0):
            before = torch.random.get_rng_state()
            copy.deepcopy(self._model).train()(self._x[:2].cpu())  # there, whatever device it is for
            return not torch.equal(before, torch.random.get_rng_state())

    def _client(self, job: Job, plan: list[Tensor], lr: float, network: Alone) -> Client:
        start = {key: value.to(self._device) for key, value in job.start.items()}
        memory, shared = job.memory, job.shared
        if memory is None:
            memory = self.algorithm.memory(start, self._names)
        if shared is None:
            shared = self.algorithm.shared(start, self._names)
        if isinstance(self.algorithm, Function):  # which may change them
            start, memory, shared = ({k: v.clone() for k, v in each.items()} for each in (start, memory, shared))
        return Client(
            id=job.client, round=job.round, lr=lr, momentum=self._local.momentum, epochs=job.epochs,
            model=network.module, start=start, memory=dict(memory), shared=dict(shared), mean_loss=self._mean,
            samples=lambda: self._samples(plan), features=network.features,
        )  # fmt: skip

    def _samples(self, plan: list[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        for batch in plan:
            x = self._rows.index_select(0, batch)
            yield by_channel(x) if self._images else x, self._y.index_select(0, batch)

    def _mean(self, outputs: Tensor, y: Tensor) -> Tensor:
        return self.loss(outputs, y).mean()

    def _momentum(self, job: Job, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """A copy of its own, in memory as these tensors are"""
        kept = job.momentum if self._local.keep_momentum else None
        if kept is None:
            return {name: torch.zeros_like(like[name], requires_grad=False) for name in self._names}
        return lying_as(like, {name: kept[name] for name in self._names})

    def _shares(self, jobs: Sequence[Job]) -> Tensor:
        """[K, C] for wdr, [K, 0] without"""
        if not self._local.wdr:
            return torch.zeros(len(jobs), 0, device=self._device)
        counts = np.stack([np.asarray(job.class_dist, dtype=np.float64) for job in jobs])
        return torch.from_numpy(counts / counts.sum(1, keepdims=True)).to(self._device, widest(self._device))

    @torch.no_grad()
    def _update(self, client: Client, state: dict[str, Tensor], momentum: dict[str, Tensor]) -> Update:
        state, momentum = ({k: usual_copy(v) for k, v in tensors.items()} for tensors in (state, momentum))
        memory, sent = self.algorithm.finish(client, state)
        return Update(
            state, float(client.total) / client.seen, client.steps, {k: v.detach() for k, v in memory.items()} or None,
            sent or None,
            momentum if self._local.keep_momentum else None,
        )  # fmt: skip

    def _batches(self, job: Job) -> list[Tensor]:
        """Indices of each step's samples: a permutation per epoch, the last batch of which may be short"""
        generator, size = np.random.default_rng(job.seed), self._local.batch_size
        indices = np.asarray(job.indices, dtype=np.int64)
        orders = [torch.from_numpy(generator.permutation(indices)).to(self._device) for _ in range(job.epochs)]
        batches = [batch for order in orders for batch in order.split(size)]
        return [batch for batch in batches if len(batch) > 1] if self._norm else batches

    def _check_job(self, job: Job) -> None:
        who = f"client {job.client}"
        check_integer(who, "epochs", job.epochs, 1)
        if {key: value.shape for key, value in job.start.items()} != self._shapes:
            wrong = [k for k, shape in self._shapes.items() if k not in job.start or job.start[k].shape != shape]
            wrong = wrong or [key for key in job.start if key not in self._shapes]
            raise ValueError(f"{who}: start does not fit the model, first at key {wrong[0]!r}: pass its state dict")
        indices = np.asarray(job.indices)
        if indices.ndim != 1 or indices.size == 0 or not np.issubdtype(indices.dtype, np.integer):
            raise ValueError(f"{who}: indices must be a list of sample numbers, at least one")
        if indices.min() < 0 or indices.max() >= len(self._x):
            raise ValueError(
                f"{who}: indices must lie between 0 and {len(self._x) - 1}, the number of samples less one"
            )
        if self._norm and indices.size == 1:
            raise ValueError(f"{who} has one sample, and BatchNorm needs two: raise the minimum size of a client")
        expected = self.algorithm.memory(job.start, self._names).keys()
        if job.memory is not None and expected and job.memory.keys() != expected:
            raise ValueError(f"{who}: memory does not fit the model: pass what its last update had")
        if self._local.wdr:
            if job.class_dist is None:
                raise ValueError(f"{who}: wdr={self._local.wdr} needs class_dist, the client's shares of the classes")
            try:
                wdr_penalty(job.start[self._head or ""], job.class_dist)
            except ValueError as error:
                raise ValueError(f"{who}: {error}") from error
