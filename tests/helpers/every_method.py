"""A round that every method can take: models, sizes and what some methods want besides."""

from __future__ import annotations

import numpy as np
import torch

import fastagg
from fastagg._engine.registry import registry
from fastagg.methods.on_proxy import OnProxy
from helpers.cohort import make

SHAPES = {"conv.weight": (6, 3, 3, 3), "bn.weight": (6,), "bn.bias": (6,), "fc.weight": (4, 24), "fc.bias": (4,)}
K = 7
IDS = ["d", "g", "a", "f", "b", "e", "c"]
METHODS = sorted(registry())
TRAINERS = {name for name, cls in registry().items() if issubclass(cls, OnProxy)}  # which run the model on proxy data
# whose rounds are of ExampleNet, because their inputs depend on the model
OF_EXAMPLE_NET = TRAINERS | {
    name for name, cls in registry().items() if any(spec.kind == "server_model" for spec in cls.round_inputs)
}
OPTIONS = {name: cls.example_round(K).options for name, cls in registry().items()}


def round_inputs(name, clients=K):
    return registry()[name].example_round(clients).inputs


def from_the_server(name):
    """Those inputs of a round that clients do not report themselves"""
    own = {spec.name for spec in registry()[name].round_inputs if not spec.from_clients}
    return {what: value for what, value in round_inputs(name).items() if what in own}


def some_of(name, inputs, order):
    """The inputs of a round for some of its clients, in this order"""
    specs = {spec.name: spec for spec in registry()[name].round_inputs}
    return {what: of_some(specs[what], value, order) for what, value in inputs.items()}


def of_some(spec, value, order):
    """An input of a round for some of its clients, in this order"""
    if not spec.per_client:
        return value
    some = np.take(np.asarray(value), list(order), spec.client_axis)
    return some[:, list(order)] if spec.pairwise else some


def cohort(clients=K, seed=0, scale=1e-2):
    g, sds = make(clients, SHAPES, seed=seed, scale=scale)
    for k, sd in enumerate((g, *sds)):
        sd["bn.running_mean"] = 0.1 * k * torch.ones(6)
        sd["bn.running_var"] = 1 + 0.1 * torch.arange(6.0) + 0.01 * k
        sd["bn.num_batches_tracked"] = torch.tensor(10 + k)
    return g, sds


def run(name, g, clients, sizes=None, *, ids=None, inputs=None, server=None, **more):
    server = server or fastagg.aggregator(name, **OPTIONS[name])
    inputs = round_inputs(name, len(clients)) if inputs is None else inputs
    return server.aggregate(g, clients, sizes, ids, **inputs, **more)


def models(result):
    return list(result) if isinstance(result, list) else [result]


NEEDS_MANY = {name for name in METHODS if fastagg.aggregator(name, **OPTIONS[name]).min_clients > 1}
IN_MEMORY = {
    name for name in METHODS if fastagg.aggregator(name, **OPTIONS[name]).why_not_on_files()
}  # and nowhere else
ROBUST = {name for name, cls in registry().items() if cls.buffers == "median"}  # of what is not a parameter
