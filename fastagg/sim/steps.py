"""A step of SGD with momentum, of one client's parameters or of all clients' stacked ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import (  # those with an underscore are missing from what its stubs export
    Tensor,
    _foreach_add_,  # pyright: ignore[reportPrivateImportUsage]
    _foreach_mul_,  # pyright: ignore[reportPrivateImportUsage]
)

from fastagg.sim.local import Algorithm, Client

if TYPE_CHECKING:
    from fastagg.sim.train import Local


@torch.no_grad()
def step(
    client: Client, algorithm: Algorithm, parameters: dict[str, Tensor], gradients: dict[str, Tensor],
    momentum: dict[str, Tensor], local: Local,
) -> None:  # fmt: skip
    """In place; torch._foreach_ loops over the tensors in C++, torch.optim's step in Python"""
    algorithm.gradient(client, parameters, gradients)
    weights, grads, buffers = list(parameters.values()), list(gradients.values()), list(momentum.values())
    if local.weight_decay:
        _foreach_add_(grads, weights, alpha=local.weight_decay)
    _foreach_mul_(buffers, local.momentum)
    _foreach_add_(buffers, grads)
    _foreach_add_(weights, buffers, alpha=-client.lr)
