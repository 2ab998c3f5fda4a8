"""Checks of errors that one rank finds: what the others raise, and what is left of it afterwards."""

from __future__ import annotations

import gc
import math
from contextlib import suppress

import pytest
import torch

import fastagg
from fastagg._engine.distributed.peers import Peers
from helpers.distributed.parts import IDS, SIZES, check, everyone, raises, round_of, server_of, slices_of


@check
def clients_of_another_form_are_named(group, rank, ranks):
    """The error and its reasons are the same on every rank"""
    g, *parts = (slices_of(sd, rank, ranks) for sd in everyone())
    last = ranks - 1
    if rank == last:
        parts[2]["fc.bias"] = torch.ones(9)
    length = len(slices_of(everyone()[0], last, ranks)["fc.bias"])
    reason = f"key 'fc.bias' has shape (9,), expected ({length},)"
    for case in ("fedavg", "fedawa", "fedamp"):
        with pytest.raises(fastagg.BadClientError) as caught:
            round_of(server_of(case, group), g, parts)
        assert str(caught.value) == f"rank {last}: client 2 (id {IDS[2]!r}): {reason}"
        assert caught.value.reasons == {2: f"on rank {last}, {reason}"}
    if rank == 0:
        del parts[5]["fc.weight"]
    with pytest.raises(fastagg.BadClientError, match=r"^rank 0: client 5 .* failed 1 more") as caught:
        round_of(server_of("fedavg", group), g, parts)
    assert caught.value.reasons == {2: f"on rank {last}, {reason}", 5: "on rank 0, key 'fc.weight' is missing"}
    given = g if rank == 0 else parts  # which is no client's fault
    words = "rank 0: client_sds is one mapping"
    raises(fastagg.InputError, words, lambda: server_of("fedavg", group).aggregate(g, given, SIZES, IDS))


@check
def errors_keep_no_group_alive(group, rank, ranks):
    """Not even until the next garbage collection: a group that is there when Python exits can abort the process"""
    g, *parts = (slices_of(sd, rank, ranks) for sd in everyone())
    odd, nan = ([*parts[:2], dict(parts[2]), *parts[3:]] for _ in range(2))
    nan[2]["fc.weight"] = nan[2]["fc.weight"] * math.nan
    if rank == 0:
        odd[2]["fc.bias"] = torch.ones(9)
    gc.collect()
    before = sum(isinstance(thing, Peers) for thing in gc.get_objects())
    gc.disable()
    try:
        for case in ("fedavg", "fedawa", "krum", "fedamp", "fedavgm"):
            for clients in (odd, nan, [], parts[:2] if rank == 0 else parts):
                with suppress(ValueError):
                    server_of(case, group).aggregate(g, clients)
                    raise AssertionError
                assert sum(isinstance(thing, Peers) for thing in gc.get_objects()) == before, case
    finally:
        gc.enable()
