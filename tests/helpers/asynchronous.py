"""Clients that start from versions of a model and arrive later, for the asynchronous methods."""

from __future__ import annotations

import torch

from helpers.cohort import make_with_batch_norm

SHAPES = {"a.weight": (13, 7), "a.bias": (13,), "bn.weight": (13,), "bn.running_var": (13,)}
PARAMS = ("a.weight", "a.bias", "bn.weight")


def model_of(dtype, seed, scale=0.1):
    g, _ = make_with_batch_norm(1, SHAPES, dtype, seed=seed, scale=scale)
    return g


def vector(sd):
    """The parameters in float64"""
    return torch.cat([sd[key].double().flatten() for key in PARAMS])


def arrivals(rng, models, count, most):
    """[(version, trained model)] of clients that started from random versions, at most so many before the newest; and
    how much data they have"""
    now, sent = max(models), []
    for _ in range(count):
        v = rng.randint(max(0, now - most), now)
        seed = rng.randint(0, 10**6)
        noise = model_of(torch.float64, seed)
        w = {}
        for key, value in models[v].items():
            if not value.is_floating_point():
                w[key] = value + rng.randint(0, 5)
            else:
                step = 0.1 * noise[key]
                w[key] = (value.double() + (step.abs() if key == "bn.running_var" else step)).to(value.dtype)
        sent.append((v, w))
    return sent, [rng.randint(1, 9) for _ in range(count)]


def discount(decay, a, b=4.0):
    """s(t) as the papers write it"""
    if decay == "polynomial":
        return lambda t: (t + 1) ** -a
    if decay == "hinge":
        return lambda t: 1 if t <= b else 1 / (a * (t - b) + 1)
    return lambda t: 1


def assert_near(found, expected, dtype, summands):
    """Parameters against a float64 vector. One rounding of the result, and one of each summand of it, where an update
    was rounded before it was sent"""
    eps = torch.finfo(dtype).eps
    size = expected.abs() + sum(vector(sd).abs() for sd in summands)
    assert ((vector(found) - expected).abs() <= eps * size).all()


def assert_close(found, expected, dtype):
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(found.double(), expected, rtol=4 * eps, atol=4 * eps)
