"""What a method's class declares is what it does: the reads of a round, and what it looks at in the Gram."""

from __future__ import annotations

import pytest
import torch

import fastagg
from fastagg._engine import forming, rounds
from fastagg._engine.gram import Gram
from fastagg._engine.in_memory import InMemory
from fastagg._engine.registry import registry
from helpers.every_method import METHODS, OPTIONS, K, cohort, round_inputs
from helpers.forming import never_formed

VARIANTS = [(name, {}) for name in METHODS] + [
    ("fedawa", {"variant": "released"}),
    ("fedawa", {"variant": "released", "steps": 3}),
    ("fedawa", {"variant": "cos"}),
    ("fedawa", {"layerwise": True}),
    ("fedadam", {"weights": "fedawa"}),
    ("fedadam", {"weights": "krum"}),
    ("fedavgm", {"weights": {"method": "fedawa", "variant": "released"}}),
    ("fedavgm", {"momentum": 0.0}),
    ("centred_clipping", {"center": "previous"}),
]


class OnlyProducts(Gram):
    """A Gram of which no pair of clients can be seen"""

    def refuse(self, *_, **__):
        raise AssertionError("a pair of clients was looked at")

    updates = models = distances = squared_distances = gaussian = property(refuse)

    @property
    def matrix(self):
        self.refuse()

    @matrix.setter
    def matrix(self, value):
        self.whole = Gram(value, 0)

    def cosine(self, of="updates"):
        assert of == "global", "a pair of clients was looked at"
        return super().cosine(of)

    host = property(lambda self: self)
    on_host = property(lambda self: self.whole.on_host)
    K = property(lambda self: self.whole.K)
    layerwise = property(lambda self: self.whole.layerwise)
    squares = property(lambda self: self.whole.squares)
    along_global = property(lambda self: self.whole.along_global)
    global_square = property(lambda self: self.whole.global_square)
    along_mean = property(lambda self: self.whole.along_mean)

    def __matmul__(self, v):
        return self.whole @ v

    def part(self, clients):  # for the result, without the server's own model
        return self.whole.part(clients)

    def projection(self, weights=None):
        return self.whole.projection(weights)


class Watched(InMemory):
    """Models in memory; notes every read, and hides pairs of clients from methods that declare to need none"""

    def __init__(self, pairs):
        self.pairs, self.read = pairs, []

    def _shown(self, gram):
        return gram if self.pairs else OnlyProducts(gram.matrix, gram.numel, gram.layers)

    def gram(self, table, layerwise):
        self.read.append("gram")
        return self._shown(super().gram(table, layerwise))

    def mix(self, *args):
        self.read.append("mix")
        return super().mix(*args)

    def gram_mix(self, *args):
        self.read.append("gram_mix")
        gram, results = super().gram_mix(*args)
        return self._shown(gram), results

    def gram_times(self, *args, mix=False):
        self.read.append("times_mix" if mix else "times")
        return super().gram_times(*args, mix=mix)

    def ranked_means(self, table, means, row, out=None, *, into=None, mixing=None):
        if into is None:  # else: buffers
            self.read.append("ranks")
        return super().ranked_means(table, means, row, out, into=into, mixing=mixing)

    def wide_updates(self, *args):
        self.read.append("update")
        return super().wide_updates(*args)


@pytest.mark.parametrize(("name", "more"), VARIANTS, ids=str)
def test_reads_and_products_are_as_declared(name, more, monkeypatch):
    server = fastagg.aggregator(name, **OPTIONS[name], **more)
    g, clients = cohort()
    inputs = round_inputs(name)
    pairs = server.reads == "pairs"
    access = Watched(pairs)
    if not pairs:  # that distances kept their digits is decided by the engine, from the whole Gram
        monkeypatch.setattr("fastagg._engine.cohort.Cohort.distance_gram", lambda self, by=False, **_: self.gram(by))
    layout = access.build(g, clients).layout
    result, _ = rounds.run(server, access, g, clients, None, None, None, inputs)
    assert tuple(access.read) == server.passes(layout, inputs)
    if server.reads == "weights" and not more:
        assert access.read == ["mix"]
        assert result.gram is None


@pytest.mark.parametrize(("name", "more"), VARIANTS, ids=str)
def test_reads_are_as_declared_if_no_gram_is_formed(name, more):
    server = fastagg.aggregator(name, **OPTIONS[name], **more)
    g, clients = cohort()
    inputs = round_inputs(name)
    access = Watched(pairs=True)
    with never_formed():
        declared = forming.passes(server, access.build(g, clients), access.pass_cost, inputs)
        rounds.run(server, access, g, clients, None, None, None, inputs)
    assert tuple(access.read) == declared
    assert "gram" not in access.read or server.reads == "pairs"


@pytest.mark.parametrize(
    ("name", "more", "expected"),
    [
        ("fedavg", {"pre": "nnm f=1"}, ["gram", "mix"]),
        ("fedavg", {"pre": "bucketing"}, ["mix"]),
        ("krum", {"pre": "nnm"}, ["gram", "mix"]),
        ("trimmed_mean", {"pre": "bucketing + arc f=1"}, ["gram", "ranks"]),
        ("trimmed_mean", {"pre": "bucketing"}, ["ranks"]),
        ("bulyan", {"f": 1, "pre": "clipping c=1"}, ["gram", "ranks"]),
        ("ldawa", {"pre": "nnm f=1"}, ["gram", "mix"]),  # its Gram of layers serves the stages too
        ("fedawa", {"pre": "nnm f=1", "layerwise": True}, ["gram", "mix"]),
        ("fedawa", {"pre": "nnm f=1", "variant": "released"}, ["gram", "mix"]),
        ("fedavgm", {"pre": "arc", "weights": "krum"}, ["gram", "mix"]),
        ("fedavgm", {"pre": "arc f=1"}, ["gram", "mix"]),
    ],
    ids=str,
)
def test_reads_with_stages(name, more, expected):
    server = fastagg.aggregator(name, **more)
    g, clients = cohort()
    access = Watched(pairs=True)
    with never_formed():  # stages have it formed
        assert list(forming.passes(server, access.build(g, clients), access.pass_cost, {})) == expected
        result, _ = rounds.run(server, access, g, clients, None, None, None, {})
    assert access.read == expected
    assert result.gram is None or result.gram.formed


@pytest.mark.parametrize("name", METHODS)
def test_declarations_are_whole(name):
    cls = registry()[name]
    assert cls.reads in ("weights", "products", "pairs", "ranks", "models")
    assert cls.produces in ("global", "personalised", "clusters")
    options, inputs = cls.example_round(K)
    server = cls(**options)
    declared = {spec.name for spec in server.round_inputs}
    assert inputs.keys() <= declared
    assert {spec.name for spec in server.round_inputs if spec.required} <= inputs.keys()
    g, clients = cohort()
    result = server.aggregate(g, clients, **inputs)
    for value in server.client_values:
        found = getattr(result, value.name)
        assert found is None or found.shape[value.axis] == K
    assert server.min_clients <= K


def test_a_guard_that_cannot_be_passed():
    """The Gram without pairs refuses what it is to refuse"""
    gram = OnlyProducts(torch.eye(4, dtype=torch.float64), 3)
    assert gram.squares.tolist() == [1, 1, 1]
    assert (gram @ torch.ones(3, dtype=torch.float64)).tolist() == [1, 1, 1]
    for look in (lambda: gram.matrix, lambda: gram.updates(), lambda: gram.cosine(), lambda: gram.squared_distances()):
        with pytest.raises(AssertionError, match="a pair of clients"):
            look()
