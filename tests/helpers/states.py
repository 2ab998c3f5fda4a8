"""States of aggregators, to be compared."""

from __future__ import annotations

import torch

from helpers.odd_models import bytes_of


def same(a, b):
    """Two states of an aggregator, or parts of them"""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


def frozen(state):
    """A state to compare with another later"""
    if isinstance(state, dict):
        return {key: frozen(value) for key, value in state.items()}
    return (state.dtype, bytes_of(state.clone())) if isinstance(state, torch.Tensor) else state
