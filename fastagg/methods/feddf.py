"""FedDF (Lin et al., NeurIPS 2020): the clients' predictions on unlabelled data are distilled into their mean.

minimise KL( softmax(1/K sum_k f(x; w_k)) || softmax(f(x; w)) )  over proxy inputs x, from w = sum_k n_k w_k
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler

from fastagg.extend import Cohort, InputError, Table, register, wide_dtype
from fastagg.methods.on_proxy import Objective, Student, Trained, inputs_of

Ensemble = Callable[[Any], Tensor]  # input -> probabilities of the classes, [N, C]


@register
class FedDF(Trained):
    """The mean of the clients, trained to predict on proxy data what the clients predict together.

    model      the nn.Module whose state dicts are aggregated; required, and never modified. Its output must be logits,
               [N, classes]
    epochs     passes over the proxy data
    lr         learning rate of Adam (betas 0.5, 0.999), which falls to 0 along a cosine
    progress   show a progress bar (if tqdm is installed); default: only if stderr is a terminal
    proxy      per round: inputs, or (input, target) batches, whose targets are not looked at, in any iterable that can
               be read again every epoch. What the clients predict on the batches of a list is computed once, otherwise
               in every epoch

    Clients predict in evaluation mode, each counts alike, and logits are averaged. The model trains in training mode:
    its running statistics, which start at the mean of the clients', follow. Integers are the maximum over the clients.

    The result has .weights (the data shares, of the mean that is trained) and .losses (of each epoch, the mean over
    its batches).
    """

    name = "feddf"
    paper = "Lin et al., NeurIPS 2020"

    def objective(self, cohort: Cohort, student: Student, proxy: Iterable) -> Objective:
        models = models_of(cohort.table)
        return distilling(student, lambda given: F.softmax(mean_output(student, models, given), 1), proxy)

    def schedule(self, optimizer: torch.optim.Optimizer) -> LRScheduler:
        return CosineAnnealingLR(optimizer, self.epochs)


def models_of(table: Table) -> list[dict[str, Tensor]]:
    """The clients' own tensors, by key"""
    return [dict(zip(table.layout.keys, (t.detach() for t in client), strict=True)) for client in table.clients]


def mean_output(
    student: Student, models: Sequence[Mapping[str, Tensor]], given: Any, read: Callable[[Tensor], Tensor] | None = None
) -> Tensor:
    """The mean of the models' outputs, or of what is read off them, in float32 or wider"""
    total = None
    for tensors in models:
        output = student.output_of(tensors, given)
        if not isinstance(output, Tensor) or output.dim() < 2 or output.shape[1] < 2:
            form = f"has shape {tuple(output.shape)}" if isinstance(output, Tensor) else f"is a {type(output).__name__}"
            raise InputError(f"the model's output {form}; expected logits of two classes or more, [N, classes]")
        output = output.to(wide_dtype(output.dtype))
        said = output if read is None else read(output)
        total = said if total is None else total + said
    assert total is not None
    return total / len(models)


def distilling(student: Student, ensemble: Ensemble, proxy: Iterable) -> Objective:
    """The mean divergence of the student's predictions from the ensemble's, which is asked once about a list"""
    fixed = isinstance(proxy, Sequence)
    known: dict[int, Tensor] = {}

    def loss(number: int, batch: Any) -> Tensor:
        given = inputs_of(batch)
        said = known.get(number)
        if said is None:
            said = ensemble(given)
            if fixed:
                known[number] = said
        output = student(given)
        output = output.to(wide_dtype(output.dtype))
        return F.kl_div(F.log_softmax(output, 1), said.to(output.dtype), reduction="batchmean")

    return loss
