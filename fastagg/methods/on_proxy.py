"""What methods share that try models out on data of the server: FedLAW, Server-FT, FedDF, FedBE.

The last three train a student, which starts as the mean of the clients. Its parameters are kept in float32 or wider and
rounded to the models' dtype when the model runs, and at the end.
"""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import field
from itertools import chain
from typing import Annotated, Any

import torch
from torch import Tensor, nn

from fastagg.extend import (
    FLOATING,
    Cohort,
    ExampleNet,
    ExampleRound,
    GlobalAggregator,
    InputError,
    Layout,
    Pass,
    Range,
    Result,
    RoundInput,
    SetBy,
    Table,
    Weights,
    as_tensor,
    describe,
    example_inputs,
    nonfinite,
    wide_dtype,
)

Loss = Callable[[Any, Any], Tensor]
Objective = Callable[[int, Any], Tensor]  # (number of the batch, batch) -> a scalar
PROXY = RoundInput(
    "proxy", "proxy data, an iterable of (input, target) batches", required=True, per_client=False, from_clients=False,
    kind="proxy",
)  # fmt: skip


class LossError(InputError):
    """The loss on the proxy data is not finite"""


class OnProxy(GlobalAggregator):
    """A method that runs the model on proxy data of the server"""

    reads = "models"
    round_inputs = (PROXY,)

    model: Annotated[nn.Module | None, SetBy("module")] = None
    progress: Annotated[bool | None, SetBy("progress")] = None

    def check_options(self) -> None:
        if self.model is not None and not isinstance(self.model, nn.Module):
            raise ValueError(f"{self.name}: model is a {type(self.model).__name__}, expected an nn.Module")

    def why_not_on_files(self) -> str:
        return "it learns on proxy data with the model itself: it cannot work on files alone"

    def why_not_over_group(self, inputs: Mapping[str, Any] | None) -> str:
        return "it trains whole models, and takes no group"

    @classmethod
    def example_round(cls, K: int) -> ExampleRound:
        torch_state = torch.random.get_rng_state()
        model = ExampleNet()
        torch.random.set_rng_state(torch_state)
        return ExampleRound({"model": model, "epochs": 3, "progress": False}, example_inputs(cls.round_inputs, K))

    def check_round(self, cohort: Cohort, proxy: Any) -> nn.Module:
        """The model, once all is there that a round needs; said now, and not after all epochs"""
        if self.model is None:
            raise ValueError(f"{self.name}: no model; the loss on proxy data needs the nn.Module, pass model=")
        if isinstance(proxy, Tensor) or not (hasattr(proxy, "__iter__") or hasattr(proxy, "__getitem__")):
            raise InputError(f"proxy is a {type(proxy).__name__}, expected an iterable of (input, target) batches")
        cohort.check_out()
        return self.model

    def blamed(self, cohort: Cohort, error: LossError) -> InputError:
        """The error, put down to clients that are far from all others, if any are"""
        odd = nonfinite.dominant(cohort.gram().norms().cpu().numpy())
        return nonfinite.too_large(cohort.table, odd, str(error))

    def parameter_names(self, table: Table) -> set[str]:
        """Keys of the model's parameters, once it is certain that the table is of it. Tied ones: all their names."""
        model = self.model
        assert model is not None
        expected = {key: tuple(value.shape) for key, value in model.state_dict().items() if isinstance(value, Tensor)}
        found = dict(zip(table.layout.keys, table.layout.shapes, strict=True))
        for key in sorted(expected.keys() ^ found.keys()):
            raise InputError(f"{self.name}: key {key!r} is in {'model' if key in expected else 'the clients'} only")
        for key, shape in expected.items():
            if found[key] != shape:
                raise InputError(f"{self.name}: key {key!r} has shape {shape} in model, {found[key]} in the clients")
        names = {name for name, p in model.named_parameters(remove_duplicate=False) if p.dtype in FLOATING}
        if not names:
            raise InputError(f"{self.name}: model has no parameters")
        return names

    def check_loss(self, loss: Any) -> Tensor:
        """What is minimised: a scalar that depends on the parameters"""
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            found = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise InputError(f"{self.name}: loss gave a {found}, expected a scalar tensor")
        if not loss.requires_grad:
            raise InputError(f"{self.name}: the loss does not depend on the model's parameters")
        return loss


class CountsRounds(OnProxy):
    """One that remembers how many rounds there were"""

    state: int = field(init=False, default=0, repr=False)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "rounds": self.state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.check_state(state, ("rounds",))
        rounds = state["rounds"]
        if not isinstance(rounds, int) or isinstance(rounds, bool) or not 0 <= rounds < 2**53:
            raise InputError(f"{self.name} state: rounds={rounds!r}; expected an integer >= 0")
        super().load_state_dict(state)
        self.state = rounds


class Trained(OnProxy):
    """The mean of the clients, trained further. A method says by what loss."""

    epochs: Annotated[int, Range(1)] = 100
    lr: Annotated[float, Range(above=0)] = 1e-3

    def passes(self, layout: Layout, inputs: Mapping[str, Any]) -> tuple[Pass, ...]:
        return ("mix",)  # and what the clients' models are tried out for

    def combine(self, cohort: Cohort, **inputs: Any) -> Result:
        proxy = inputs["proxy"]
        model = self.check_round(cohort, proxy)
        names = self.parameter_names(cohort.table)
        weights = Weights(cohort.shares)
        [result] = cohort.mix(weights)
        # only now: a client that is not finite showed, and an iterator can be read but once
        proxy = list(proxy) if isinstance(proxy, Iterator) else proxy
        with torch.inference_mode(False), torch.enable_grad():
            student = Student(model, names, cohort.table, result)
            try:
                losses = self.train(student, self.objective(cohort, student, proxy), proxy)
                student.check(self.name)
            except LossError as error:
                raise self.blamed(cohort, error) from error
        student.write(result)
        weights.about["losses"] = losses
        return describe(result, cohort, weights)

    def objective(self, cohort: Cohort, student: Student, proxy: Iterable) -> Objective:
        """What the student minimises"""
        raise NotImplementedError

    def schedule(self, optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler | None:
        """What changes the learning rate after every epoch"""
        return None

    def after_epoch(self, student: Student, epoch: int) -> None:
        pass

    def train(self, student: Student, objective: Objective, proxy: Iterable) -> list[float]:
        """The mean loss of every epoch. Adam as in FedLAW's experiments with these methods."""
        optimizer = torch.optim.Adam(student.trained.values(), lr=self.lr, betas=(0.5, 0.999))
        schedule, losses = self.schedule(optimizer), []
        bar = progress_bar(self.name, self.progress, self.epochs)
        try:
            for epoch in range(self.epochs):
                total, count = 0.0, 0
                for number, batch in enumerate(proxy):
                    loss = self.check_loss(objective(number, batch))
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
                    total, count = total + loss.item(), count + 1
                    check_total(self.name, total, loss, number, epoch)
                if not count:
                    raise InputError(f"proxy: it gave no batch in epoch {epoch}")
                losses.append(total / count)
                if schedule is not None:
                    schedule.step()
                self.after_epoch(student, epoch)
                if bar is not None:
                    bar.set_postfix(loss=losses[-1])
                    bar.update()
        finally:
            if bar is not None:
                bar.close()
        return losses


class Student:
    """A copy of the model with tensors of its own: those of a state dict to start with"""

    def __init__(self, model: nn.Module, names: set[str], table: Table, start: Mapping[str, Any]) -> None:
        self.device = table.device
        self.dtypes = dict(zip(table.layout.keys, table.layout.dtypes, strict=True))
        first: dict[int, str] = {}  # of tied parameters, one is trained
        self.owner = {
            name: first.setdefault(id(p), name)
            for name, p in model.named_parameters(remove_duplicate=False) if name in names
        }  # fmt: skip
        self.trained = {}
        for name in first.values():
            value = as_tensor(start[name], "start", name).detach()
            self.trained[name] = value.to(wide_dtype(value.dtype), copy=True).requires_grad_()
        self.buffers = {
            name: as_tensor(start[name], "start", name).detach().clone()
            if name in start else value.detach().to(self.device, copy=True)
            for name, value in model.named_buffers(remove_duplicate=False)
        }  # fmt: skip
        self.total: dict[str, Tensor] = {}  # of its parameters over epochs, where they are averaged
        self.module = bare(model).train()
        self.teacher = bare(model).eval()

    def __call__(self, given: Any) -> Any:
        """The student's output, in training mode: its buffers follow"""
        parameters = {name: self.trained[owner].to(self.dtypes[name]) for name, owner in self.owner.items()}
        return call(self.module, parameters | self.buffers, self.on_device(given))

    @torch.no_grad()
    def output_of(self, tensors: Mapping[str, Tensor], given: Any) -> Any:
        """What the model says with these tensors, in evaluation mode; buffers that are missing are the student's"""
        return call(self.teacher, self.buffers | dict(tensors), self.on_device(given))

    def on_device(self, value: Any) -> Any:
        return value.to(self.device) if isinstance(value, Tensor) else value

    def check(self, method: str) -> None:
        for name, value in self.trained.items():
            if not value.detach().to(self.dtypes[name]).isfinite().all():
                raise LossError(f"{method}: key {name!r} is not finite after training on the proxy data")

    @torch.no_grad()
    def write(self, result: Result) -> None:
        """Into the tensors of a result, in place; integers stay those of the clients"""
        new = {name: self.trained[owner].detach() for name, owner in self.owner.items()} | self.buffers
        for key in result.keys() & new.keys():
            if self.dtypes[key] in FLOATING:
                as_tensor(result[key], "the result", key).copy_(new[key])


def bare(model: nn.Module) -> nn.Module:
    """A copy that shares its tensors, which every call replaces: it owns no more than the training flags"""
    return copy.deepcopy(model, {id(t): t for t in chain(model.parameters(), model.buffers())})


def call(module: nn.Module, tensors: Mapping[str, Tensor], given: Any) -> Any:
    return torch.func.functional_call(module, dict(tensors), (given,), tie_weights=False)


def pair(batch: Any) -> tuple[Any, Any]:
    """The input and the target of a batch"""
    if not isinstance(batch, Sequence) or len(batch) != 2:
        raise InputError(f"proxy: a batch is a {type(batch).__name__}, expected a pair (input, target)")
    return batch[0], batch[1]


def inputs_of(batch: Any) -> Any:
    """The input of a batch, with a target or without"""
    if isinstance(batch, Sequence) and len(batch) in (1, 2):
        return batch[0]
    if not isinstance(batch, Tensor):
        raise InputError(f"proxy: a batch is a {type(batch).__name__}, expected an input, or a pair (input, target)")
    return batch


def check_total(method: str, total: float, loss: Tensor, number: int, epoch: int) -> None:
    if not math.isfinite(total):
        raise LossError(f"{method}: the loss on proxy batch {number} is {loss.item()} in epoch {epoch}")


def progress_bar(method: str, wanted: bool | None, epochs: int) -> Any:
    """tqdm's, or None when it is not wanted or not installed"""
    if wanted is None:
        wanted = sys.stderr is not None and sys.stderr.isatty()
    if not wanted:
        return None
    try:
        from tqdm import tqdm
    except ImportError:
        return None
    return tqdm(total=epochs, desc=method, unit="epoch")
