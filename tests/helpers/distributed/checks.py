"""Checks of every method on parts of models, and of what happens when a rank fails or dies."""

from __future__ import annotations

import copy
import math
import os
import signal
from functools import partial

import numpy as np
import pytest
import torch

import fastagg
from fastagg._engine.distributed import sharded
from fastagg._engine.nonfinite import OutOfRangeError
from fastagg.methods import fedawa
from helpers.cohort import assert_same_bits, assert_unchanged, snapshot
from helpers.distributed.parts import (
    CASES,
    IDS,
    SIZES,
    check,
    digests,
    everyone,
    layers_of,
    raises,
    round_of,
    same_everywhere,
    same_state,
    server_of,
    slices_of,
)  # fmt: skip
from helpers.every_method import K, cohort, models
from helpers.forming import never_formed


@check
def every_method_cut_between_layers(group, rank, ranks):
    """Has the bits of one process"""
    for case in CASES:
        alone, spread = server_of(case), server_of(case, group)
        for seed in range(2):
            g, clients = cohort(seed=seed)
            whole = round_of(alone, g, clients)
            mine = [layers_of(sd, rank, ranks) for sd in (g, *clients)]
            before = snapshot(*mine)
            part = round_of(spread, mine[0], mine[1:])
            assert_unchanged(mine, before)
            for a, b in zip(models(whole), models(part), strict=True):
                assert_same_bits(layers_of(a, rank, ranks), b)
                assert torch.equal(a.weights, b.weights), case
                assert a.layers == b.layers
            if whole.gram is not None:
                assert torch.equal(whole.gram.matrix, part.gram.matrix), case
                assert torch.equal(whole.gram.numel, part.gram.numel)
        state = alone.state_dict()
        if "former" in state:
            state["former"] = {v: layers_of(model, rank, ranks) for v, model in state["former"].items()}
        if not {"m", "v", "previous"} & state.keys():  # these are shards
            assert same_state(state, spread.state_dict()), case


@check
def no_gram_is_formed(group, rank, ranks):
    """Has the bits of one process, too"""
    with never_formed():
        for case in CASES:
            alone, spread = server_of(case), server_of(case, group)
            if alone.reads != "products":
                continue
            for seed in range(2):
                g, clients = cohort(seed=seed)
                whole = round_of(alone, g, clients)
                mine = [layers_of(sd, rank, ranks) for sd in (g, *clients)]
                part = round_of(spread, mine[0], mine[1:])
                for one, other in zip(models(whole), models(part), strict=True):
                    assert_same_bits(layers_of(one, rank, ranks), other)
                    assert torch.equal(one.weights, other.weights), case
                assert not part.gram.formed
                assert torch.equal(whole.gram.squares, part.gram.squares), case
                assert torch.equal(whole.gram.numel, part.gram.numel)


@check
def ranks_whose_arithmetic_differs(group, rank, ranks):
    """By an ulp, as on CPUs of different kinds: the first rank's vectors count, and no rank is left alone"""
    with never_formed(), pytest.MonkeyPatch.context() as patch:
        softmax = fedawa.softmax
        patch.setattr(fedawa, "softmax", lambda T: softmax(T) * (1 + 2.3e-16 * rank))
        for options in ({}, {"variant": "released"}, {"variant": "released", "steps": 2, "layerwise": True}):
            server = fastagg.aggregator("fedawa", group=group, **options)
            g, clients = cohort()
            mine = [layers_of(sd, rank, ranks) for sd in (g, *clients)]
            result = round_of(server, mine[0], mine[1:])
            assert not result.gram.formed


@check
def every_method_cut_inside_tensors(group, rank, ranks):
    """Agrees with one process as far as the Gram does: its sums are float32 for float32 models"""
    double, single = (torch.float64, 1e-9, 1e-13), (torch.float32, 2e-5, 1e-6)
    for dtype, close, gram_close in (double, single) if ranks == 3 else (single,):
        told = []
        for case in CASES:
            alone, spread = server_of(case), server_of(case, group)
            g, clients = cohort()
            g, *clients = (
                {k: v.to(dtype) if v.is_floating_point() else v for k, v in sd.items()} for sd in (g, *clients)
            )
            whole = round_of(alone, g, clients)
            g, *clients = (slices_of(sd, rank, ranks) for sd in (g, *clients))
            part = round_of(spread, g, clients)
            told.append(part)
            for a, b in zip(models(whole), models(part), strict=True):
                torch.testing.assert_close(b.weights, a.weights, rtol=100 * close, atol=close)
                for key, value in slices_of(a, rank, ranks).items():
                    torch.testing.assert_close(b[key], value, rtol=close, atol=close)
            if whole.gram is not None:
                assert torch.equal(whole.gram.numel, part.gram.numel)
                lengths = whole.gram.matrix.diagonal(dim1=-2, dim2=-1).sqrt()
                apart = (whole.gram.matrix - part.gram.matrix).abs()
                assert (apart <= gram_close * lengths[..., :, None] * lengths[..., None, :]).all(), case
        assert len(set(digests(group, *told))) == 1


@check
def clients_that_are_not_finite(group, rank, ranks):
    some = ("fedavg", "fedawa", "fedawa, as written", "krum", "centred_clipping", "fedavgm", "fedamp", "ldawa", "cfl")
    for case in some:
        for cut in (layers_of, slices_of):
            alone, spread = (server_of(case, where, on_bad_client="drop") for where in (None, group))
            raising = server_of(case, group)
            g, clients = cohort()
            clients[2]["fc.weight"][-1, -1] = math.nan
            clients[2]["conv.weight"][0] = math.inf
            clients[4]["bn.running_var"][-1] = math.nan
            parts = [cut(sd, rank, ranks) for sd in clients]
            words = raises(fastagg.NonFiniteError, "", partial(round_of, server_of(case), g, clients))
            state = copy.deepcopy(raising.state_dict())
            told = raises(fastagg.NonFiniteError, "", partial(round_of, raising, cut(g, rank, ranks), parts))
            assert told == words
            assert same_state(raising.state_dict(), state)
            whole, part = round_of(alone, g, clients), round_of(spread, cut(g, rank, ranks), parts)
            assert part.dropped == whole.dropped
            assert list(part.dropped) == ["a", "b"]
            for a, b in zip(models(whole), models(part), strict=True):
                assert (a is None) == (b is None)
                if a is not None:
                    for key, value in cut(a, rank, ranks).items():
                        torch.testing.assert_close(b[key], value, rtol=2e-5, atol=2e-5)
    g, clients = cohort()
    g["fc.bias"][-1] = math.nan
    g, *clients = (slices_of(sd, rank, ranks) for sd in (g, *clients))
    raises(fastagg.InputError, "the global model: key 'fc.bias' has", lambda: fastagg.simprox(g, clients, group=group))


@check
def clients_of_another_form(group, rank, ranks):
    """One that does not fit on a single rank is left out on all of them"""
    g, clients = cohort()
    keep = [0, 1, 3, 4, 6]
    for case in ("fedavg", "fedawa", "fedamp"):
        parts = [slices_of(sd, rank, ranks) for sd in clients]
        if rank == ranks - 1:
            parts[2]["fc.bias"] = torch.ones(9)
        if rank == 0:
            del parts[5]["fc.weight"]
        part = round_of(server_of(case, group, on_bad_client="drop"), slices_of(g, rank, ranks), parts)
        assert sorted(part.dropped) == sorted(IDS[k] for k in (2, 5))
        assert "key 'fc.weight' is missing" in part.dropped[IDS[5]]
        assert "key 'fc.bias' has shape (9,)" in part.dropped[IDS[2]]
        whole = server_of(case).aggregate(
            g, [clients[k] for k in keep], [SIZES[k] for k in keep], [IDS[k] for k in keep]
        )
        got = [model for model in models(part) if model is not None]
        for a, b in zip(models(whole), got, strict=True):
            for key, value in slices_of(a, rank, ranks).items():
                torch.testing.assert_close(b[key], value, rtol=2e-5, atol=2e-5)
    raises(fastagg.BadClientError, "", lambda: fastagg.fedavg(
        slices_of(g, rank, ranks), [{"conv.weight": clients[0]["conv.weight"]}], group=group))  # fmt: skip


@check
def clients_that_agree_with_each_other(group, rank, ranks):
    """Distances are taken from a second Gram then, in which every rank has the same client in the middle."""
    g, clients = cohort(scale=1e-5)
    far = {key: value + 0.3 if value.is_floating_point() else value for key, value in g.items()}
    for case in ("krum", "multi_krum, two", "geometric_median", "fedamp", "simagg"):
        whole = round_of(server_of(case), far, clients)
        part = round_of(
            server_of(case, group), layers_of(far, rank, ranks), [layers_of(sd, rank, ranks) for sd in clients]
        )
        for a, b in zip(models(whole), models(part), strict=True):
            assert_same_bits(layers_of(a, rank, ranks), b)
            assert torch.equal(a.weights, b.weights), case
        assert torch.equal(whole.gram.matrix, part.gram.matrix)


@check
def buffers_of_attackers(group, rank, ranks):
    """Medians are taken of each rank's part; clients without data set no integers"""
    g, clients = cohort()
    for sd in clients[:3]:
        sd["bn.running_var"][:] = 1e30
        sd["bn.num_batches_tracked"] += 2**60
    for cut in (layers_of, slices_of):
        parts = [cut(sd, rank, ranks) for sd in (g, *clients)]
        for case in ("krum", "geometric_median", "centred_clipping", "fedavg"):
            sizes = [0.0, 0.0, 0.0, *SIZES[3:]]
            whole = server_of(case).aggregate(g, clients, sizes, IDS)
            part = server_of(case, group).aggregate(parts[0], parts[1:], sizes, IDS)
            assert whole["bn.num_batches_tracked"] < 100
            for key, value in cut(whole, rank, ranks).items():
                torch.testing.assert_close(part[key], value, rtol=2e-5, atol=2e-5)


@check
def a_finite_client_that_is_too_large(group, rank, ranks):
    """Named and dropped on all ranks, though only one of them sees it"""
    for name, key, value, info in (
        ("fedadam", "fc.weight", 1e25, {}),
        ("fedavgm", "fc.weight", 3e38, {}),
        ("fednova", "fc.weight", 3.3e38, {"local_steps": [9.0] * 3 + [1.0] + [9.0] * (K - 4)}),
    ):
        g, *clients = everyone()
        clients[3][key].view(-1)[-1] = value
        parts = [slices_of(sd, rank, ranks) for sd in (g, *clients)]
        options = {"lr": 10.0} if name == "fedavgm" else {}
        words = raises(
            OutOfRangeError, "client 3: with it, ",
            partial(fastagg.aggregator(name, group=group, **options).aggregate, parts[0], parts[1:], **info),
        )  # fmt: skip
        same_everywhere(group, words)
        alone, spread = (fastagg.aggregator(name, group=x, on_bad_client="drop", **options) for x in (None, group))
        whole, part = alone.aggregate(g, clients, **info), spread.aggregate(parts[0], parts[1:], **info)
        assert part.dropped == whole.dropped
        assert list(part.dropped) == [3]
        for key, value in slices_of(whole, rank, ranks).items():
            assert torch.equal(part[key], value)
    g, *clients = everyone()
    parts = [slices_of(sd, rank, ranks) for sd in (g, *clients)]
    steps = [5.0, 1e308, *[5.0] * (K - 2)]
    result = fastagg.fednova(parts[0], parts[1:], local_steps=steps, group=group, on_bad_client="drop")
    assert list(result.dropped) == [1]


@check
def a_sixteen_bit_model(group, rank, ranks):
    """Also where only one rank has tensors of 16 bits"""
    for halves in (("fc.weight", "fc.bias", "conv.weight"), ("conv.weight",)):
        models = everyone()
        for sd in models:
            for key in halves:
                sd[key] = sd[key].bfloat16()
        parts = [layers_of(sd, rank, ranks) for sd in models]
        for options in ({"momentum": 0.0}, {"lr": 0.7}):
            alone, spread = (
                fastagg.aggregator("fedavgm", **options),
                fastagg.aggregator("fedavgm", group=group, **options),
            )
            for _ in range(2):
                whole = alone.aggregate(models[0], models[1:], SIZES)
                part = spread.aggregate(parts[0], parts[1:], SIZES)
            for key, value in layers_of(whole, rank, ranks).items():
                assert torch.equal(part[key], value), key


@check
def a_rank_that_fails(group, rank, ranks):
    """All raise the same, in little time, and remember nothing of the round"""
    bad = ranks - 1

    def refuse(kind, words, name="fedadam", there=None, more=None, options=None, prefix=f"rank {bad}: "):
        server = fastagg.aggregator(name, group=group, **(options or {}))
        g, *clients = (slices_of(sd, rank, ranks) for sd in everyone())
        if name == "fedadam":
            server.aggregate(g, clients, SIZES)
        given = {"global_sd": g, "client_sds": clients, "sizes": SIZES}
        if rank == bad:
            if there is not None:
                there(given, server)
            given |= more or {}
        state = copy.deepcopy(server.state_dict())
        told = raises(kind, prefix + words, lambda: server.aggregate(**given))
        same_everywhere(group, told)
        assert same_state(server.state_dict(), state)
        assert same_everywhere(group, "still there") is None

    def other_shape(given, server):
        given["client_sds"][3] = given["client_sds"][3] | {"fc.bias": torch.ones(7)}

    def too_large(given, server):
        for sd in given["client_sds"]:
            sd["fc.weight"] = torch.full_like(sd["fc.weight"], 1e38)

    def no_memory(given, server):
        def run_out(*args, **more):
            raise MemoryError("none left")

        server.combine = run_out

    refuse(fastagg.BadClientError, "client 3: key 'fc.bias' has shape (7,), expected", there=other_shape)
    refuse(fastagg.BadClientError, "client 0: its entry in sizes is -1.0, expected", more={"sizes": [-1.0] * K})
    refuse(fastagg.InputError, "the ranks differ in sizes: [3.0", more={"sizes": [1.0] * K}, prefix="")
    fewer = {"client_sds": [slices_of(sd, rank, ranks) for sd in everyone()[1:4]], "sizes": SIZES[:3]}
    refuse(fastagg.InputError, "the ranks differ in clients: 7 on rank 0, 3 on rank", more=fewer, prefix="")
    refuse(TypeError, "fedadam: aggregate() takes no 'lengths'", more={"lengths": [1.0] * K})
    refuse(fastagg.InputError, "fedadam: the mean update of key 'fc.weight' is too large", there=too_large)
    refuse(fastagg.InputError, "out: key '", more={"out": {}})
    refuse(fastagg.InputError, "out: key '", name="fedawa", more={"out": {}})
    refuse(MemoryError, "none left", there=no_memory)
    refuse(fastagg.InputError, "the ranks differ in lr: 0.01 on rank 0, 0.5 on rank",
           there=lambda _, server: setattr(server, "lr", 0.5), prefix="")  # fmt: skip
    refuse(fastagg.InputError, "params: 'nothing' is not a key of the model", name="fedavg", prefix="",
           options={"params": ["nothing"]})  # fmt: skip
    refuse(fastagg.InputError, "the clients' weights differ from those of rank 0 by", name="fedawa",
           there=lambda _, server: server.state.logits.update({k: np.array(k * 0.1) for k in range(K)}))  # fmt: skip
    server = fastagg.aggregator("krum", f=5, group=group)
    g, *clients = (slices_of(sd, rank, ranks) for sd in everyone())
    told = raises(fastagg.InputError, "krum: f=5 needs", lambda: server.aggregate(g, clients))
    assert told.startswith("krum: ")  # all ranks failed alike: nobody is to be named


@check
def weights_that_differ_in_the_last_bits(group, rank, ranks):
    """Rank 0's are used by all, as CPUs of different kinds need"""
    g, *clients = (slices_of(sd, rank, ranks) for sd in everyone())
    server = fastagg.aggregator("fedavg", group=group)
    combine, factor = server.combine, 1 + rank * 1e-13

    def slightly_off(cohort):
        cohort.shares = cohort.shares * factor
        return combine(cohort)

    server.combine = slightly_off
    expected = server_of("fedavg", group).aggregate(g, clients, SIZES)
    assert_same_bits(server.aggregate(g, clients, SIZES), expected)


@check
def tied_parameters_and_names_of_others(group, rank, ranks):
    class Tied(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = (torch.nn.Linear(6, 6) for _ in range(3))
            self.c.weight = self.a.weight

    module, generator = Tied(), torch.Generator().manual_seed(0)
    g, *sds = (
        {key: torch.randn(v.shape, generator=generator) for key, v in module.state_dict().items()} for _ in range(4)
    )
    for sd in (g, *sds):
        sd["c.weight"] = sd["a.weight"]
    whole = fastagg.fedawa(g, sds, params=module, steps=3)
    g, *sds = (layers_of(sd, rank, ranks) for sd in (g, *sds))
    part = fastagg.fedawa(g, sds, params=module, steps=3, group=group)
    assert torch.equal(whole.gram.matrix, part.gram.matrix)
    assert torch.equal(whole.gram.numel, part.gram.numel)


@check
def many_layers_are_added_up_before_they_are_sent(group, rank, ranks):
    limit, sharded.MOST_BYTES = sharded.MOST_BYTES, 1000
    try:
        g, clients = cohort()
        whole = fastagg.simprox(g, clients)
        g, *clients = (layers_of(sd, rank, ranks) for sd in (g, *clients))
        part = fastagg.simprox(g, clients, group=group)
        assert part.gram.numel == whole.gram.numel
        torch.testing.assert_close(part.gram.matrix, whole.gram.matrix, rtol=1e-12, atol=0)
    finally:
        sharded.MOST_BYTES = limit


@check
def refused(group, rank, ranks):
    g, *clients = (slices_of(sd, rank, ranks) for sd in everyone())
    raises(
        ValueError,
        "fedlaw: it trains whole models, and takes no group",
        lambda: fastagg.aggregator("fedlaw", group=group),
    )
    raises(fastagg.InputError, "pass class_dist", lambda: fastagg.cwfedavg(None, clients, group=group))
    raises(fastagg.InputError, "scope='^nothing' is found in no key", lambda: fastagg.cwfedavg(
        None, clients, group=group, scope="^nothing", class_dist=np.ones((K, 2))))  # fmt: skip
    raises(fastagg.InputError, "head='nothing' is not a key", lambda: fastagg.cwfedavg(
        None, clients, group=group, head="nothing", scope="output", class_dist=np.ones((K, 2))))  # fmt: skip
    raises(ValueError, "group=3; expected a process group", lambda: fastagg.fedavg(None, clients, group=3))
    raises(fastagg.InputError, "client_sds is one mapping", lambda: fastagg.fedavg(None, g, group=group))
    raises(fastagg.InputError, "no clients", lambda: fastagg.fedavg(g, [], group=group))


def a_rank_that_dies(group, rank, ranks):
    """Ends the others by an error, and they remember nothing of the round"""
    server = fastagg.aggregator("fedadam", group=group)
    g, *clients = (slices_of(sd, rank, ranks) for sd in everyone())
    server.aggregate(g, clients)
    state = copy.deepcopy(server.state_dict())
    if rank == ranks - 1:
        server.combine = lambda *args, **more: os.kill(os.getpid(), signal.SIGKILL)
    try:
        server.aggregate(g, clients)
    except RuntimeError:
        assert same_state(server.state_dict(), state)
        return
    raise AssertionError("nothing was raised")
