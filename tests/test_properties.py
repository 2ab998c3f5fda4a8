"""What holds for any models and options: the native kernels against the float64 reference, and every method's promises.

Hypothesis draws names, shapes, dtypes, memory, clients, machine and options, and a seed that the values come from. The
default profile generates 818 cases, the same every time; nightly 13,300, others every time: `make test-nightly`, or
FASTAGG_HYPOTHESIS=nightly python -m pytest tests/test_properties.py tests/test_fuzz.py
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import assume
from hypothesis import strategies as st

import fastagg
from fastagg._engine import backends
from fastagg._engine import table as tables
from fastagg._engine.dtypes import FLOATING
from fastagg._engine.examples import example_batches
from fastagg._engine.registry import registry
from helpers.cohort import clone
from helpers.every_method import METHODS, OF_EXAMPLE_NET, OPTIONS, TRAINERS, models, of_some, round_inputs
from helpers.every_method import cohort as net_round
from helpers.odd_models import On, Round, as_plain, bytes_of, machines, memory, rounds
from helpers.profiles import cases, check_number_of_cases
from helpers.states import frozen

pytestmark = pytest.mark.skipif(backends.cpu is None, reason="no native module")
layerings = st.sampled_from([None, lambda key: key, lambda key: "all", lambda key: str(len(key) % 3)])
threads = st.integers(1, 4)


# ---- kernels ----


def gram_tolerance(r, keys):
    """Of an entry, relative to sqrt(G_ii G_jj): the accumulation policy of csrc/cpu/kernels-inl.h"""
    used = [r.plain_g[key] for key in keys]
    if all(x.dtype == torch.float64 for x in used):
        return 2 * (sum(x.numel() for x in used) + 64) * 2.0**-53  # two float64 sums in any order
    return 2e-6 if r.worst else 1e-6


def assert_gram(got, expected, tolerance):
    """[K+1, K+1]"""
    assert torch.equal(got, got.mT)
    norms = expected.diagonal().sqrt()
    bound = tolerance * norms[:, None] * norms + 1e6 * 2.0**-1074  # squares that leave float64 at its lower end
    assert ((got - expected).abs() <= bound).all()


@cases(100, 1500, r=rounds(), machine=machines(), layers=layerings, data=st.data())
def test_gram(r, machine, layers, data):
    floats = [key for key, value in r.plain_g.items() if value.dtype in FLOATING]
    params = data.draw(st.none() | st.sets(st.sampled_from(floats), min_size=1)) if floats else None
    before = memory(r.g, *r.clients)
    with On(*machine):
        got = fastagg.gram(r.g, r.clients, layerwise=True, params=params, layers=layers)
        whole = fastagg.gram(r.g, r.clients, params=params, layers=layers)
    assert memory(r.g, *r.clients) == before
    expected = fastagg.gram(
        r.plain_g, r.plain_clients, layerwise=True, params=params, layers=layers, backend="reference"
    )
    assert got.layers == expected.layers
    assert torch.equal(got.numel, expected.numel)
    assert torch.equal(whole.matrix, got.model().matrix)
    name = layers or tables.module_of
    chosen = {key for key in floats if is_parameter(key)} if params is None else params
    for layer, a, b in zip(got.layers, got.matrix, expected.matrix, strict=True):
        assert_gram(a, b, gram_tolerance(r, [key for key in chosen if name(key) == layer]))
    assert_gram(whole.matrix, expected.model().matrix, gram_tolerance(r, chosen))


@st.composite
def mixing(draw, K, several, L):
    """Weights [K], [M, K], [L, K] or [L, M, K], which float32 can hold: 16-bit models are summed in it"""
    M = draw(st.integers(1, 6))
    shape = (L,) * (L > 0) + (M,) * several + (K,)
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    kind = draw(st.sampled_from(["shares", "any", "wide", "signs"]))
    if kind == "wide":
        return rng.choice([-1, 1], shape) * 10.0 ** rng.uniform(-30, 30, shape)
    w = {"shares": rng.random(shape), "any": rng.standard_normal(shape), "signs": rng.integers(-1, 2, shape)}[kind]
    return w / K if kind == "shares" else w.astype(np.float64)


def guarded(like):
    """A state dict to write to, in the middle of memory full of 77 that must stay so; and that memory"""
    whole = {key: torch.full((x.numel() + 134,), 77).to(x.dtype) for key, x in like.items()}
    return {key: x[67:-67].view(like[key].shape) for key, x in whole.items()}, whole


def assert_mixed(got, r, weights):
    """weights [K] by key: one rounding of a float64 sum, of a float32 one for 16-bit types"""
    for key, like in r.plain_g.items():
        stacked = torch.stack([sd[key].flatten() for sd in r.plain_clients])  # [K, n]
        value = got[key].flatten()
        if like.dtype not in FLOATING:
            assert torch.equal(value, stacked.amax(0))
            continue
        w = torch.from_numpy(weights[key])
        exact, size = w @ stacked.double(), w.abs() @ stacked.double().abs()
        # both sums are off by K roundings; 16-bit ones round the weights too, and numbers under 2^-126 on their own
        half = like.dtype in (torch.bfloat16, torch.float16)
        error = (r.K + 1) * (2.0**-24 * 1.001 * size + 2.0**-149 if half else 2.0**-52 * size + 2.0**-1074)
        low, high = (exact - error).to(like.dtype), (exact + error).to(like.dtype)  # rounding keeps the order
        sure = size < (torch.finfo(torch.float32).max if half else 1e308)
        assert ((low <= value) & (value <= high))[sure].all(), key


@cases(100, 1500, r=rounds(), machine=machines(), layers=layerings, data=st.data())
def test_mix(r, machine, layers, data):
    name = layers or tables.module_of
    names = list(dict.fromkeys(name(key) for key in r.clients[0]))
    layerwise, several = data.draw(st.booleans()), data.draw(st.booleans())
    weights = data.draw(mixing(r.K, several, len(names) * layerwise))
    M = weights.shape[-2] if several else 1
    before = memory(*r.clients)
    outs, around = zip(*(guarded(r.plain_g) for _ in range(M)), strict=True)
    with On(*machine):
        options = {"layerwise": layerwise, "layers": layers, "on_nonfinite": "pass"}
        results = fastagg.mix(r.clients, weights, out=list(outs) if several else outs[0], **options)
        fresh = fastagg.mix(r.clients, weights, **options)
    assert memory(*r.clients) == before
    for m, (result, other) in enumerate(zip(results, fresh, strict=True) if several else [(results, fresh)]):
        assert list(result) == list(r.clients[0])
        for key, value in result.items():
            assert value is outs[m][key]
            for edge in (around[m][key][:67], around[m][key][-67:]):
                assert torch.equal(edge, torch.full((67,), 77).to(edge.dtype))
        assert_same_bits_or_nan(as_plain(other), result)
        row = {key: weights[names.index(name(key))] if layerwise else weights for key in result}
        assert_mixed(result, r, {key: w[m] if several else w for key, w in row.items()})


def assert_same_bits_or_nan(a, b):
    assert list(a) == list(b)
    for key in a:
        assert a[key].dtype == b[key].dtype
        assert torch.equal(a[key].nan_to_num(), b[key].nan_to_num()), key


@cases(60, 1000, r=rounds(), machine=machines(), layers=layerings, data=st.data())
def test_gram_mix_is_gram_and_mix(r, machine, layers, data):
    layerwise, several = data.draw(st.booleans()), data.draw(st.booleans())
    L = len(fastagg.gram(r.g, r.clients, layerwise=True, layers=layers).layers)
    weights = data.draw(mixing(r.K, several, L * layerwise))
    options = {"layerwise": layerwise, "layers": layers}
    with On(*machine):
        gram, mixed = fastagg.gram_mix(r.g, r.clients, weights, **options, on_nonfinite="pass")
        assert torch.equal(gram.matrix, fastagg.gram(r.g, r.clients, **options).matrix)
        again = fastagg.mix(r.clients, weights, **options, on_nonfinite="pass")
    for a, b in zip(mixed, again, strict=True) if several else [(mixed, again)]:
        a, b = as_plain(a), as_plain(b)
        assert list(a) == list(r.g)
        assert_same_bits_or_nan(a, {key: b[key] for key in a})


@cases(60, 1000, r=rounds(), machine=machines(), data=st.data())
def test_dots(r, machine, data):
    """The gradient of mix: <left, client> for every client"""
    T = len(r.g)
    rows = data.draw(st.lists(st.integers(0, 2), min_size=T, max_size=T))
    left = [*r.plain_clients[:3], r.plain_g]
    to_flat = lambda models: [sd[key] for sd in models for key in r.g]  # noqa: E731
    clients = [t if isinstance(t, torch.Tensor) else tables.as_tensor(t, "", "") for t in to_flat(r.clients)]
    with On(*machine):
        got = torch.ops.fastagg.dots(to_flat(left), clients, rows, 3)
    expected, scale = torch.zeros_like(got), torch.zeros_like(got)
    narrow = False
    for key, row in zip(r.g, rows, strict=True):
        if r.plain_g[key].dtype in FLOATING:
            a, b = (torch.stack([sd[key].double().flatten() for sd in models]) for models in (left, r.plain_clients))
            expected[row] += a @ b.T
            scale[row] += a.norm(dim=1)[:, None] * b.norm(dim=1)
            narrow |= r.plain_g[key].dtype != torch.float64
    tolerance = 2e-6 if narrow else 2e5 * 2.0**-53
    assert ((got - expected).abs() <= tolerance * scale + 1e6 * 2.0**-1074).all()


@cases(60, 1000, r=rounds(), machine=machines(), other=threads, data=st.data())
def test_threads_memory_and_order_change_no_bit(r, machine, other, data):
    weights = data.draw(mixing(r.K, False, 0))
    order = data.draw(st.permutations(range(r.K)))
    with On(*machine):
        gram, mixed = fastagg.gram_mix(r.g, r.clients, weights, on_nonfinite="pass")
    with On(other, machine[1], True):
        plain_gram, plain_mixed = fastagg.gram_mix(r.plain_g, r.plain_clients, weights, on_nonfinite="pass")
        moved = fastagg.gram(r.plain_g, [r.plain_clients[k] for k in order])
    assert torch.equal(gram.matrix, plain_gram.matrix)
    assert_same_bits_or_nan(as_plain(mixed), plain_mixed)
    index = torch.tensor([0, *(k + 1 for k in order)])
    assert torch.equal(moved.matrix, gram.matrix[index][:, index])


def poisoned(data, r, keys):
    """The clients of a round, of which one or two have a NaN or an infinity in one of the keys; and who has it where"""
    clients = [clone(sd) for sd in r.plain_clients]
    bad = data.draw(st.lists(st.integers(0, r.K - 1), min_size=1, max_size=2, unique=True))
    places = {}
    for k in bad:
        buffers = [key for key in keys if not is_parameter(key)]  # not in the Gram: seen only when they are mixed
        key = data.draw(st.sampled_from(buffers if buffers and data.draw(st.booleans()) else keys))
        places[k] = key, data.draw(st.integers(0, clients[k][key].numel() - 1))
        clients[k][key].view(-1)[places[k][1]] = data.draw(st.sampled_from([math.nan, math.inf, -math.inf]))
    return clients, dict(sorted(places.items()))


def is_parameter(key):
    return key.rpartition(".")[2] not in tables.BUFFER_NAMES


@cases(60, 1000, r=rounds(), machine=machines(), data=st.data())
def test_kernels_see_what_is_not_finite(r, machine, data):
    keys = [key for key, x in r.plain_g.items() if x.dtype in FLOATING and x.numel()]
    assume(keys)
    clients, bad = poisoned(data, r, keys)
    weights = data.draw(mixing(r.K, False, 0))
    with On(*machine):
        gram = fastagg.gram(r.plain_g, clients).matrix
        mixed = fastagg.mix(clients, weights, on_nonfinite="pass")
        for call in (fastagg.mix, lambda *given: fastagg.gram_mix(r.plain_g, *given)):
            with pytest.raises(fastagg.NonFiniteError, match=f"client {next(iter(bad))}: key") as caught:
                call(clients, weights)
            assert caught.value.clients == list(bad)
    for key, at in bad.values():
        assert not mixed[key].view(-1)[at].isfinite()
    lost = torch.tensor([k in bad and is_parameter(bad[k][0]) for k in range(-1, r.K)])
    assert torch.equal(~gram.diagonal().isfinite(), lost)
    expected = fastagg.gram(r.plain_g, r.plain_clients, backend="reference").matrix
    used = [key for key in r.plain_g if is_parameter(key) and r.plain_g[key].dtype in FLOATING]
    assert_gram(gram[~lost][:, ~lost], expected[~lost][:, ~lost], gram_tolerance(r, used))


# ---- methods ----

# Their steps reach further than to a mean, or their arithmetic to the fourth power of a distance: they may say that
# models are too large
LIMITED = {"fedavgm", "fedadam", "fedyogi", "fedadagrad", "fednova", "fedawa"}
IDS = [*range(-2, 20), *(f"hospital {i}" for i in range(18)), "7", ""]


@st.composite
def net_rounds(draw, least):
    """Rounds of the model that is trained on proxy data"""
    g, clients = net_round(draw(st.integers(least, 12)), draw(st.integers(0, 99)), draw(st.sampled_from([1e-3, 0.1])))
    return Round(g, clients, g, clients, False)


@dataclass
class Given:
    """What one method is given"""

    name: str
    options: dict
    round: Round
    sizes: list | None
    ids: list
    inputs: dict

    def server(self, **more):
        return fastagg.aggregator(self.name, **self.options, **more)

    def run(self, server, clients=None, order=None):
        """One round of the clients (default: the odd ones) in this order (default: all, as they are)"""
        order = list(range(self.round.K)) if order is None else list(order)
        if self.name in TRAINERS:  # torch trains its model, and promises no bits for any number of threads
            torch.set_num_threads(1)
        cls, clients = registry()[self.name], self.round.clients if clients is None else clients
        specs = {spec.name: spec for spec in cls.round_inputs}
        inputs = {k: of_some(specs[k], v, order) for k, v in self.inputs.items()}
        sizes = None if self.sizes is None else [self.sizes[k] for k in order]
        try:
            return server.aggregate(
                self.round.g, [clients[k] for k in order], sizes, [self.ids[k] for k in order], **inputs
            )
        except fastagg.NonFiniteError as error:
            if self.name in LIMITED and ": with " in str(error):  # of a finite client
                return None
            raise
        except fastagg.InputError as error:
            if self.name not in LIMITED or "too large" not in str(error):
                raise
            return None


@st.composite
def tasks(draw, name, least=5):
    """least: Krum needs five clients to do without one"""
    r = draw(net_rounds(least) if name in OF_EXAMPLE_NET else rounds(least, many=False))
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    options, inputs = dict(OPTIONS[name]), {}
    fields = {f.name for f in dataclasses.fields(registry()[name])}
    if "layerwise" in fields:
        options["layerwise"] = draw(st.booleans())
    if "variant" in fields:
        options["variant"] = draw(st.sampled_from(["released", "paper", "cos"]))
    if "epochs" in fields:
        options["epochs"] = 1
    for spec in registry()[name].round_inputs:
        if spec.kind == "proxy":
            inputs[spec.name] = example_batches()
        elif spec.kind == "server_model":
            inputs |= round_inputs(name)
        elif spec.kind == "versions":
            inputs[spec.name] = np.zeros(r.K)
        elif spec.pairwise:
            if spec.required or draw(st.booleans()):
                inputs[spec.name] = rng.random((r.K, r.K))
        elif spec.entry_dims == 1:
            if options.get("variant") != "cos":  # FedAWA's, which takes no labels
                inputs[spec.name] = rng.random((r.K, 4)) + 0.1
        elif spec.required or (spec.from_clients and draw(st.booleans())):
            inputs[spec.name] = rng.integers(1, 9, r.K)
    sizes = draw(st.none() | st.just([*rng.integers(0, 500, r.K - 1).tolist(), 1]))
    return Given(name, options, r, sizes, draw(st.permutations(IDS))[: r.K], inputs)


def found(result, ids):
    """All that a result says, by the clients' ids and not their order: models and weights, to the last bit"""
    if result is None:
        return None
    several = models(result)
    names = ["the model"]
    if isinstance(result, list):
        names = ids if result.clusters is None else map(frozenset, result.clusters)
    by_name = {}
    for name, sd in zip(names, several, strict=True):
        assert (sd is None) == (name in result.dropped)
        if sd is None:
            continue
        columns = dict(zip(ids, sd.weights.reshape(-1, len(ids)).T.tolist(), strict=True))
        assert all(not any(columns.pop(who)) for who in result.dropped)
        tensors = {key: (x.dtype, tuple(x.shape), bytes_of(x.contiguous())) for key, x in as_plain(sd).items()}
        by_name[name] = tensors, columns
    return by_name


each_method = pytest.mark.parametrize("name", METHODS)


@each_method
@cases(5, 100, data=st.data(), machine=machines(), other=threads)
def test_a_round(name, data, machine, other):
    given = data.draw(tasks(name))
    r = given.round
    before = memory(r.g, *r.clients)
    with On(*machine):
        server = given.server()
        result = given.run(server)
    assert is_finite(server.state_dict())
    with On(other, *machine[1:]):
        again = given.run(given.server())
    assert memory(r.g, *r.clients) == before
    assert found(result, given.ids) == found(again, given.ids)
    for sd in models(result) if result is not None else ():
        assert list(sd) == list(r.g)
        assert torch.isfinite(sd.weights).all()
        for key, value in as_plain(sd).items():
            assert isinstance(sd[key], torch.Tensor) == isinstance(r.g[key], torch.Tensor)
            assert value.shape == r.plain_g[key].shape
            assert value.dtype == r.plain_g[key].dtype
            assert not value.requires_grad
            if value.dtype in FLOATING:
                assert torch.isfinite(value).all()


@each_method
@cases(5, 100, data=st.data(), machine=machines())
def test_the_order_of_clients_changes_no_bit(name, data, machine):
    given = data.draw(tasks(name))
    one, other = given.server(), given.server()
    with On(*machine):
        for _ in range(2):  # a second round, for what is remembered
            order = data.draw(st.permutations(range(given.round.K)))
            a, b = given.run(one), given.run(other, order=order)
            assert found(a, given.ids) == found(b, [given.ids[k] for k in order])
            assert is_finite(one.state_dict())


@each_method
@cases(8, 100, data=st.data(), machine=machines())
def test_clients_that_are_not_finite(name, data, machine):
    """They are named, and nothing is remembered of the round; or left out, as if they had not been there"""
    given = data.draw(tasks(name, least=7))
    r, ids = given.round, given.ids
    keys = [key for key, x in r.plain_g.items() if x.dtype in FLOATING and x.numel()]
    assume(keys)
    clients, bad = poisoned(data, r, keys)
    good = [k for k in range(r.K) if k not in bad]
    with On(*machine):
        # without drops as well: a server optimiser may find finite clients too large
        raising, dropping, without = given.server(), *(given.server(on_bad_client="drop") for _ in range(2))
        for server in (raising, dropping, without):
            given.run(server, r.plain_clients)
        state = frozen(raising.state_dict())
        with pytest.raises(fastagg.NonFiniteError) as caught:
            given.run(raising, clients)
        assert frozen(raising.state_dict()) == state
        a, b = given.run(dropping, clients), given.run(without, clients, good)
    assert any(f"client {k}" in str(caught.value) for k in bad)
    assert found(a, ids) == found(b, [ids[k] for k in good])
    if a is not None:
        assert [name for name in a.dropped if name not in b.dropped] == [ids[k] for k in bad]
        assert name in LIMITED or not b.dropped
    assert frozen(dropping.state_dict()) == frozen(without.state_dict())


def is_finite(state):
    """What is remembered has no NaN"""
    if isinstance(state, dict):
        return all(map(is_finite, state.values()))
    return not isinstance(state, torch.Tensor) or bool(state.isfinite().all())


def test_number_of_cases(request):
    check_number_of_cases(request, __name__, 12_000)
