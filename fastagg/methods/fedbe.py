"""FedBE (Chen and Chao, ICLR 2021): a Bayesian ensemble of models around the clients', distilled into their mean.

Models are drawn from a distribution fitted to the clients,

    gaussian    w ~ N(mu, diag(sum_k n_k (w_k - mu)^2)),  mu = sum_k n_k w_k
    dirichlet   w = sum_k c_k n_k w_k / sum_k c_k n_k,  c ~ Dirichlet(alpha, ..., alpha)

and predict together with the clients and the mean itself: their probabilities are averaged. The mean is then trained to
predict the same on proxy data, and its parameters are averaged over the later epochs (stochastic weight averaging).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from fastagg.extend import Cohort, Range, Result, Table, kernels, register, tables, wide_dtype
from fastagg.methods.feddf import distilling, mean_output, models_of
from fastagg.methods.on_proxy import CountsRounds, Objective, Student, Trained


@register
class FedBE(Trained, CountsRounds):
    """The mean of the clients, trained to predict on proxy data what an ensemble of models around them predicts.

    model          the nn.Module whose state dicts are aggregated; required, and never modified. Its output must be
                   logits, [N, classes]
    samples        models that are drawn, besides the clients and their mean
    distribution   what they are drawn from: "gaussian", with the clients' mean and variance in every coordinate, or
                   "dirichlet", random weights of the clients
    alpha          of the Dirichlet distribution: small for models near single clients, large for models near the mean
    swa            average the parameters over the second half of the epochs; False: those after the last one
    seed           of what is drawn; every round of an aggregator draws anew
    epochs         passes over the proxy data
    lr             learning rate of Adam (betas 0.5, 0.999)
    progress       show a progress bar (if tqdm is installed); default: only if stderr is a terminal
    proxy          per round: inputs, or (input, target) batches, whose targets are not looked at, in any iterable that
                   can be read again every epoch. What the ensemble predicts on the batches of a list is computed once,
                   otherwise in every epoch

    Drawn models have the clients' mean as their buffers. All models of the ensemble predict in evaluation mode. The
    model trains in training mode: its running statistics, which start at the mean of the clients', follow. Integers are
    the maximum over the clients.

    The result has .weights (the data shares, of the mean that is trained) and .losses (of each epoch, the mean over
    its batches).
    """

    name = "fedbe"
    paper = "Chen and Chao, ICLR 2021"

    samples: Annotated[int, Range(0, 10_000)] = 10
    distribution: Literal["gaussian", "dirichlet"] = "gaussian"
    alpha: Annotated[float, Range(above=0)] = 1.0
    swa: bool = True
    seed: Annotated[int, Range(0, 2**62)] = 0

    def combine(self, cohort: Cohort, **inputs: Any) -> Result:
        result = super().combine(cohort, **inputs)
        cohort.state = cohort.state + 1
        return result

    def objective(self, cohort: Cohort, student: Student, proxy: Iterable) -> Objective:
        mean = {name: student.trained[owner].detach().clone() for name, owner in student.owner.items()}
        ensemble = [*models_of(cohort.table), self.rounded(student, mean)]
        ensemble += self.drawn(cohort, student, mean)
        buffers = {name: value.clone() for name, value in student.buffers.items()}  # the student's own will change
        ensemble = [buffers | tensors for tensors in ensemble]
        return distilling(student, lambda given: mean_output(student, ensemble, given, probabilities), proxy)

    def drawn(self, cohort: Cohort, student: Student, mean: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
        """The sampled models' parameters"""
        rng = np.random.default_rng([self.seed, cohort.state])
        table = cohort.table
        if not self.samples:
            return []
        if self.distribution == "dirichlet":
            c = rng.dirichlet(np.full(cohort.K, float(self.alpha)), self.samples) * cohort.shares  # [M, K]
            # all of it may be on clients without data, or too small a number: the mean then
            total = c.sum(1, keepdims=True)
            c = np.where(total > 0, c / np.where(total > 0, total, 1), cohort.shares)
            used = sorted(student.owner)
            models = tables.build(None, [{key: model[key] for key in used} for model in models_of(table)])
            return [dict(m) for m in kernels.mix_of(models, c[None], kernels.rows(models, False))]
        deviation = self.deviations(table, cohort.shares, mean)
        models = []
        for _ in range(self.samples):
            noise = torch.Generator().manual_seed(int(rng.integers(2**63 - 1)))
            sample = {}
            for name in sorted(set(student.owner.values())):  # tied parameters are one
                z = torch.randn(mean[name].shape, generator=noise, dtype=mean[name].dtype, device="cpu")
                sample[name] = mean[name] + deviation[name] * z.to(student.device)
            models.append(self.rounded(student, {name: sample[owner] for name, owner in student.owner.items()}))
        return models

    def deviations(self, table: Table, n: np.ndarray, mean: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """sqrt(sum_k n_k (w_k - mean)^2) of every parameter"""
        found = {}
        for t, key in enumerate(table.layout.keys):
            if key in mean:
                squares = torch.zeros_like(mean[key])
                for client, share in zip(table.clients, n.tolist(), strict=True):
                    squares += share * (client[t].detach().to(wide_dtype(client[t].dtype)) - mean[key]).square_()
                found[key] = squares.sqrt_()
        return found

    @staticmethod
    def rounded(student: Student, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """In the models' dtypes"""
        return {name: value.to(student.dtypes[name]) for name, value in parameters.items()}

    @torch.no_grad()
    def after_epoch(self, student: Student, epoch: int) -> None:
        first = self.epochs // 2
        if not self.swa or epoch < first:
            return
        for name, value in student.trained.items():
            total = student.total[name] = value + student.total.get(name, 0)
            if epoch == self.epochs - 1:
                value.copy_(total / (self.epochs - first))


def probabilities(logits: Tensor) -> Tensor:
    return F.softmax(logits, 1)
