"""Clients of every_method.py that arrive one by one."""

from __future__ import annotations

import numpy as np

import fastagg
from helpers.every_method import IDS, OPTIONS, K, round_inputs

ORDER = [3, 1, 0, 2, 6, 5, 4]
SIZES = [3.0, 1, 4, 1, 5, 9, 2]


def arrive(round, name, clients, sent=lambda k, sd: {"model": sd}):
    """The clients in ORDER, with their entries in the method's inputs; what finish() is to be given besides"""
    specs = {spec.name: spec for spec in fastagg.aggregator(name, **OPTIONS[name]).round_inputs}
    given, rest = round_inputs(name, K), {}
    for what in [*given]:
        spec, value = specs[what], given[what]
        if spec.per_client and not spec.pairwise and not spec.client_axis:
            continue
        del given[what]
        if spec.pairwise:
            value = np.asarray(value)[np.ix_(ORDER, ORDER)]
        elif spec.per_client:
            value = np.take(np.asarray(value), ORDER, spec.client_axis)
        rest[what] = value
    for k in ORDER:
        entries = {what: value[k] for what, value in given.items()}
        assert round.add(IDS[k], **sent(k, clients[k]), size=SIZES[k], **entries)
    return rest


def pairs_of(server, expected, found):
    """Models of a round in the order of IDS, and those of one in ORDER"""
    if server.produces == "global":
        return [(expected, found)]
    order = ORDER if server.produces == "personalised" else range(len(expected))
    return list(zip([expected[k] for k in order], found, strict=True))
