"""Made-up adapters as PEFT names their tensors, and what they mean: the dense update, in float64."""

from __future__ import annotations

import torch

SHAPES = {"layers.0.q_proj": (60, 40), "layers.0.v_proj": (24, 40), "layers.1.q_proj": (60, 40)}  # out, in
PREFIX = "base_model.model."


def adapter(rank=4, shapes=SHAPES, dtype=torch.float32, *, seed=0, start=None, scale=1.0, plain=(), modules=None):
    """start + scale * random, of this rank"""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for module, (out, into) in shapes.items():
        ranks = rank[module] if isinstance(rank, dict) else rank
        A = scale * torch.randn(ranks, into, generator=generator, dtype=torch.float64)
        B = scale * torch.randn(out, ranks, generator=generator, dtype=torch.float64)
        if modules is None or module in modules:
            found[f"{PREFIX}{module}.lora_A.weight"] = A
            found[f"{PREFIX}{module}.lora_B.weight"] = B
    for key in plain:
        found[PREFIX + key] = scale * torch.randn(5, 7, generator=generator, dtype=torch.float64)
    if start is not None:
        found = {key: start[key].double() + value for key, value in found.items()}
    return {key: value.to(dtype) for key, value in found.items()}


def cohort(K=5, rank=4, dtype=torch.float32, *, scale=0.1, seed=0, **more):
    """A global adapter, and K that have trained it"""
    g = adapter(rank, dtype=dtype, seed=seed, **more)
    shared = adapter(rank, dtype=torch.float64, seed=seed + 99, scale=scale, **more)
    start = {key: g[key].double() + shared[key] for key in g}
    return g, [adapter(rank, dtype=dtype, seed=seed + 1 + k, start=start, scale=scale, **more) for k in range(K)]


def dense(sd, scaling=1.0):
    """scaling * B A of each module, and the plain tensors: float64, by name"""
    found = {}
    for key, value in sd.items():
        if ".lora_A" in key:
            module, _, end = key.rpartition(".lora_A")
            B = sd[f"{module}.lora_B{end}"].double()
            s = scaling[module] if isinstance(scaling, dict) else scaling
            found[module] = s * torch.tensordot(B.flatten(1), value.double(), 1)
        elif ".lora_B" not in key:
            found[key] = value.double()
    return found


def flat(found):
    return torch.cat([value.reshape(-1) for _, value in sorted(found.items())])


def dense_gram(g, clients, scaling=1.0):
    """Of the dense updates, stacked: [K+1, K+1]"""
    center = flat(dense(g, scaling))
    rows = torch.stack([center, *(flat(dense(sd, scaling)) - center for sd in clients)])
    return rows @ rows.T


def relative(found, expected):
    """The largest error of a Gram's entry, relative to the lengths of its two rows"""
    lengths = expected.diagonal().clamp(min=0).sqrt()
    lengths = torch.where(lengths == 0, 1.0, lengths)
    return float(((found - expected).abs() / (lengths[:, None] * lengths)).max())


def mixed(clients, weights, scaling=1.0):
    """sum_k weights_k of the dense updates, by module"""
    each = [dense(sd, scaling) for sd in clients]
    return {m: sum(w * sd[m] for w, sd in zip(weights, each, strict=True)) for m in each[0]}
