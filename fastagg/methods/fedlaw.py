"""FedLAW (Li et al., ICML 2023): the clients' weights and a shrinking factor, learned on data the server has.

    gamma, l = argmin L_proxy(gamma sum_k l_k w_k),  gamma > 0,  l_k >= 0,  sum_k l_k = 1                   (Eq. 8, 9)
    l_k = exp(x_k) / sum_j exp(x_j)  or  x_k^2 / sum_j x_j^2,  gamma = exp(y)  or  y^2                      (Eq. 10)

The loss is differentiated through the fused mix: a step reads the clients once forward and once backward, and keeps one
mixed model, never K scaled ones. Where only gamma is learned the clients are read once and not again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR
from torch.optim.swa_utils import SWALR

from fastagg.extend import (
    Cohort,
    InputError,
    Layout,
    Pass,
    Range,
    Result,
    SetBy,
    Table,
    Weights,
    as_tensor,
    kernels,
    register,
    tables,
)
from fastagg.methods.on_proxy import CountsRounds, Loss, LossError, bare, call, check_total, pair, progress_bar

SWA_AFTER = 6  # epochs before the client weights are averaged, as in the authors' code


@register
class FedLAW(CountsRounds):
    """Client weights and a shrinking factor, learned by gradient descent on proxy data of the server.

    model        the nn.Module whose state dicts are aggregated; required, and never modified
    mode         "both"; "gws", adaptive global weight shrinking: gamma only; "law", attentive weights: l only
    base         how weights are computed from the learned variables: "exp" (softmax, exp) or "quad" (squares)
    swa          two stages of half the epochs each: first l, averaged over the epochs of its stage (stochastic weight
                 averaging), then gamma; with mode="law", the first stage only
    epochs       passes over the proxy data
    lr           learning rate of Adam (betas 0.5, 0.999), halved every 20 epochs; the authors use 0.005 except for
                 CIFAR-10
    swa_lr       what the learning rate rises to while l is averaged
    loss         function of (output, target) that returns a scalar tensor; default: cross-entropy
    stop_after   learn in this many rounds, and take the data shares and gamma = 1 from then on (early-stopped LAW,
                 Figure 5); default: never stop
    progress     show a progress bar (if tqdm is installed); default: only if stderr is a terminal
    proxy        per round: (input, target) batches in any iterable that can be read again every epoch (a DataLoader, a
                 list); an iterator is read once and its batches are kept

    Learning starts at gamma = 1 and the data shares. The model runs in training mode, so normalisation layers use the
    statistics of the proxy batch. What they accumulate is discarded: buffers of the result are the mean of the clients'
    buffers with the learned l, and gamma scales only the parameters.

    The result has .weights (l, [K], sum 1), .gamma, .losses (for each epoch, the mean over its batches) and .gram.
    """

    name = "fedlaw"
    paper = "Li et al., ICML 2023"

    mode: Literal["both", "gws", "law"] = "both"
    base: Literal["exp", "quad"] = "exp"
    swa: bool = False
    epochs: Annotated[int, Range(1)] = 100
    lr: Annotated[float, Range(above=0)] = 0.01
    swa_lr: Annotated[float, Range(above=0)] = 0.05
    loss: Annotated[Loss | None, SetBy("loss")] = None
    stop_after: Annotated[int, Range(0)] | None = None

    def check_options(self) -> None:
        super().check_options()
        if self.swa and self.mode == "gws":
            raise ValueError("fedlaw: swa=True averages the clients' weights, which mode='gws' does not learn")
        if self.loss is not None and not callable(self.loss):
            raise ValueError(f"fedlaw: loss={self.loss!r}; expected a function of (output, target)")

    def has_stopped(self, rounds: int) -> bool:
        """Whether it learns no more after this many rounds"""
        return self.stop_after is not None and rounds >= self.stop_after

    def passes(self, layout: Layout, inputs: Mapping[str, Any]) -> tuple[Pass, ...]:
        return (
            ("gram_mix",) if self.has_stopped(self.state) else ("gram_mix", "mix")
        )  # and two in every step on proxy data

    def weigh(self, cohort: Cohort, proxy: Any) -> Weights:
        self.check_round(cohort, proxy)
        rounds, table = cohort.state, cohort.table
        cohort.state = rounds + 1
        if self.has_stopped(rounds):
            return Weights(cohort.shares, with_gram=True, about={"gamma": 1.0, "losses": []})
        with torch.inference_mode(False), torch.enable_grad():
            [start] = cohort.mix(Weights(cohort.shares, with_gram=True), fresh=True)
            # only now: a client that is not finite showed, and an iterator can be read but once
            trainer = Trainer(self, table, start, list(proxy) if isinstance(proxy, Iterator) else proxy)
            try:
                lam, gamma, losses = trainer.train(cohort.shares)
            except LossError as error:
                raise self.blamed(cohort, error) from error
        about = {"gamma": gamma, "losses": losses}
        return Weights(lam, scale=gamma, others=lam, others_for=~trainer.is_param, about=about)


class Trainer:
    """Learns x and y, of which l and gamma are made, with the model's tensors replaced by mixed ones."""

    def __init__(self, options: FedLAW, table: Table, start: Result, proxy: Iterable) -> None:
        self.options, self.proxy, self.device = options, proxy, table.device
        self.criterion = options.loss or nn.functional.cross_entropy
        model = options.model
        assert model is not None
        names = options.parameter_names(table)
        self.is_param = np.array([key in names for key in table.layout.keys], dtype=bool)
        used = np.flatnonzero(self.is_param)
        self.clients = tables.build(None, [{table.layout.keys[t]: client[t] for t in used} for client in table.clients])
        self.module = bare(model).train()
        self.buffers = {
            name: as_tensor(start[name], "start", name) if name in start else value.detach().to(self.device, copy=True)
            for name, value in model.named_buffers(remove_duplicate=False)
        }
        self.losses: list[float] = []

    def train(self, n: np.ndarray) -> tuple[np.ndarray, float, list[float]]:
        """l, gamma and the loss of every epoch"""
        o = self.options
        exp = o.base == "exp"
        device = "cpu" if self.device.type == "mps" else self.device  # Apple's GPUs have no float64
        x = torch.tensor(np.log(np.maximum(n, 1e-300)) if exp else np.sqrt(n), device=device)
        y = torch.tensor(0.0 if exp else 1.0, dtype=torch.float64, device=device)
        self.bar = progress_bar(o.name, o.progress, o.epochs)
        try:
            if not o.swa:
                self.learn(x, y, {"both": (x, y), "gws": (y,), "law": (x,)}[o.mode], o.epochs)
            elif o.mode == "law":
                self.learn(x, y, (x,), o.epochs, swa=True)
            else:
                self.learn(x, y, (x,), o.epochs // 2, swa=True)
                self.learn(x, y, (y,), o.epochs - o.epochs // 2)
        finally:
            if self.bar is not None:
                self.bar.close()
        return client_weights(x, o.base).cpu().numpy(), float(shrinking(y, o.base)), self.losses

    def learn(self, x: Tensor, y: Tensor, learned: tuple[Tensor, ...], epochs: int, swa: bool = False) -> None:
        """One stage: those of x and y that are learned are changed in place."""
        o = self.options
        fixed = not any(v is x for v in learned)
        sources = self.clients
        if fixed:  # the mean of the clients stands in for them
            sources = tables.build(None, [self.mix(sources, client_weights(x, o.base))])
        for v in learned:
            v.requires_grad_()
        optimizer = torch.optim.Adam(learned, lr=o.lr, betas=(0.5, 0.999))
        schedule = SWALR(optimizer, swa_lr=o.swa_lr) if swa else StepLR(optimizer, 20, 0.5)
        first = min(SWA_AFTER, epochs // 2) if swa else 0
        mean = torch.zeros_like(x, requires_grad=False)
        for epoch in range(epochs):
            total, count = 0.0, 0
            for batch in self.proxy:
                gamma = shrinking(y, o.base)
                weights = gamma[None] if fixed else gamma * client_weights(x, o.base)
                loss = self.loss_of(self.mix(sources, weights), batch)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                total, count = total + loss.item(), count + 1
                check_total(o.name, total, loss, count - 1, epoch)
            if not count:
                raise InputError(f"proxy: it gave no batch in epoch {epoch}")
            self.losses.append(total / count)
            if swa and epoch >= first:
                mean += (x.detach() - mean) / (epoch - first + 1)
            if epoch >= first:
                schedule.step()
            if self.bar is not None:
                self.bar.set_postfix(loss=self.losses[-1])
                self.bar.update()
        for v in learned:
            v.requires_grad_(False)
        if swa and epochs:
            x.copy_(mean)

    def mix(self, sources: Table, weights: Tensor) -> dict[str, Tensor]:
        return dict(zip(sources.layout.keys, FusedMix.apply(weights, sources), strict=True))

    def loss_of(self, parameters: dict[str, Tensor], batch: Any) -> Tensor:
        given, target = (v.to(self.device) if isinstance(v, Tensor) else v for v in pair(batch))
        output = call(self.module, parameters | self.buffers, given)  # buffers are updated in place
        return self.options.check_loss(self.criterion(output, target))


class FusedMix(torch.autograd.Function):
    """sum_k weights_k w_k of a table's models, differentiable in the weights, [K].

    What torch.ops.fastagg.mix does, on a table that was checked once: the operator looks at all K T tensors in every
    call. For 20 clients of 82 tensors (277,250 parameters) forward and backward take 7 ms, and 17 ms through the
    operator; the kernels' part of that is 3.5 ms.
    """

    @staticmethod
    def forward(ctx, weights: Tensor, table: Table) -> tuple[Tensor, ...]:
        ctx.table, ctx.device = table, weights.device
        [mixed] = kernels.mix_of(table, weights[None, None], kernels.rows(table, False))
        return tuple(mixed.values())

    @staticmethod
    def backward(ctx, *grads: Tensor) -> tuple[Tensor, None]:
        table = ctx.table
        left = [g.to(w.dtype).contiguous() for g, w in zip(grads, table.clients[0], strict=True)]
        return kernels.dots_of(table, left).to(ctx.device), None


def client_weights(x: Tensor, base: str) -> Tensor:
    return torch.softmax(x, 0) if base == "exp" else x * x / (x * x).sum()


def shrinking(y: Tensor, base: str) -> Tensor:
    return y.exp() if base == "exp" else y * y
