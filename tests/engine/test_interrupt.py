"""Ctrl-C during a long call: honoured long before its end, nothing remembered of the call, nothing broken after it."""

from __future__ import annotations

import copy
import os
import signal
import sys
import time

import pytest
import torch

import fastagg
from helpers.cohort import assert_same_bits, assert_unchanged, make, snapshot

K = 400
pytestmark = pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="no timers here")


class Stopped(Exception):
    """What a user's handler may raise instead of KeyboardInterrupt"""


@pytest.fixture(scope="module")
def cohort():
    """A round whose Gram takes many seconds, in little memory: a few clients, over and over"""
    generator = torch.Generator().manual_seed(0)
    g, *few = ({"w": torch.randn(1 << 22, generator=generator)} for _ in range(4))
    return g, [few[k % 3] for k in range(K)]


def interrupted_after(call, raises, delay=0.3):
    """Seconds from the signal to the exception"""

    def handler(*_):
        raise raises

    former = signal.signal(signal.SIGALRM, handler)
    begin = time.monotonic()
    signal.setitimer(signal.ITIMER_REAL, delay)
    try:
        with pytest.raises(raises):
            call()
        return time.monotonic() - begin - delay
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, former)


def assert_stops(call, part, parts, raises=KeyboardInterrupt):
    """In less than half of the time that the whole call takes: many times that of a part, on this machine, now"""
    begin = time.monotonic()
    part()
    whole = parts * (time.monotonic() - begin)
    assert interrupted_after(call, raises) < whole / 2


@pytest.mark.parametrize("raises", [KeyboardInterrupt, Stopped])
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_the_gram_stops(cohort, threads, raises):
    torch.set_num_threads(threads)
    g, *clients = ({"w": sd["w"][: 1 << 16]} for sd in (cohort[0], *cohort[1]))
    assert_stops(lambda: fastagg.gram(*cohort), lambda: fastagg.gram(g, clients), 1 << 6, raises)
    small = [{"w": sd["w"][:1000]} for sd in (cohort[0], *cohort[1][:3])]  # and all is as before
    expected = fastagg.gram(small[0], small[1:], backend="reference").matrix
    torch.testing.assert_close(fastagg.gram(small[0], small[1:]).matrix, expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("threads", [1, 3])
def test_a_mix_into_many_models_stops(cohort, threads):
    torch.set_num_threads(threads)
    clients = [{"w": sd["w"][: 1 << 19]} for sd in cohort[1]]
    weights = torch.full((K, K), 1 / K, dtype=torch.float64)
    few = [{"w": sd["w"][: 1 << 13]} for sd in clients]
    assert_stops(lambda: fastagg.mix(clients, weights), lambda: fastagg.mix(few, weights), 1 << 6)


def test_a_round_leaves_no_trace(cohort):
    g, clients = cohort
    server = fastagg.FedAWA()
    server.aggregate({"w": g["w"][:100]}, [{"w": sd["w"][:100]} for sd in clients])
    state, before = copy.deepcopy(server.state_dict()), snapshot(g, *clients[:3])
    interrupted_after(lambda: server.aggregate(g, clients), KeyboardInterrupt)
    assert torch.equal(server.state_dict()["logits"], state["logits"])
    assert_unchanged([g, *clients[:3]], before)


def test_a_handler_that_does_not_raise_stops_nothing(cohort):
    g, clients = cohort[0], cohort[1][:60]
    expected = fastagg.fedawa(g, clients)
    heard = []
    former = signal.signal(signal.SIGALRM, lambda *_: heard.append(1))
    signal.setitimer(signal.ITIMER_REAL, 0.02, 0.02)
    try:
        result = fastagg.fedawa(g, clients)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, former)
    assert heard
    assert_same_bits(result, expected)


STATEFUL = {
    "fedawa": {"variant": "released", "layerwise": True},
    "fedadp": {},
    "cfl": {"eps1": 100.0, "eps2": 0.0},
    "fedadam": {},
}


@pytest.mark.parametrize("name", STATEFUL)
def test_an_interrupt_at_any_line_leaves_the_memory_whole(name):
    """As it was before the round or, after its very last line, as it is after it: never in between."""
    g, clients = make(4, {"a.weight": (5, 3), "a.bias": (5,), "b.weight": (2, 5)}, seed=3, scale=0.5)
    server = fastagg.aggregator(name, **STATEFUL[name])
    server.aggregate(g, clients, client_ids=list("abcd"))
    before, state = server.state, server.state_dict()
    total = run_until_line(None, lambda: server.aggregate(g, clients, client_ids=list("abcd")))
    assert total > 100
    server.state = before
    changed = 0
    for at in sorted({*range(1, total, 9), *range(total - 30, total + 1)}):
        assert run_until_line(at, lambda: server.aggregate(g, clients, client_ids=list("abcd"))) == at
        if server.state is not before:
            changed += 1
        else:
            assert same_state(server.state_dict(), state)
        server.state = before
    assert changed <= 1  # the line after the assignment, which returns the result


def run_until_line(at, call):
    """Interrupts call() at the at-th line of fastagg's Python; returns how many lines it has run"""
    lines = 0

    def trace(frame, event, _):
        nonlocal lines
        if f"{os.sep}fastagg{os.sep}" not in frame.f_code.co_filename:
            return None
        if event == "line":
            lines += 1
            if lines == at:
                raise KeyboardInterrupt
        return trace

    former = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        assert lines == at
    finally:
        sys.settrace(former)
        torch.set_grad_enabled(True)  # a line of `with torch.no_grad()` comes again before it is left
    return lines


def same_state(a, b):
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same_state(a[key], b[key]) for key in a)
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
