"""Tiny models, clients and proxy data, for methods that learn on samples of the server."""

from __future__ import annotations

import copy

import torch
from torch import nn

D, H, C = 5, 7, 3
SIZES = [1, 2, 3, 4]
N = torch.tensor(SIZES, dtype=torch.float64) / 10


def mlp(dtype=torch.float64):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(D, H), nn.Tanh(), nn.Linear(H, C)).to(dtype)


def normed():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(D, H), nn.BatchNorm1d(H), nn.ReLU(), nn.Linear(H, C)).double()


def cohort_of(model, K=4, scale=0.3, seed=1):
    """(global_sd, client_sds)"""
    generator = torch.Generator().manual_seed(seed)
    clients = []
    for k in range(K):
        sd = copy.deepcopy(model.state_dict())
        for key, value in sd.items():
            if not value.is_floating_point():
                value.fill_(k + 3)
            elif "running_var" in key:
                value.fill_(k + 1)
            else:
                value += scale * torch.randn(value.shape, generator=generator, dtype=torch.float64).to(value.dtype)
        clients.append(sd)
    return copy.deepcopy(model.state_dict()), clients


def proxy_of(dtype=torch.float64, batches=2, size=12, seed=2):
    generator = torch.Generator().manual_seed(seed)
    return [
        (
            torch.randn(size, D, generator=generator, dtype=torch.float64).to(dtype),
            torch.randint(0, C, (size,), generator=generator),
        )
        for _ in range(batches)
    ]
