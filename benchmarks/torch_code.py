"""Aggregation as people write it in PyTorch today: what fastagg is compared with, and checked against."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch

BUFFERS = ("running_mean", "running_var", "num_batches_tracked")


def weighted_sum(client_sds: Sequence[dict], weights: torch.Tensor, keys=None) -> dict:
    """The usual loop: for every key, for every client"""
    out = copy.deepcopy(client_sds[0]) if keys is None else {key: client_sds[0][key].clone() for key in keys}
    for key in out:
        if not out[key].is_floating_point():
            out[key] = torch.stack([sd[key] for sd in client_sds]).amax(0)
            continue
        total = torch.zeros_like(out[key])
        for w, sd in zip(weights, client_sds, strict=True):
            total += w * sd[key]
        out[key] = total
    return out


def fedavg(global_sd: dict, client_sds: Sequence[dict]) -> dict:
    return weighted_sum(client_sds, torch.full((len(client_sds),), 1 / len(client_sds)))


def fedavg_foreach(global_sd: dict, client_sds: Sequence[dict]) -> dict:
    """The best PyTorch has for it"""
    K = len(client_sds)
    keys = [key for key, value in global_sd.items() if value.is_floating_point()]
    total = torch._foreach_mul([client_sds[0][key] for key in keys], 1 / K)
    for sd in client_sds[1:]:
        torch._foreach_add_(total, [sd[key] for key in keys], alpha=1 / K)
    out = dict(zip(keys, total, strict=True))
    rest = (key for key in global_sd if key not in out)
    return out | {key: torch.stack([sd[key] for sd in client_sds]).amax(0) for key in rest}


def _fedawa_weights(global_sd, client_sds, keys, logits) -> tuple[torch.Tensor, torch.Tensor]:
    """One step of FedAWA on some keys: flatten, stack, autograd. Returns weights and the next logits."""
    g = torch.cat([global_sd[key].reshape(-1) for key in keys])
    vectors = torch.empty(len(client_sds), g.numel())  # [K, D], filled in place by a careful author
    for k, sd in enumerate(client_sds):
        torch.cat([sd[key].reshape(-1) for key in keys], out=vectors[k])
    away = 1 - (vectors @ g) / (torch.linalg.vector_norm(vectors, dim=1) * torch.linalg.vector_norm(g))
    vectors -= g
    T = logits.clone().requires_grad_()
    optimizer = torch.optim.Adam([T], lr=1e-3, betas=(0.5, 0.999))
    weights = torch.softmax(T, 0)
    merged = weights @ vectors
    distance = torch.stack([torch.linalg.vector_norm(v - merged) for v in vectors])
    loss = (weights * distance).sum() + (weights * away).sum()
    loss.backward()
    optimizer.step()
    return weights.detach(), T.detach()


def fedawa(global_sd: dict, client_sds: Sequence[dict]) -> tuple[dict, torch.Tensor, torch.Tensor]:
    """(state dict, weights, next logits), as the authors' released method, one step"""
    keys = [key for key in global_sd if not key.endswith(BUFFERS)]
    start = torch.full((len(client_sds),), 1 / len(client_sds))
    weights, logits = _fedawa_weights(global_sd, client_sds, keys, start)
    return weighted_sum(client_sds, weights), weights, logits


def fedawa_layerwise(global_sd: dict, client_sds: Sequence[dict]) -> tuple[dict, torch.Tensor, torch.Tensor]:
    """FedAWA-L: the same in a loop over layers"""
    layers: dict[str, list[str]] = {}
    for key in global_sd:
        layers.setdefault(key.rpartition(".")[0], []).append(key)
    start = torch.full((len(client_sds),), 1 / len(client_sds))
    out, weights, logits = {}, [], []
    for keys in layers.values():
        w, T = _fedawa_weights(global_sd, client_sds, [key for key in keys if not key.endswith(BUFFERS)], start)
        out |= weighted_sum(client_sds, w, keys)
        weights.append(w)
        logits.append(T)
    return {key: out[key] for key in global_sd}, torch.stack(weights), torch.stack(logits)
