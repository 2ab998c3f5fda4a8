"""All clients of a round as one computation (torch.func): every tensor has the clients as its first dimension."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap

from fastagg.sim.devices import widest
from fastagg.sim.local import Algorithm, Client
from fastagg.sim.outcomes import Measure, autocast
from fastagg.sim.steps import step

if TYPE_CHECKING:
    from fastagg.sim.train import Local

FEW = 4  # clients: when fewer are left they finish one by one; a batched step costs as much as three or four of those


class Together:
    """Steps of several clients with one network. The loss must have a value per sample."""

    def __init__(
        self, module: nn.Module, names: Sequence[str], loss: Measure, algorithm: Algorithm, local: Local,
        head: str | None,
    ) -> None:  # fmt: skip
        self._module, self._names, self._each, self._head = module, names, loss, head
        self._algorithm, self._local, self._device = algorithm, local, torch.device(local.device)
        self._gradient = vmap(grad_and_value(self._loss, has_aux=True))

    def works(self, x: Tensor, y: Tensor) -> bool:
        """Whether torch.func can do with this model and loss: not where models draw random numbers, nor where it warns
        that it does an operation one client after the other (nn.EmbeddingBag)"""
        params = {name: value.detach()[None] for name, value in self._module.named_parameters()}
        xs, ys = (t[None, :1].to(self._device) for t in (x, y))
        try:
            part = torch.ones(1, 1, device=self._device)
            shares = torch.ones(1, len(params[self._head]) if self._head in params else 0, device=self._device)
            with warnings.catch_warnings():
                warnings.filterwarnings("error", "There is a performance drop")
                self._gradient(params, xs, ys, part, shares)
        except (RuntimeError, ValueError, TypeError, IndexError, UserWarning):
            return False
        return True

    def steps(
        self, clients: Sequence[Client], plans: Sequence[Sequence[Tensor]], momenta: Sequence[dict[str, Tensor]],
        shares: Tensor, x: Tensor, y: Tensor,
    ) -> tuple[list[dict[str, Tensor]], list[dict[str, Tensor]], int]:  # fmt: skip
        """Parameters and momentum of each client after so many steps, or after its own if it has fewer.

        Clients with most steps come first; the rest of those is left to do when less than FEW are at work.
        """
        stacked = lambda states: {key: torch.stack([sd[key] for sd in states]) for key in states[0]}  # noqa: E731
        start, memory = stacked([c.start for c in clients]), stacked([c.memory for c in clients])
        params, momentum = {key: value.clone() for key, value in start.items()}, stacked(momenta)
        total = torch.zeros(len(clients), dtype=widest(self._device), device=self._device)
        together = len(plans[FEW - 1]) if len(plans) >= FEW else 0
        for t in range(together):
            batches = [plan[t] for plan in plans if len(plan) > t]
            K = len(batches)
            at_work = lambda tensors, K=K: {key: value[:K] for key, value in tensors.items()}  # noqa: E731
            indices, part = pad(batches)
            part = part.to(self._device, next(iter(params.values())).dtype)
            now = at_work(params)
            gradients, (_, loss) = self._gradient(now, x[indices], y[indices], part, shares[:K].to(part))
            total[:K] += loss.to(total) * torch.tensor([len(batch) for batch in batches]).to(total)
            all_of_them = replace(clients[0], start=at_work(start), memory=at_work(memory))
            step(all_of_them, self._algorithm, now, gradients, at_work(momentum), self._local)
        for client, plan, summed in zip(clients, plans, total.tolist(), strict=True):
            client.steps = min(together, len(plan))
            client.seen, client.total = sum(len(batch) for batch in plan[:together]), summed
        rows = range(len(clients))
        states, buffers = ([{k: v[i] for k, v in tensors.items()} for i in rows] for tensors in (params, momentum))
        return states, buffers, together

    def _loss(
        self, params: dict[str, Tensor], x: Tensor, y: Tensor, part: Tensor, shares: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Of one client, under vmap: what is minimised, and the loss alone"""
        with autocast(self._device, self._local.precision):
            outputs = functional_call(self._module, params, (x,))
        if self._local.precision != "float32":
            outputs = outputs.float()
        each = self._each(outputs, y)
        if each.dim() == 0 or len(each) != len(y):
            raise ValueError("batched=True needs a loss that returns a value per sample, and this one does not")
        loss = part @ (each if each.dim() == 1 else each.flatten(1).mean(1))
        if not self._local.wdr:
            return loss, loss
        assert self._head is not None
        return loss + self._local.wdr * penalty(params[self._head], shares), loss


def pad(batches: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Batches as one array, and each entry's part in its batch's mean.

    Short batches repeat their first sample, with no part in the mean: a sample of the batch adds no NaN of its own.
    """
    sizes = torch.tensor([[len(batch)] for batch in batches])
    longest = int(sizes.max())
    indices = torch.stack([torch.cat([batch, batch[:1].expand(longest - len(batch))]) for batch in batches])
    return indices, (torch.arange(longest) < sizes) / sizes.double()


def penalty(head: Tensor, shares: Tensor) -> Tensor:
    """fastagg.wdr_penalty for vmap: shares are a tensor that sums to 1, and nothing is checked"""
    norms = torch.linalg.vector_norm(head.flatten(1), dim=1)  # [C]
    total = norms.sum()
    return torch.linalg.vector_norm(shares - norms / torch.where(total > 0, total, 1))
