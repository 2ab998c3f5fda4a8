"""For the checks of tests/distributed: parts of models, servers, and what has to be raised, or to be the same."""

from __future__ import annotations

import hashlib
import math
import re

import numpy as np
import pytest
import torch

import fastagg
from fastagg._engine.distributed.peers import Peers
from helpers.every_method import IN_MEMORY, METHODS, OPTIONS, cohort, models, run

IDS = ["d", "g", "a", "f", "b", "e", "c"]
SIZES = [3.0, 1.0, 4.0, 1.5, 9.0, 2.0, 6.0]
CASES = {name: {} for name in METHODS if name not in IN_MEMORY} | {
    "fedawa, by layers": {"layerwise": True, "steps": 2},
    "fedawa, as written": {"variant": "paper", "steps": 3, "reg": "euc"},
    "cwfedavg, output": {"scope": "output"},
    "cwfedavg, some": {"scope": "^fc"},
    "multi_krum, two": {"m": 2},
    "geometric_median, alike": {"weighted": False},
    "krum, mixed": {"pre": "nnm"},
    "trimmed_mean, mixed": {"pre": "bucketing + arc f=1 + nnm"},
    "fedavgm, mixed": {"weights": {"method": "simprox"}, "pre": "clipping c=0.1 + nnm f=2"},
    "centred_clipping, previous": {"center": "previous", "tau": 0.3, "iterations": 2},
}
CHECKS = {}
MESHES = {}


def check(function):
    CHECKS[function.__name__] = function
    return function


def server_of(case, group=None, **more):
    name = case.partition(",")[0]
    return fastagg.aggregator(name, **OPTIONS[name] | CASES[case], group=group, **more)


def round_of(server, g, clients, **more):
    return run(server.name, g, clients, SIZES, ids=IDS, server=server, **more)


def everyone(seed=0):
    """The global model and the clients"""
    g, clients = cohort(seed=seed)
    return [g, *clients]


def layers_of(sd, rank, ranks):
    """Runs of layers: with four ranks the last has nothing, for there are three"""
    layers = list(dict.fromkeys(key.rpartition(".")[0] for key in sd))
    mine = np.array_split(layers, ranks)[rank] if ranks <= len(layers) else layers[rank : rank + 1]
    return {key: value for key, value in sd.items() if key.rpartition(".")[0] in mine}


def slices_of(sd, rank, ranks):
    """Unequal pieces of every tensor, of which rank 1 has none of the first"""
    edges = [0, 0.13, 0.13, 0.7, 1] if ranks == 4 else [0, 0.13, 0.7, 1] if ranks == 3 else [0, 0.13, 1]
    return {
        key: value.reshape(-1)[math.ceil(edges[rank] * value.numel()) : math.ceil(edges[rank + 1] * value.numel())]
        for key, value in sd.items()
    }


def digests(group, *results):
    """Of what a result says, on each rank"""
    peers, hashed = Peers(group), hashlib.sha256()
    for result in results:
        told = [result.gram.matrix] if result.gram is not None else []
        told += [model.weights for model in models(result)]
        for tensor in told:
            hashed.update(tensor.numpy().tobytes())
    return peers.texts(hashed.hexdigest())


def raises(kind, words, call):
    with pytest.raises(kind, match=re.escape(words)) as caught:
        call()
    assert type(caught.value) is kind
    return str(caught.value)


def same_everywhere(group, text):
    assert len(set(Peers(group).texts(text))) == 1


def same_state(a, b):
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same_state(a[key], b[key]) for key in a)
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
