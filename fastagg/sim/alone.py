"""One client at a time: steps of a network of its own, by autograd."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fastagg import wdr_penalty
from fastagg.sim.local import Algorithm, Batch, Client
from fastagg.sim.outcomes import autocast, copied, evaluating
from fastagg.sim.steps import step

if TYPE_CHECKING:
    from fastagg.sim.train import Local


class Alone:
    """A copy of the model for one client at a time, which keeps the features that its output layer got last"""

    def __init__(self, model: nn.Module, algorithm: Algorithm, local: Local, head: str | None, images: bool) -> None:
        self._algorithm, self._local, self._head, self._device = algorithm, local, head, torch.device(local.device)
        self.module = copied(model, self._device, images).train()
        self._seen: Tensor | None = None
        if algorithm.adds_loss and head is not None:
            self.module.get_submodule(head.rpartition(".")[0]).register_forward_pre_hook(self._keep)

    def _keep(self, layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        self._seen = inputs[0]

    def features(self, x: Tensor, state: Mapping[str, Tensor]) -> Tensor:
        before = self._seen
        with evaluating(self.module):
            functional_call(self.module, dict(state), (x,), strict=True)
        found, self._seen = self._seen, before
        assert found is not None
        return found

    def run(self, client: Client, momentum: dict[str, Tensor], class_dist: Any) -> None:
        """Steps of the module from the weights and momentum that it has"""
        local, algorithm, module = self._local, self._algorithm, self.module
        params = {name: value for name, value in module.named_parameters() if value.requires_grad}
        weights: list[Tensor] = list(params.values())
        for x, y in client.batches():
            with autocast(self._device, local.precision):
                outputs = module(x)
            if local.precision != "float32":
                outputs = outputs.float()
            loss = client.loss(outputs, y)
            if algorithm.adds_loss:
                assert self._seen is not None
                more = algorithm.loss(client, Batch(x, y, outputs, self._seen))
                loss = loss if more is None else loss + more
            if local.wdr:
                assert self._head is not None
                loss = loss + local.wdr * wdr_penalty(params[self._head], class_dist)
            gradients = torch.autograd.grad(loss, weights, allow_unused=True, materialize_grads=True)
            step(client, algorithm, params, dict(zip(params, gradients, strict=True)), momentum, local)


def call(train: Callable[[Client], Any], client: Client) -> None:
    """A user's own training"""
    model = client.model
    returned = train(client)
    if client.model is not model:
        raise ValueError("local training: client.model is another module now; train the one that is there")
    if isinstance(returned, int | float | Tensor):
        client.total, client.seen = float(returned), 1
    elif not client.seen:
        raise ValueError(
            "local training: the function neither called client.loss(outputs, y) nor returned its mean loss"
        )
    if not isinstance(client.memory, dict) or not all(isinstance(v, Tensor) for v in client.memory.values()):
        raise ValueError("local training: client.memory must be a dict of tensors, by name")


def lying_as(like: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies, in memory as the tensors of the same names in `like`"""
    return {name: torch.empty_like(like[name], requires_grad=False).copy_(v) for name, v in tensors.items()}


def usual_copy(value: Tensor) -> Tensor:
    return value.detach().clone(memory_format=torch.contiguous_format)
