"""A step of SGD with momentum, of one client's parameters or of all clients' stacked ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import (  # those with an underscore are missing from what its stubs export
    Tensor,
    _fused_sgd_,  # pyright: ignore[reportPrivateImportUsage]
)

from fastagg.sim.local import Algorithm, Client

if TYPE_CHECKING:
    from fastagg.sim.train import Local


@torch.no_grad()
def step(
    client: Client, algorithm: Algorithm, parameters: Mapping[str, Tensor], gradients: dict[str, Tensor],
    momentum: Mapping[str, Tensor], local: Local,
) -> None:  # fmt: skip
    """In place. torch's fused step reads and writes every number once; it takes tensors as they lie in memory, so
    those of one parameter must lie alike."""
    algorithm.gradient(client, parameters, gradients)
    weights, buffers = list(parameters.values()), list(momentum.values()) if local.momentum else []
    grads = [
        g if g.stride() == w.stride() else torch.empty_like(w).copy_(g)
        for g, w in zip(gradients.values(), weights, strict=True)
    ]
    _fused_sgd_(
        weights, grads, buffers, weight_decay=local.weight_decay, momentum=local.momentum, lr=client.lr, dampening=0.0,
        nesterov=False, maximize=False, is_first_step=False,
    )  # fmt: skip
