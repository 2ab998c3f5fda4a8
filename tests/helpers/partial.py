"""Clients that hold only some of the tensors, as docs/partial.md defines their aggregation: in float64, tensor by
tensor, from the definition alone."""

from __future__ import annotations

import math

import torch

from helpers.every_method import cohort


def parts_of(clients, seed=0, keep=0.6):
    """Clients with about this part of their tensors, at least one parameter each"""
    generator = torch.Generator().manual_seed(seed)
    keys = list(clients[0])
    has = torch.rand(len(clients), len(keys), generator=generator) < keep
    for k in range(len(clients)):
        has[k, k % 5] = True
    return [
        {key: sd[key] for key, at in zip(keys, some, strict=True) if at} for sd, some in zip(clients, has, strict=True)
    ]


def partial_cohort(K=7, seed=0, scale=0.3, dtype=torch.float64):
    """Updates of about the length of the global model, so that nothing hides behind it"""
    g, clients = cohort(K, seed=seed, scale=scale)
    g, *clients = ({key: x.to(dtype) if x.is_floating_point() else x for key, x in sd.items()} for sd in (g, *clients))
    return g, parts_of(clients, seed)


def is_parameter(key):
    return "running" not in key and "num_batches" not in key


def gram(g, clients, keys=None):
    """Of these tensors: [K+1, K+1], the rows being those of g and the updates"""
    keys = [key for key in keys or g if is_parameter(key)]
    rows = [{key: g[key].double() for key in keys}]
    rows += [{key: sd[key].double() - g[key].double() for key in keys if key in sd} for sd in clients]
    size = {key: g[key].numel() for key in keys}
    lengths, cosines = [], torch.zeros(len(rows), len(rows), dtype=torch.float64)
    for row in rows:
        own = sum(size[key] for key in row)
        lengths.append(_length(row, row) * math.sqrt(sum(size.values()) / own) if own else 0.0)
    for i, a in enumerate(rows):
        for j, b in enumerate(rows):
            dot = sum(float((a[key] * b[key]).sum()) for key in a.keys() & b.keys())
            long = _length(a, b) * _length(b, a)
            cosines[i, j] = dot / long if long else 0.0
    values, vectors = torch.linalg.eigh(cosines)
    if values.min() < -1e-10:
        cosines = vectors @ values.clamp(min=0).diag() @ vectors.T
        stretch = cosines.diagonal().clamp(min=1e-300).rsqrt()  # rows of zeros stay zero: their lengths are
        cosines = cosines * stretch.outer(stretch)
    lengths = torch.tensor(lengths, dtype=torch.float64)
    products = cosines * lengths.outer(lengths)
    known = [k for k, row in enumerate(rows) if row and k]
    means = torch.eye(len(rows), dtype=torch.float64)
    for k in range(1, len(rows)):
        if known and k not in known:
            means[k] = sum(means[j] for j in known) / len(known)
    return means @ products @ means.T


def _length(row, other):
    """Of a row, over the tensors that another has as well"""
    return math.sqrt(sum(float((row[key] ** 2).sum()) for key in row.keys() & other.keys()))


def models_with(products):
    """A tensor for each row, of which these are the inner products: those of g and of the models g + d_k"""
    values, vectors = torch.linalg.eigh(products)
    g, *updates = vectors * values.clamp(min=0).sqrt()
    return g, [g + d for d in updates]


def whole_models(g, clients, layers=None):
    """Models that hold everything, with the same Gram as these parts: (g, clients), one tensor for each layer"""
    layers = layers or {"all.weight": list(g)}
    made = {name: models_with(gram(g, clients, keys)) for name, keys in layers.items()}
    models = [{name: each[k] for name, (_, each) in made.items()} for k in range(len(clients))]
    return {name: start for name, (start, _) in made.items()}, models


def layers_of(g):
    """Its parameters, by module"""
    found = {}
    for key in filter(is_parameter, g):
        found.setdefault(key.rpartition(".")[0] + ".weight", []).append(key)
    return found


def mix(g, clients, weights, *, scale=1.0, center=0.0):
    """Of each parameter, by weights [K], or {layer: [K]}"""
    found = {}
    for key in filter(is_parameter, g):
        w = weights[key.rpartition(".")[0]] if isinstance(weights, dict) else weights
        found[key] = one(g, clients, key, [float(x) for x in w], scale, center)
    return found


def one(g, clients, key, weights, scale=1.0, center=0.0):
    """scale * (all weight) * (the mean of the clients who have it) + center * g"""
    here = [k for k, sd in enumerate(clients) if key in sd and weights[k]]
    start, everyone = g[key].double(), sum(weights)
    if not here:
        return (scale * everyone + center) * start
    share = sum(abs(w) for w in weights) / sum(abs(weights[k]) for k in here)
    moved = sum(share * scale * weights[k] * (clients[k][key].double() - start) for k in here)
    return (scale * everyone + center) * start + moved
