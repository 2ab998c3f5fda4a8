"""What clients do besides SGD, and what the server does besides its method: FedProx, FedDyn, SCAFFOLD, MOON, your own.

With f the mean loss of a batch, w the client's weights, w_0 those it started the round from, and eta its learning rate:

    sgd        min f(w)
    fedprox    min f(w) + mu/2 ||w - w_0||^2                                                         (Li et al., 2020)
    feddyn     min f(w) - <h_k, w> + mu/2 ||w - w_0||^2,  then h_k <- h_k - mu (w - w_0);          (Acar et al., 2021)
               server: h <- h - mu/N sum_k (w_k - w_0), new model = the method's result - h / mu
    scaffold   gradient + c - c_k,  then c_k <- c_k - c + (w_0 - w) / (S eta);              (Karimireddy et al., 2020)
               server: c <- c + 1/N sum_k (change of c_k). Option II of the paper; S is the number of steps
    moon       min f(w) - mu log(exp(s_0 / t) / (exp(s_0 / t) + exp(s_k / t))),                      (Li et al., 2021)
               s_0, s_k: cosines of a sample's features with those of w_0, and of the client's last model

N is the number of all clients; sums are over those of the round. FedDyn and SCAFFOLD weigh all clients equally: methods
that weigh by data size alone, as FedAvg, do that with them. With momentum b, a gradient moves the model by more than
eta: S is then the sum of (1 - b^i) / (1 - b) over the steps i, so that c_k stays a mean of gradients.

An Algorithm of your own overrides what it needs. A function in its place does a client's training all by itself.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fastagg
from fastagg._engine.checks import check_choice, check_number
from fastagg.sim.devices import widest

State = dict[str, Tensor]


@dataclass(kw_only=True)
class Client:
    """A client in a round, as an algorithm sees it.

    model         its network, which has the weights that are being trained
    start         the state dict that it began the round with; not to be changed
    memory        what it remembers, tensors by name; a function of your own may change it
    shared        what the server tells all clients besides the model; not to be changed
    batches()     (x, y) of each step: `epochs` passes over its samples in an order that the seed decides
    loss(o, y)    mean loss of a batch with outputs o
    features(x, state)   input of the output layer with another state dict's weights, in eval mode, without gradients
    """

    id: int
    round: int
    lr: float
    momentum: float
    epochs: int
    model: nn.Module
    start: State
    memory: State
    shared: State
    mean_loss: Callable[[Tensor, Tensor], Tensor]
    samples: Callable[[], Iterator[tuple[Tensor, Tensor]]]
    features: Callable[[Tensor, Mapping[str, Tensor]], Tensor]
    steps: int = 0  # done in this round
    seen: int = 0  # samples that loss() was called with, and the sum of their losses
    total: float | Tensor = 0.0

    def batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        for x, y in self.samples():
            yield x, y
            self.steps += 1

    def loss(self, outputs: Tensor, y: Tensor) -> Tensor:
        mean = self.mean_loss(outputs, y)
        self.total = self.total + mean.detach().to(widest(mean.device)) * len(y)
        self.seen += len(y)
        return mean


@dataclass(frozen=True)
class Batch:
    """What a client's model made of a batch"""

    x: Tensor
    y: Tensor
    outputs: Tensor
    features: Tensor  # input of the output layer


@dataclass(frozen=True)
class Algorithm:
    """What a client's training differs by from SGD. Its options are fields; a subclass is a frozen dataclass too."""

    name: ClassVar[str] = "sgd"
    batched: ClassVar[bool] = False  # gradient() also works on all clients' tensors, stacked in a first dimension
    equal: ClassVar[bool] = False  # clients count alike, whatever their data size, with methods that know nothing else

    def memory(self, start: Mapping[str, Tensor], parameters: Sequence[str]) -> State:
        """What a client remembers before its first round; parameters are the names of those in the state dict start"""
        return {}

    def shared(self, start: Mapping[str, Tensor], parameters: Sequence[str]) -> State:
        """What the server tells all clients in the first round"""
        return {}

    def loss(self, client: Client, batch: Batch) -> Tensor | None:
        """What is added to the mean loss of a batch"""

    def gradient(self, client: Client, parameters: Mapping[str, Tensor], gradients: State) -> None:
        """Changes the gradients of the loss in place, before weight decay and momentum"""

    def finish(self, client: Client, state: State) -> tuple[State, State]:
        """What the client remembers until its next round, and what it sends besides its trained state dict"""
        return client.memory, {}

    def server(
        self, result: State, before: State, states: list[State], sent: list[State], shared: State, clients: int
    ) -> tuple[State, State]:
        """The new model and what clients are told from now on.

        result   what the method made of the clients' states, from the model `before`
        sent     what the clients sent besides, in the order of the states
        shared   what they were told in this round
        clients  the number of all clients
        """
        return result, shared

    @property
    def corrects(self) -> bool:
        """The server has a part of its own: there must be one global model, and all clients in one process"""
        return type(self).server is not Algorithm.server

    @property
    def remembers(self) -> bool:
        return type(self).finish is not Algorithm.finish

    @property
    def adds_loss(self) -> bool:
        return type(self).loss is not Algorithm.loss


@dataclass(frozen=True)
class SGD(Algorithm):
    batched = True


@dataclass(frozen=True)
class FedProx(Algorithm):
    name = "fedprox"
    batched = True

    mu: float = 0.01

    def __post_init__(self) -> None:
        check_number(self.name, "mu", self.mu, 0, float("inf"))

    def gradient(self, client: Client, parameters: Mapping[str, Tensor], gradients: State) -> None:
        for key, gradient in gradients.items():
            gradient.add_(parameters[key] - client.start[key], alpha=self.mu)


@dataclass(frozen=True)
class FedDyn(Algorithm):
    """memory: h_k; shared: h"""

    name = "feddyn"
    batched = equal = True

    mu: float = 0.01

    def __post_init__(self) -> None:
        check_number(self.name, "mu", self.mu, 0, float("inf"), strict=True)

    def memory(self, start: Mapping[str, Tensor], parameters: Sequence[str]) -> State:
        return {key: torch.zeros_like(start[key]) for key in parameters}

    shared = memory

    def gradient(self, client: Client, parameters: Mapping[str, Tensor], gradients: State) -> None:
        for key, gradient in gradients.items():
            gradient.add_(parameters[key] - client.start[key], alpha=self.mu).sub_(client.memory[key])

    def finish(self, client: Client, state: State) -> tuple[State, State]:
        return {key: h - self.mu * (state[key] - client.start[key]) for key, h in client.memory.items()}, {}

    def server(
        self, result: State, before: State, states: list[State], sent: list[State], shared: State, clients: int
    ) -> tuple[State, State]:
        mean, share = fastagg.fedavg(None, states), len(states) / clients
        h = {key: old - self.mu * share * (mean[key] - before[key]) for key, old in shared.items()}
        return {key: value - h[key] / self.mu if key in h else value for key, value in result.items()}, h


@dataclass(frozen=True)
class Scaffold(Algorithm):
    """memory: c_k; shared: c; sent: the change of c_k"""

    name = "scaffold"
    batched = equal = True

    def memory(self, start: Mapping[str, Tensor], parameters: Sequence[str]) -> State:
        return {key: torch.zeros_like(start[key]) for key in parameters}

    shared = memory

    def gradient(self, client: Client, parameters: Mapping[str, Tensor], gradients: State) -> None:
        for key, gradient in gradients.items():
            gradient.add_(client.shared[key] - client.memory[key])

    def finish(self, client: Client, state: State) -> tuple[State, State]:
        way = client.lr * sum_of_steps(client.steps, client.momentum)
        change = {
            key: (client.start[key] - state[key]) / way - client.shared[key] for key in client.memory
        }  # of c_k: option II
        return {key: c_k + change[key] for key, c_k in client.memory.items()}, change

    def server(
        self, result: State, before: State, states: list[State], sent: list[State], shared: State, clients: int
    ) -> tuple[State, State]:
        change = fastagg.fedavg(None, sent)
        return result, {key: c + len(sent) / clients * change[key] for key, c in shared.items()}


def sum_of_steps(steps: int, momentum: float) -> float:
    """By how much of the learning rate `steps` equal gradients move a model: the steps, if there is no momentum"""
    reach = total = 0.0
    for _ in range(steps):
        reach = 1 + momentum * reach
        total += reach
    return total


@dataclass(frozen=True)
class Moon(Algorithm):
    """memory: the state dict that the client ended its last round with. In its first round that is the global model,
    so that both cosines are the same and nothing is added to the gradient."""

    name = "moon"

    mu: float = 1.0
    temperature: float = 0.5

    def __post_init__(self) -> None:
        check_number(self.name, "mu", self.mu, 0, float("inf"))
        check_number(self.name, "temperature", self.temperature, 0, float("inf"), strict=True)

    def memory(self, start: Mapping[str, Tensor], parameters: Sequence[str]) -> State:
        return dict(start)

    def loss(self, client: Client, batch: Batch) -> Tensor:
        z, states = batch.features.flatten(1), (client.start, client.memory)
        near = [F.cosine_similarity(z, client.features(batch.x, sd).flatten(1).to(z.dtype), dim=1) for sd in states]
        return -self.mu * torch.stack(near, 1).div(self.temperature).log_softmax(1)[:, 0].mean()

    def finish(self, client: Client, state: State) -> tuple[State, State]:
        return state, {}


@dataclass(frozen=True)
class Function(Algorithm):
    """A function of the user's own does all of a client's training. It may return its mean loss."""

    train: Callable[[Client], Any]

    def finish(self, client: Client, state: State) -> tuple[State, State]:
        return client.memory, {}


ALGORITHMS: dict[str, type[Algorithm]] = {cls.name: cls for cls in (SGD, FedProx, FedDyn, Scaffold, Moon)}


def make(algorithm: Any, mu: float | None = None) -> Algorithm:
    """An algorithm by its name, an Algorithm or its class, or a function that trains a client.

    mu is that of the algorithms that have one; None: their own default. An object has its own already.
    """
    if isinstance(algorithm, str):
        check_choice("local training", "algorithm", algorithm, tuple(ALGORITHMS))
        cls = ALGORITHMS[algorithm]
        has_mu = "mu" in (f.name for f in dataclasses.fields(cls))
        return cls(**({"mu": mu} if has_mu and mu is not None else {}))
    if isinstance(algorithm, type) and issubclass(algorithm, Algorithm):
        return algorithm()
    if isinstance(algorithm, Algorithm):
        return algorithm
    if callable(algorithm) and not isinstance(algorithm, type):
        return Function(algorithm)
    raise TypeError(
        f"local training: algorithm={algorithm!r}; expected one of {', '.join(ALGORITHMS)}, an Algorithm or a "
        "function of a Client"
    )
