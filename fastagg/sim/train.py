"""What a client does in a round: SGD with momentum from the state it is given, on its own samples.

    sgd       min f(w)                                                             f: mean cross-entropy of a batch
    fedprox   min f(w) + mu/2 ||w - w_start||^2                                                    (Li et al., 2020)
    feddyn    min f(w) - <h, w> + mu/2 ||w - w_start||^2,  then h <- h - mu (w - w_start)        (Acar et al., 2021)

and to each of them wdr times cwFedAvg's penalty on the output layer may be added. Weight decay is torch's: added to the
gradient, before momentum. Momentum starts from zero in every round.

A Trainer runs its jobs one after the other, or all of them as one computation with the clients as a further dimension
of every tensor (torch.func). Batches and arithmetic are the same, results agree to rounding.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import (  # those with an underscore are missing from what its stubs export
    Tensor,
    _foreach_add_,  # pyright: ignore[reportPrivateImportUsage]
    _foreach_mul_,  # pyright: ignore[reportPrivateImportUsage]
    _foreach_sub,  # pyright: ignore[reportPrivateImportUsage]
    _foreach_sub_,  # pyright: ignore[reportPrivateImportUsage]
    nn,
)
from torch.func import functional_call, grad_and_value, vmap

from fastagg import wdr_penalty
from fastagg._engine.checks import check_choice, check_integer, check_number

ALGORITHMS = ("sgd", "fedprox", "feddyn")
FEW = 4  # clients: when fewer are left they finish one by one; a batched step costs as much as three or four of those

# Numbers in a sample up to which batched is the default. Time of one by one over time of batched, two threads on two
# cores of a shared machine, best of five: digits (8 x 8) with mlp 1.0 to 1.7, 1.3 to 1.9, 2.4 to 3.4 (10, 20, 100
# clients), lenet 1.2 to 1.5 (batches of 10: 2.6 to 3.8), cnn 1.2 to 1.5, vit 1.5 to 1.7; 28 x 28 with mlp 0.8 to 1.9,
# lenet 0.7; 3 x 32 x 32 with mlp 0.7 to 1.3. Larger images keep the cores busy one client at a time, and the weights of
# all clients do not fit in the cache. With one thread: digits 0.8 to 2.0, larger images 0.7 to 0.9.
SMALL = 256


@dataclass(frozen=True)
class Local:
    """Local training of one run.

    lr is the first round's: Trainer.train is told each round's. mu is FedProx's mu or FedDyn's alpha, and not used by
    "sgd"; wdr is the lambda of cwFedAvg's weight distribution regulariser (0: none).
    """

    epochs: int = 3
    batch_size: int = 50
    lr: float = 0.05
    momentum: float = 0.9
    weight_decay: float = 5e-4
    algorithm: str = "sgd"
    mu: float = 0.01
    wdr: float = 0.0

    def __post_init__(self) -> None:
        check_integer("local training", "epochs", self.epochs, 1)
        check_integer("local training", "batch_size", self.batch_size, 1)
        check_number("local training", "lr", self.lr, 0, float("inf"), strict=True)
        check_number("local training", "momentum", self.momentum, 0, 1)
        check_number("local training", "weight_decay", self.weight_decay, 0, float("inf"))
        check_choice("local training", "algorithm", self.algorithm, ALGORITHMS)
        check_number("local training", "mu", self.mu, 0, float("inf"), strict=self.algorithm == "feddyn")
        check_number("local training", "wdr", self.wdr, 0, float("inf"))

    @property
    def pull(self) -> float:
        """What (w - w_start) is multiplied by in the gradient"""
        return 0.0 if self.algorithm == "sgd" else float(self.mu)


@dataclass(frozen=True)
class Job:
    """One client's part in one round"""

    client: int
    start: Mapping[str, Tensor]  # the state dict it starts from
    indices: np.ndarray  # its samples
    seed: int  # of its batches in this round
    epochs: int  # a straggler may do fewer than the others
    class_dist: np.ndarray | None = None  # its shares or counts of the classes, for wdr
    correction: Mapping[str, Tensor] | None = None  # FedDyn's h, by parameter; None: zeros


@dataclass(frozen=True)
class Update:
    """What comes back. Nothing is hidden: where training diverged, loss and state are not finite."""

    state: dict[str, Tensor] | None  # None where another process has it
    loss: float  # mean cross-entropy of the samples as they were seen, over all epochs, without any penalty
    steps: int
    correction: dict[str, Tensor] | None = None  # FedDyn's new h

    @property
    def model(self) -> dict[str, Tensor]:
        """The state, where this process is known to have it"""
        assert self.state is not None
        return self.state


class Trainer:
    """Trains clients of one model and data set. The model is copied; it, x, y and the jobs are never changed.

    model     which network; its own weights do not matter
    x, y      all samples and their classes: jobs say which are theirs
    head      key of the output layer's weight, for wdr
    batched   train all clients of a round as one computation; None: where that is faster. Needs a model without buffers

    A model with BatchNorm skips a batch of one sample. The same jobs give the same bits, for the same number of torch's
    threads.
    """

    batched: bool

    def __init__(self, model: nn.Module, x: Tensor, y: Tensor, local: Local, *, head: str, batched: bool | None = None):
        check_samples(x, y)
        self._model = copy.deepcopy(model).train()
        self._x, self._y, self._local, self._head = x, y, local, head
        self._names = [name for name, _ in model.named_parameters()]
        self._shapes = {key: value.shape for key, value in model.state_dict().items()}
        self._norm = any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in model.modules())
        if head not in self._names:
            raise ValueError(f"head={head!r} is not a parameter of {type(model).__name__}: use head_of(model)")
        if self._norm and local.batch_size == 1:
            raise ValueError("batch_size=1: BatchNorm needs two samples or more")
        buffers = [name for name, _ in model.named_buffers()]
        if batched and buffers:
            raise ValueError(
                f"batched=True needs a model without buffers, and {type(model).__name__} has {buffers[0]!r}: "
                "leave batched out, or choose a model without BatchNorm"
            )
        self.batched = bool(batched) if batched is not None else not buffers and x[0].numel() <= SMALL

    def train(self, jobs: Sequence[Job], lr: float) -> list[Update]:
        """The clients' updates, in the order of the jobs"""
        check_number("local training", "lr", lr, 0, float("inf"), strict=True)
        for job in jobs:
            self._check_job(job)
        plans = [self._batches(job) for job in jobs]
        if self.batched and jobs:
            return self._train_batched(jobs, plans, lr)
        return [self._train_one(job, plan, lr) for job, plan in zip(jobs, plans, strict=True)]

    def _train_one(self, job: Job, plan: list[np.ndarray], lr: float) -> Update:
        self._model.load_state_dict(job.start)
        momentum = [torch.zeros_like(p) for p in self._model.parameters()]
        total = self._run(job, plan, lr, momentum)
        return self._update(job, plan, self._model.state_dict(), total)

    def _run(self, job: Job, plan: list[np.ndarray], lr: float, momentum: list[Tensor]) -> Tensor:
        """Steps of the module from the weights and momentum that it has; the sum of the samples' losses"""
        params = dict(self._model.named_parameters())
        weights: list[Tensor] = list(params.values())
        pulls = self._pulls([job], lambda tensors: tensors[0])
        total = self._x.new_zeros((), dtype=torch.float64)
        for batch in plan:
            indices = torch.from_numpy(batch)
            loss = F.cross_entropy(self._model(self._x[indices]), self._y[indices])
            total += loss.detach().double() * len(batch)
            if self._local.wdr:
                loss = loss + self._local.wdr * wdr_penalty(params[self._head], job.class_dist)
            step(weights, list(torch.autograd.grad(loss, weights)), momentum, lr, self._local, *pulls)
        return total

    def _train_batched(self, jobs: Sequence[Job], plans: list[list[np.ndarray]], lr: float) -> list[Update]:
        """Tensors have a row per client, those with most steps first: the clients still at work are the first rows"""
        order = sorted(range(len(jobs)), key=lambda k: -len(plans[k]))
        jobs, plans = [jobs[k] for k in order], [plans[k] for k in order]
        params = {name: torch.stack([job.start[name].detach() for job in jobs]) for name in self._names}
        momentum = [torch.zeros_like(p) for p in params.values()]
        total = self._x.new_zeros(len(jobs), dtype=torch.float64)
        pulls, shares = self._pulls(jobs, torch.stack), self._shares(jobs)
        gradient = vmap(grad_and_value(self._loss, has_aux=True))
        together = len(plans[FEW - 1]) if len(plans) >= FEW else 0  # steps
        for t in range(together):
            batches = [plan[t] for plan in plans if len(plan) > t]
            K = len(batches)
            now = {name: p[:K] for name, p in params.items()}
            indices, part = pad(batches)
            grads, (_, loss) = gradient(now, self._x[indices], self._y[indices], part.to(self._x), shares[:K])
            total[:K] += loss.double() * torch.tensor([len(batch) for batch in batches]).to(total)
            now_pulls = [pull and [p[:K] for p in pull] for pull in pulls]
            step(list(now.values()), list(grads.values()), [m[:K] for m in momentum], lr, self._local, *now_pulls)
        updates = {}
        for row, (k, job, plan) in enumerate(zip(order, jobs, plans, strict=True)):
            state = {key: params[key][row] for key in self._shapes}
            if len(plan) > together:
                self._model.load_state_dict(state)
                total[row] += self._run(job, plan[together:], lr, [m[row] for m in momentum])
                state = self._model.state_dict()
            updates[k] = self._update(job, plan, state, total[row])
        return [updates[k] for k in range(len(jobs))]

    def _loss(self, params: dict[str, Tensor], x: Tensor, y: Tensor, part: Tensor, shares: Tensor):
        """Of one client, under vmap: what is minimised, and the cross-entropy alone"""
        loss = part @ F.cross_entropy(functional_call(self._model, params, (x,)), y, reduction="none")
        if not self._local.wdr:
            return loss, loss
        return loss + self._local.wdr * penalty(params[self._head], shares), loss

    def _pulls(self, jobs: Sequence[Job], join) -> tuple[list[Tensor] | None, list[Tensor] | None]:
        """Start and FedDyn's h, a tensor per parameter, joined over the jobs; None where they are not needed"""
        start = correction = None
        if self._local.pull:
            start = [join([job.start[name] for job in jobs]) for name in self._names]
        if self._local.algorithm == "feddyn" and any(job.correction is not None for job in jobs):
            correction = [join([memory(job, name) for job in jobs]) for name in self._names]
        return start, correction

    def _shares(self, jobs: Sequence[Job]) -> Tensor:
        """[K, C] for wdr, [K, 0] without"""
        if not self._local.wdr:
            return self._x.new_zeros(len(jobs), 0)
        counts = np.stack([np.asarray(job.class_dist, dtype=np.float64) for job in jobs])
        return torch.from_numpy(counts / counts.sum(1, keepdims=True)).to(self._x)

    @torch.no_grad()
    def _update(self, job: Job, plan: list[np.ndarray], state: dict[str, Tensor], total: Tensor) -> Update:
        correction = None
        if self._local.algorithm == "feddyn":
            mu = self._local.mu
            correction = {n: memory(job, n) - mu * (state[n] - job.start[n]) for n in self._names}
        state = {key: value.detach().clone() for key, value in state.items()}
        return Update(state, total.item() / sum(map(len, plan)), len(plan), correction)

    def _batches(self, job: Job) -> list[np.ndarray]:
        """Indices of each step's samples: a permutation per epoch, the last batch of which may be short"""
        generator, size = np.random.default_rng(job.seed), self._local.batch_size
        indices = np.asarray(job.indices, dtype=np.int64)
        orders = [generator.permutation(indices) for _ in range(job.epochs)]
        batches = [order[i : i + size] for order in orders for i in range(0, len(order), size)]
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
        if job.correction is not None and job.correction.keys() != set(self._names):
            raise ValueError(f"{who}: correction must have the model's parameters as keys, and no others")
        if self._local.wdr:
            if job.class_dist is None:
                raise ValueError(f"{who}: wdr={self._local.wdr} needs class_dist, the client's shares of the classes")
            try:
                wdr_penalty(job.start[self._head], job.class_dist)
            except ValueError as error:
                raise ValueError(f"{who}: {error}") from error


def memory(job: Job, name: str) -> Tensor:
    return torch.zeros_like(job.start[name]) if job.correction is None else job.correction[name]


@torch.no_grad()
def step(
    params: list[Tensor], grads: list[Tensor], momentum: list[Tensor], lr: float, local: Local,
    start: list[Tensor] | None, correction: list[Tensor] | None,
) -> None:  # fmt: skip
    """One step of SGD, in place; torch._foreach_ loops over the tensors in C++, torch.optim's step in Python"""
    if local.weight_decay:
        _foreach_add_(grads, params, alpha=local.weight_decay)
    if start is not None:
        _foreach_add_(grads, _foreach_sub(params, start), alpha=local.pull)
    if correction is not None:
        _foreach_sub_(grads, correction)
    _foreach_mul_(momentum, local.momentum)
    _foreach_add_(momentum, grads)
    _foreach_add_(params, momentum, alpha=-lr)


def pad(batches: list[np.ndarray]) -> tuple[Tensor, Tensor]:
    """Batches as one array, and each entry's part in its batch's mean.

    Short batches repeat their first sample, with no part in the mean: a sample of the batch adds no NaN of its own.
    """
    longest = max(map(len, batches))
    indices = np.stack([np.append(batch, np.repeat(batch[0], longest - len(batch))) for batch in batches])
    sizes = np.array([[len(batch)] for batch in batches])
    return torch.from_numpy(indices), torch.from_numpy((np.arange(longest) < sizes) / sizes)


def penalty(head: Tensor, shares: Tensor) -> Tensor:
    """fastagg.wdr_penalty for vmap: shares are a tensor that sums to 1, and nothing is checked"""
    norms = torch.linalg.vector_norm(head.flatten(1), dim=1)  # [C]
    total = norms.sum()
    return torch.linalg.vector_norm(shares - norms / torch.where(total > 0, total, 1))


def check_samples(x: Tensor, y: Tensor) -> None:
    if not x.is_floating_point() or y.dtype != torch.int64 or y.dim() != 1 or len(x) != len(y) or len(x) == 0:
        found = f"{x.dtype} {tuple(x.shape)} and {y.dtype} {tuple(y.shape)}"
        raise ValueError(f"x and y are {found}; expected floats [N, ...] and int64 classes [N], at least one sample")


@torch.no_grad()
def outcomes(
    model: nn.Module, state: Mapping[str, Tensor], x: Tensor, y: Tensor, batch_size: int = 1000
) -> tuple[np.ndarray, np.ndarray]:
    """Of every sample: whether the model with this state classifies it rightly, and its cross-entropy; in eval mode.
    Neither model nor state is changed."""
    check_samples(x, y)
    check_integer("outcomes", "batch_size", batch_size, 1)
    training = [module.training for module in model.modules()]
    model.eval()
    right, losses = [], []
    try:
        for xs, ys in zip(x.split(batch_size), y.split(batch_size), strict=True):
            scores = functional_call(model, dict(state), (xs,), strict=True)
            right.append(scores.argmax(1) == ys)
            losses.append(F.cross_entropy(scores, ys, reduction="none"))
    finally:
        for module, mode in zip(model.modules(), training, strict=True):
            module.training = mode
    return torch.cat(right).numpy(), torch.cat(losses).numpy()
