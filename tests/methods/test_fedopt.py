"""The server optimisers against their recurrences, written element by element on flattened float64 vectors."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fastagg
from fastagg import fedadagrad, fedadam, fedavgm, fedyogi
from fastagg.methods.fedopt import FedAdagrad, FedAdam, FedAvgM, FedYogi
from helpers.cohort import assert_same_bits, assert_unchanged, make_with_batch_norm, snapshot

SHAPES = {"fc.weight": (9, 5), "fc.bias": (9,), "bn.weight": (9,), "bn.running_mean": (9,), "bn.running_var": (9,)}
PARAMS = ("fc.weight", "fc.bias", "bn.weight")
BUFFERS = ("bn.running_mean", "bn.running_var")
SIZES = (120, 30, 75, 210)
CLASSES = (FedAvgM, FedAdam, FedYogi, FedAdagrad)
ADAPTIVE = CLASSES[1:]
by_class = pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.name)


def cohort(K=4, dtype=torch.float64, seed=0, scale=1e-2):
    return make_with_batch_norm(K, SHAPES, dtype, seed=seed, scale=scale)


def flat(sd):
    return [float(x) for key in PARAMS for x in sd[key].double().reshape(-1)]


def naive(cls, options, memory, g, clients, sizes):
    """One round of Reddi et al., Algorithms 2 and 5 (Hsu et al. for FedAvgM), a number at a time"""
    o = SimpleNamespace(**options)
    total = sum(sizes)
    x, ws = flat(g), [flat(sd) for sd in clients]
    new = []
    for i in range(len(x)):
        delta = sum(size / total * (w[i] - x[i]) for size, w in zip(sizes, ws, strict=True))
        if cls is FedAvgM:
            m = o.momentum * memory.get(i, 0.0) + delta
            memory[i] = m
            new.append(x[i] + o.lr * (delta + o.momentum * m if vars(o).get("nesterov") else m))
            continue
        m, v = memory.get(i, (0.0, o.tau**2))
        m = o.beta1 * m + (1 - o.beta1) * delta
        if cls is FedAdagrad:
            v = v + delta**2
        elif cls is FedYogi:
            v = v - (1 - o.beta2) * delta**2 * (0 if v == delta**2 else math.copysign(1, v - delta**2))
        else:
            v = o.beta2 * v + (1 - o.beta2) * delta**2
        memory[i] = m, v
        new.append(x[i] + o.lr * m / (math.sqrt(v) + o.tau))
    return torch.tensor(new, dtype=torch.float64)


OPTIONS = [
    (FedAvgM, {"lr": 1.0, "momentum": 0.9}),
    (FedAvgM, {"lr": 0.3, "momentum": 0.5}),
    (FedAvgM, {"lr": 0.7, "momentum": 0.9, "nesterov": True}),
    (FedAdam, {"lr": 0.01, "beta1": 0.9, "beta2": 0.99, "tau": 1e-3}),
    (FedAdam, {"lr": 0.3, "beta1": 0.2, "beta2": 0.6, "tau": 0.05}),
    (FedYogi, {"lr": 0.01, "beta1": 0.9, "beta2": 0.99, "tau": 1e-3}),
    (FedYogi, {"lr": 0.3, "beta1": 0.2, "beta2": 0.6, "tau": 0.05}),
    (FedAdagrad, {"lr": 0.1, "beta1": 0.0, "tau": 1e-3}),
    (FedAdagrad, {"lr": 0.03, "beta1": 0.7, "tau": 0.02}),
]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize(("cls", "options"), OPTIONS, ids=str)
def test_equals_the_recurrence_over_rounds(cls, options, dtype):
    server, memory, rtol = cls(**options), {}, 1e-9 if dtype == torch.float64 else 1e-6
    g, _ = cohort(dtype=dtype)
    for t in range(4):
        _, others = cohort(dtype=dtype, seed=t)
        start, _ = cohort(dtype=dtype, seed=t)
        clients = [{k: g[k] + (sd[k] - start[k]) if k in PARAMS else sd[k] for k in sd} for sd in others]
        expected = naive(cls, options, memory, g, clients, SIZES)
        before = snapshot(g, *clients)
        result = server.aggregate(g, clients, SIZES)
        assert_unchanged([g, *clients], before)
        actual = torch.tensor(flat(result), dtype=torch.float64)
        assert (actual - torch.tensor(flat(g))).abs().max() > 1e-4
        torch.testing.assert_close(actual, expected, rtol=rtol, atol=rtol)
        shares = torch.tensor(SIZES, dtype=torch.float64) / sum(SIZES)
        for key in BUFFERS:
            mean = torch.tensordot(shares, torch.stack([sd[key] for sd in clients]).double(), 1)
            torch.testing.assert_close(result[key], mean.to(dtype), rtol=2e-7, atol=1e-7)
        assert result["bn.num_batches_tracked"] == max(int(sd["bn.num_batches_tracked"]) for sd in [g, *clients])
        torch.testing.assert_close(result.weights, shares)
        assert list(result) == list(g)
        assert all(result[key].dtype == g[key].dtype for key in g)
        g = dict(result)


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6)], ids=str)
def test_momentum_is_that_of_torch(dtype, tolerance, nesterov):
    """DiLoCo: torch's SGD on the mean of g - w_k as its gradient; the outer lr 0.7 and momentum 0.9 are the paper's"""
    g, _ = cohort(dtype=dtype)
    parameters = {key: torch.nn.Parameter(g[key].clone()) for key in PARAMS}
    outer = torch.optim.SGD(parameters.values(), lr=0.7, momentum=0.9, nesterov=nesterov)
    server = FedAvgM(lr=0.7, momentum=0.9, nesterov=nesterov)
    for t in range(5):
        start, others = cohort(dtype=dtype, seed=t, scale=0.1)
        clients = [{k: g[k] + (sd[k] - start[k]) if k in PARAMS else sd[k] for k in sd} for sd in others]
        for key, parameter in parameters.items():
            parameter.grad = sum(g[key] - sd[key] for sd in clients) / len(clients)
        outer.step()
        g = dict(server.aggregate(g, clients))
        for key, parameter in parameters.items():
            torch.testing.assert_close(g[key], parameter.data, rtol=tolerance, atol=tolerance)


def test_defaults_are_the_papers():
    assert (FedAvgM().lr, FedAvgM().momentum) == (1.0, 0.9)
    for cls in (FedAdam, FedYogi):
        assert (cls().beta1, cls().beta2, cls().tau) == (0.9, 0.99, 1e-3)
    assert (FedAdagrad().beta1, FedAdagrad().tau) == (0.0, 1e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@by_class
def test_sixteen_bits_keep_wide_moments(cls, dtype):
    """The mean update reaches the moments as float32: no digit of it is lost to the models' 8 or 11 bits."""
    g, clients = cohort(dtype=dtype, scale=3e-2)
    server = cls()
    result = server.aggregate(g, clients, SIZES)
    options = {
        name: getattr(server, name) for name in ("lr", "momentum", "beta1", "beta2", "tau") if hasattr(server, name)
    }
    expected = naive(cls, options, {}, g, clients, SIZES)
    torch.testing.assert_close(torch.tensor(flat(result), dtype=torch.float64), expected, rtol=2**-8, atol=2**-9)
    shares = np.array(SIZES) / sum(SIZES)
    start = torch.tensor(flat(g), dtype=torch.float64)
    moved = [torch.tensor(flat(sd), dtype=torch.float64) - start for sd in clients]
    delta = sum(s * d for s, d in zip(shares, moved, strict=True))
    m = torch.cat([server.state_dict()["m"][key].reshape(-1) for key in PARAMS])
    assert m.dtype == torch.float32
    scale = 1.0 if cls is FedAvgM else 1 - server.beta1
    torch.testing.assert_close(m.double(), scale * delta, rtol=2**-23, atol=1e-15)  # 1e-15: of the float64 sum


def test_a_sixteen_bit_update_is_summed_up_piece_by_piece(monkeypatch):
    monkeypatch.setattr("fastagg._engine.wide.CHUNK", 7)
    g, clients = cohort(dtype=torch.bfloat16)
    pieces, whole = FedAdam(), FedAdam()
    result = pieces.aggregate(g, clients, SIZES)
    monkeypatch.undo()
    assert_same_bits(result, whole.aggregate(g, clients, SIZES))
    for moment in ("m", "v"):
        assert_same_bits(pieces.state_dict()[moment], whole.state_dict()[moment])


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("mixed", [False, True], ids=["one dtype", "float32 beside"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_without_momentum_it_is_fedavg_bit_for_bit(dtype, mixed, nesterov):
    server = FedAvgM(momentum=0.0, lr=1.0, nesterov=nesterov)
    for seed, scale in enumerate((1e-3, 0.3, 3.0)):
        g, clients = cohort(7, dtype=dtype, seed=seed, scale=scale)
        if mixed:
            for sd in (g, *clients):
                sd["bn.weight"] = sd["bn.weight"].float()
        sizes = range(3, 10)
        assert_same_bits(server.aggregate(g, clients, sizes), fastagg.fedavg(g, clients, sizes))
        m, exact = server.state_dict()["m"]["fc.weight"], {k: v.double() for k, v in g.items()}
        for size, sd in zip(sizes, clients, strict=True):
            exact["fc.weight"] = exact["fc.weight"] + size / sum(sizes) * (sd["fc.weight"].double() - g["fc.weight"])
        delta = exact["fc.weight"] - g["fc.weight"]
        torch.testing.assert_close(m.double(), delta, rtol=2**-23, atol=1e-14)


@settings(deadline=None, max_examples=25, derandomize=True)
@given(st.integers(1, 6), st.integers(0, 10**6), st.floats(1e-3, 10.0), st.sampled_from(CLASSES), st.data())
def test_properties(K, seed, lr, cls, data):
    g, clients = cohort(K, seed=seed)
    sizes = data.draw(st.lists(st.integers(1, 1000), min_size=K, max_size=K))
    order = data.draw(st.permutations(range(K)))
    result = cls(lr=lr).aggregate(g, clients, sizes)
    permuted = cls(lr=lr).aggregate(g, [clients[k] for k in order], [sizes[k] for k in order])
    torch.testing.assert_close(permuted.weights, result.weights[list(order)], rtol=1e-12, atol=0)
    for key in PARAMS:  # rounding of delta, 1e-16, comes out as lr / tau times that
        torch.testing.assert_close(permuted[key], result[key], rtol=1e-10, atol=1e-10)
    still = cls(lr=lr).aggregate(g, [g] * K, sizes)
    for key in PARAMS:
        torch.testing.assert_close(still[key], g[key], rtol=1e-10, atol=1e-10)
    result = FedAvgM(momentum=0.0).aggregate(g, clients, sizes)
    mean = fastagg.fedavg(g, clients, sizes)
    for key in mean:
        torch.testing.assert_close(result[key], mean[key], rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("cls", ADAPTIVE, ids=lambda cls: cls.name)
def test_statistics_never_take_such_steps(cls):
    """lr 1000 would send a variance of 1 below zero at once."""
    g, clients = cohort()
    for sd in clients:
        sd["bn.running_var"] = sd["bn.running_var"] * 0.5
    result = cls(lr=1000.0).aggregate(g, clients, SIZES)
    assert (result["bn.running_var"] >= 0).all()
    assert (result["fc.weight"] - g["fc.weight"]).abs().max() > 10


@by_class
def test_degenerate_cohorts(cls):
    g, clients = cohort(dtype=torch.float32)
    far = [{k: v + 1e6 if v.is_floating_point() else v for k, v in sd.items()} for sd in clients]
    near = [{k: v + 1e-20 if v.is_floating_point() else v for k, v in g.items()}] * 2
    zero = {k: torch.zeros_like(v) for k, v in g.items()}
    tiny = {k: torch.full_like(v, 1e-20) if v.is_floating_point() else v for k, v in zero.items()}
    rounds = [(g, clients[:1]), (g, [clients[0]] * 3), (g, [g] * 2), (g, [g, clients[0]]), (g, far), (g, near)]
    for start, models in [*rounds, (zero, [tiny] * 2)]:
        server = cls()
        for _ in range(3):
            result = server.aggregate(start, models)
            assert all(torch.isfinite(value.double()).all() for value in result.values())
            for moment in server.moments:
                assert all(torch.isfinite(t).all() for t in server.state_dict()[moment].values())


@by_class
def test_out_is_written_in_place(cls):
    g, clients = cohort(dtype=torch.float32)
    expected = cls().aggregate(g, clients, SIZES)
    out = {key: torch.zeros_like(value) for key, value in g.items()}
    result = cls().aggregate(g, clients, SIZES, out=out)
    assert all(result[key] is out[key] for key in out)
    assert_same_bits(result, expected)
    with pytest.raises(fastagg.InputError, match="shares memory with an input"):
        cls().aggregate(g, clients, SIZES, out=g)


@by_class
def test_numpy_in_numpy_out(cls):
    g, clients = cohort(dtype=torch.float32)
    models = [{k: v.numpy() for k, v in sd.items()} for sd in [g, *clients]]
    server, other = cls(), cls()
    out = {k: np.zeros_like(v) for k, v in models[0].items()}
    for kwargs in ({}, {"out": out}):
        expected = other.aggregate(g, clients, SIZES)
        result = server.aggregate(models[0], models[1:], SIZES, **kwargs)
        assert all(isinstance(value, np.ndarray) for value in result.values())
        assert_same_bits({k: torch.from_numpy(v) for k, v in result.items()}, expected)
    assert all(result[k] is out[k] for k in out)


def test_numpy_bfloat16():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    g, clients = ({"w": np.array(x, dtype=ml_dtypes.bfloat16)} for x in ([1.0, 2.0], [1.5, 2.5]))
    result = fedavgm(g, [clients] * 2, lr=2.0)
    assert result["w"].dtype == ml_dtypes.bfloat16
    assert result["w"].tolist() == [2.0, 3.0]


@by_class
def test_state_round_trip(cls, tmp_path):
    g, clients = cohort(dtype=torch.float32)
    server = cls()
    server.aggregate(g, clients, SIZES)
    state = server.state_dict()
    kept = {moment: {k: v.clone() for k, v in state[moment].items()} for moment in server.moments}
    torch.save(state, tmp_path / "state.pt")
    resumed = cls()
    resumed.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    first = cls().aggregate(g, clients, SIZES)
    expected = server.aggregate(g, clients, SIZES)
    assert not torch.equal(first["fc.weight"], expected["fc.weight"])
    assert_same_bits(resumed.aggregate(g, clients, SIZES), expected)
    for moment in server.moments:  # a state_dict is a snapshot: later rounds leave it alone
        assert_same_bits(state[moment], kept[moment])
    mine = server.state_dict()
    for moment in server.moments:  # and what is done to it does not reach the server
        for tensor in mine[moment].values():
            tensor.fill_(math.nan)
        assert all(torch.isfinite(tensor).all() for tensor in server.state_dict()[moment].values())
    resumed.load_state_dict(cls().state_dict())
    assert_same_bits(resumed.aggregate(g, clients, SIZES), first)


@pytest.mark.parametrize("change", ["method", "missing", "shape", "key", "nan", "integers", "type", "negative", "name"])
def test_a_bad_state_changes_nothing(change):
    g, clients = cohort(dtype=torch.float32)
    server = FedAdam()
    server.aggregate(g, clients, SIZES)
    before = server.state_dict()
    bad = {k: dict(v) if isinstance(v, dict) else v for k, v in before.items()}
    key = "fc.bias"
    if change == "method":
        bad["method"] = "fedyogi"
    elif change == "missing":
        del bad["v"]
    elif change == "shape":
        bad["v"][key] = bad["v"][key][:3]
    elif change == "key":
        del bad["m"][key]
    elif change == "nan":
        bad["m"][key] = bad["m"][key] * math.nan
    elif change == "integers":
        bad["m"][key] = bad["m"][key].long()
    elif change == "type":
        bad["m"] = list(bad["m"].values())
    elif change == "negative":
        bad["v"][key] = -bad["v"][key]
    else:
        bad["m"][5] = bad["m"].pop(key)
    with pytest.raises(fastagg.InputError, match="fedadam state"):
        server.load_state_dict(bad)
    for moment in ("m", "v"):
        assert_same_bits(server.state_dict()[moment], before[moment])


@by_class
def test_a_changed_model_is_refused(cls):
    g, clients = cohort()
    server = cls()
    server.aggregate(g, clients, SIZES)
    before = server.state_dict()
    shape = [{**sd, "fc.bias": sd["fc.bias"][:4].clone()} for sd in [g, *clients]]
    fewer = [{k: v for k, v in sd.items() if k != "fc.bias"} for sd in [g, *clients]]
    more = [{**sd, "head.weight": sd["fc.bias"].clone()} for sd in [g, *clients]]
    for models, key in ((shape, "fc.bias"), (fewer, "fc.bias"), (more, "head.weight")):
        with pytest.raises(fastagg.InputError, match=f"{cls.name}: '{key}' is "):
            server.aggregate(models[0], models[1:], SIZES)
    for moment in server.moments:
        assert_same_bits(server.state_dict()[moment], before[moment])
    wider = [{k: v.float() if v.is_floating_point() else v for k, v in sd.items()} for sd in [g, *clients]]
    assert server.aggregate(wider[0], wider[1:], SIZES)["fc.bias"].dtype == torch.float32


@by_class
def test_what_is_not_finite_never_enters_the_memory(cls):
    g, clients = cohort(dtype=torch.float32)
    server = cls()
    server.aggregate(g, clients, SIZES)
    before = server.state_dict()
    for bad in (math.nan, math.inf):
        broken = dict(clients[2], **{"fc.bias": clients[2]["fc.bias"].clone()})
        broken["fc.bias"][3] = bad
        with pytest.raises(fastagg.InputError, match=r"client 2: key 'fc\.bias' has values that are not finite"):
            server.aggregate(g, [*clients[:2], broken], [1, 1, 1])
    huge = [dict(sd, **{"fc.weight": torch.full_like(sd["fc.weight"], 1e25)}) for sd in clients]
    if cls is FedAvgM:  # which squares nothing
        assert torch.isfinite(FedAvgM().aggregate(g, huge)["fc.weight"]).all()
    else:
        with pytest.raises(fastagg.InputError, match=r"mean update of key 'fc\.weight' is too large"):
            server.aggregate(g, huge)
    for moment in server.moments:
        assert_same_bits(server.state_dict()[moment], before[moment])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("cls", ADAPTIVE, ids=lambda cls: cls.name)
def test_a_finite_client_that_is_too_large_is_named_or_dropped(cls, dtype):
    g, clients = cohort(5, dtype=dtype)
    ids, bad = ["d", "b", "e", "a", "c"], 2
    clients[bad]["fc.weight"][0, 0] = 1e25  # its square overflows float32
    words = (
        rf"client 2 \(id 'e'\): with it, {cls.name}: the mean update of key 'fc.weight' is too large for torch.float32"
    )
    with pytest.raises(fastagg.NonFiniteError, match=words) as caught:
        cls().aggregate(g, clients, client_ids=ids)
    assert caught.value.clients == [bad]
    server, without = cls(on_bad_client="drop"), cls()
    rest = [k for k in range(5) if k != bad]
    for _ in range(2):
        result = server.aggregate(g, clients, client_ids=ids)
        assert list(result.dropped) == ["e"]
        expected = without.aggregate(g, [clients[k] for k in rest], client_ids=[ids[k] for k in rest])
        assert_same_bits(result, expected)
    for moment in server.moments:
        assert_same_bits(server.state_dict()[moment], without.state_dict()[moment])


def test_a_step_beyond_the_dtype_names_who_made_it():
    g, clients = cohort(5, dtype=torch.float16)
    clients[1]["fc.bias"][3] = 60000.0
    server = FedAvgM(lr=8.0, on_bad_client="drop")
    assert list(server.aggregate(g, clients).dropped) == [1]
    with pytest.raises(fastagg.NonFiniteError, match=r"client 1: with it, fedavgm: the new value of key 'fc.bias'"):
        fedavgm(g, clients, lr=8.0)
    with pytest.raises(fastagg.InputError, match=r"^fedavgm: the new value of key 'fc.weight'") as caught:
        fedavgm(g, clients[2:], lr=1e30)  # no client's fault
    assert not isinstance(caught.value, fastagg.NonFiniteError)


def test_the_sum_of_squares_does_not_overflow_over_rounds():
    g, clients = cohort(5, dtype=torch.float32)
    clients[4]["fc.bias"][0] = 5e19  # a fifth of it is allowed
    server = FedAdagrad(on_bad_client="drop")
    dropped = [server.aggregate(g, clients).dropped for _ in range(5)]
    assert not dropped[0]
    assert list(dropped[-1]) == [4]
    assert all(torch.isfinite(tensor).all() for tensor in server.state_dict()["v"].values())


def test_params_choose_what_takes_steps():
    g, clients = cohort()
    result = fedadam(g, clients, SIZES, params=["fc.weight"])
    expected, mean = fedadam(g, clients, SIZES), fastagg.fedavg(g, clients, SIZES)
    assert torch.equal(result["fc.weight"], expected["fc.weight"])
    assert torch.equal(result["fc.bias"], mean["fc.bias"])


def test_a_model_that_requires_grad_and_one_without_parameters():
    g, clients = cohort()
    models = [{k: v.clone().requires_grad_() if k in PARAMS else v for k, v in sd.items()} for sd in [g, *clients]]
    assert_same_bits(fedyogi(models[0], models[1:], SIZES), fedyogi(g, clients, SIZES))
    only = [{k: sd[k] for k in BUFFERS} for sd in [g, *clients]]
    server = FedAdam()
    for _ in range(2):
        assert_same_bits(server.aggregate(only[0], only[1:]), fastagg.fedavg(only[0], only[1:]))
    server.load_state_dict(server.state_dict())


@pytest.mark.parametrize(
    ("function", "options", "match"),
    [
        (fedavgm, {"lr": 0}, "fedavgm: lr=0"),
        (fedavgm, {"momentum": 1.0}, "fedavgm: momentum=1.0"),
        (fedavgm, {"momentum": -0.1}, "fedavgm: momentum=-0.1"),
        (fedadam, {"lr": math.nan}, "fedadam: lr=nan"),
        (fedadam, {"beta1": 1}, "fedadam: beta1=1"),
        (fedyogi, {"beta2": 1.5}, "fedyogi: beta2=1.5"),
        (fedyogi, {"beta2": "x"}, "fedyogi: beta2='x'"),
        (fedadagrad, {"tau": 0}, "fedadagrad: tau=0"),
    ],
)
def test_bad_options(function, options, match):
    g, clients = cohort()
    with pytest.raises(ValueError, match=match):
        function(g, clients, **options)


def test_unknown_options():
    g, clients = cohort()
    with pytest.raises(TypeError, match="fedadagrad: no option 'beta2'"):
        fedadagrad(g, clients, beta2=0.5)
    with pytest.raises(TypeError, match="takes no 'lengths'"):
        FedAdam().aggregate(g, clients, lengths=[1])
    with pytest.raises(fastagg.InputError, match="global model is None"):
        fedadam(None, clients)
