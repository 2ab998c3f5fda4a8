"""FedAWA against a naive transcription of its equations: float64, autograd through softmax, torch.optim."""

import copy
import functools
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fastagg

pytestmark = pytest.mark.filterwarnings("ignore:fedawa. variant='released' learns over rounds")
BUFFERS = {"running_mean", "running_var", "num_batches_tracked"}
SCALES = (0.4, 1.0, 0.6, 1.6, 0.8)  # lengths of the clients' updates, relative to each other
SIZES = (120, 30, 75, 210, 15)
VARIANTS = ("released", "paper")
ADAM_LR = {"released": 1e-3, "paper": 0.05}  # the defaults
REGS = ("cos", "euc", None)
DTYPES = (torch.float64, torch.float32)


class Net(nn.Module):
    """Layers '', fc1, bn1, fc2, bn2: a parameter outside any module, statistics with and without parameters."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([0.7, -1.2, 0.4]))
        self.fc1, self.bn1 = nn.Linear(33, 21), nn.BatchNorm1d(21)
        self.fc2, self.bn2 = nn.Linear(21, 9, bias=False), nn.BatchNorm1d(9, affine=False)


LAYERS = ("", "fc1", "bn1", "fc2", "bn2")


def make_global(dtype=torch.float64, seed=0):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Net().to(dtype).state_dict()


def make_client(global_sd, seed, scale):
    """The global model after an update: partly a direction all clients share, mostly the client's own."""
    shared, own = torch.Generator().manual_seed(99), torch.Generator().manual_seed(seed)
    client = {}
    for key, value in global_sd.items():
        if not value.is_floating_point():
            client[key] = value + 10 + seed * 7 % 5
            continue
        noise = [torch.randn(value.shape, generator=rng, dtype=torch.float64) for rng in (shared, own)]
        client[key] = value + (0.1 * scale * (0.5 * noise[0] + noise[1])).to(value.dtype)
        if key.endswith("running_var"):
            client[key] = client[key].abs()
    return client


@functools.cache
def cached_cohort(dtype, K, seed):
    global_sd = make_global(dtype, seed)
    return global_sd, [make_client(global_sd, 10 * seed + k + 1, SCALES[k]) for k in range(K)]


def make_cohort(dtype=torch.float64, K=5, seed=0):
    """The tensors are shared between tests, the dicts are not."""
    global_sd, clients = cached_cohort(dtype, K, seed)
    return dict(global_sd), [dict(client) for client in clients]


def scopes_of(sd, layerwise):
    if not layerwise:
        return [list(sd)]
    layers = {}
    for key in sd:
        layers.setdefault(key.rpartition(".")[0], []).append(key)
    return list(layers.values())


def flatten(sd, keys):
    parts = [sd[key].double().reshape(-1) for key in keys if key.rpartition(".")[2] not in BUFFERS]
    return torch.cat([torch.zeros(0, dtype=torch.float64), *parts])


def objective(l, g, w, variant, reg):  # noqa: E741
    """Eq. 3, or Eq. 2 plus the released code's regulariser, of weights l [K], global model g [D], clients w [K, D]."""
    tau = w - g
    tau_g = (l[:, None] * tau).sum(0)
    loss = (l * torch.linalg.vector_norm(tau - tau_g, dim=1)).sum()
    if variant == "released":
        if reg == "cos":
            loss = loss + (l * (1 - F.cosine_similarity(g[None], w, dim=1))).sum()
        elif reg == "euc":
            loss = loss + (l * (tau**2).sum(1) / max(len(g), 1)).sum()
    else:
        model = (l[:, None] * w).sum(0)
        if reg == "cos":
            loss = loss + 1 - F.cosine_similarity(model, g, dim=0)
        elif reg == "euc":
            loss = loss + torch.linalg.vector_norm(model - g)
    return loss


def optimise(T, g, w, variant, reg, optimizer, steps, lr):
    T = T.clone().requires_grad_()
    if optimizer == "adam":
        opt = torch.optim.Adam([T], lr=lr or ADAM_LR[variant], betas=(0.5, 0.999), eps=1e-8)
    else:
        opt = torch.optim.SGD([T], lr=lr or 0.01, momentum=0.9, weight_decay=5e-4)
    for _ in range(steps):
        before = T.detach().softmax(0)
        opt.zero_grad()
        objective(T.softmax(0), g, w, variant, reg).backward()
        opt.step()
    T = T.detach()
    return before if variant == "released" else T.softmax(0), T


def first_logits(sizes, variant, scopes=None):
    shares = torch.as_tensor(sizes, dtype=torch.float64) / sum(sizes)
    T = shares if variant == "released" else shares.log()
    return T if scopes is None else T.expand(len(scopes), -1)


def naive_mix(client_sds, weights, layerwise, gamma=1.0):
    out = {}
    scopes = scopes_of(client_sds[0], layerwise)
    for keys, l in zip(scopes, weights if layerwise else weights[None], strict=True):  # noqa: E741
        for key in keys:
            stack = torch.stack([sd[key] for sd in client_sds])
            if not stack.is_floating_point():
                out[key] = stack.amax(0)
                continue
            factor = 1.0 if key.rpartition(".")[2] in BUFFERS else gamma
            out[key] = (factor * torch.tensordot(l, stack.double(), 1)).to(stack.dtype)
    return out


def reference(global_sd, client_sds, sizes, *, variant, reg="cos", optimizer="adam", steps=1, lr=None,
              layerwise=False, logits=None):  # fmt: skip
    """Weights, logits and the aggregated state dict."""
    scopes = scopes_of(global_sd, layerwise)
    T = first_logits(sizes, variant, scopes) if logits is None else logits.reshape(len(scopes), -1)
    weights, logits = [], []
    for keys, start in zip(scopes, T, strict=True):
        g, w = flatten(global_sd, keys), torch.stack([flatten(sd, keys) for sd in client_sds])
        after = optimise(start, g, w, variant, reg, optimizer, steps, lr)
        weights.append(after[0])
        logits.append(after[1])
    weights, logits = (torch.stack(weights), torch.stack(logits)) if layerwise else (weights[0], logits[0])
    return weights, logits, naive_mix(client_sds, weights, layerwise)


def identical(a, b):
    same_keys = list(a) == list(b)
    return same_keys and all(a[k].dtype == b[k].dtype and torch.equal(a[k], b[k]) for k in a)


def call(method, global_sd, client_sds, *args, **options):
    """method(...), once it is certain that it changed none of its inputs."""
    before = [{key: value.clone() for key, value in sd.items()} for sd in (global_sd, *client_sds)]
    result = method(global_sd, client_sds, *args, **options)
    assert all(identical(a, b) for a, b in zip(before, [global_sd, *client_sds], strict=True))
    total = result.weights.sum(-1)
    assert result.weights.dtype == torch.float64
    assert torch.allclose(total, torch.ones_like(total), rtol=0, atol=1e-14)
    assert list(result) == list(global_sd)
    return result


def assert_close(actual, expected, rtol, atol=0.0):
    torch.testing.assert_close(actual, expected, rtol=rtol, atol=atol)


def assert_agrees(result, expected, start, dtype):
    """How far the logits moved, which is all the optimiser computes, then the weights and models that follow.

    float64: inner products are good to 1e-15, and reading ||tau_k - tau_g|| off them loses a digit or two.
    float32: inner products are good to 2^-24 = 6e-8, which gradients, being differences, magnify ten times or so;
    weights move by a tenth of what logits do, or less.
    Where the gradient is exactly 0 (a layer without parameters) both sides compute 1e-16, and Adam, which divides by
    1e-8, makes 1e-8 of a step of that.
    """
    weights, logits, state = expected
    moved, near, mixed = (1e-9, 1e-8, 1e-9) if dtype == torch.float64 else (1e-5, 1e-5, 1e-6)
    step = (logits - start).abs().max().item()
    assert_close(result.logits - start, logits - start, rtol=moved, atol=near * step)
    assert_close(result.weights, weights, rtol=mixed)
    for key, value in state.items():
        assert result[key].dtype == value.dtype
        if value.is_floating_point():  # weights that are off by `mixed` move a mean by that much of its largest term
            assert torch.allclose(result[key], value, rtol=mixed, atol=mixed * value.abs().max().item()), key
        else:
            assert torch.equal(result[key], value), key


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("steps", [1, 5, 20])
@pytest.mark.parametrize("layerwise", [False, True], ids=["model", "layers"])
@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
@pytest.mark.parametrize("reg", REGS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_equals_the_equations(variant, reg, optimizer, layerwise, steps, dtype):
    options = {"variant": variant, "reg": reg, "optimizer": optimizer, "layerwise": layerwise, "steps": steps}
    global_sd, clients = make_cohort(dtype)
    result = call(fastagg.fedawa, global_sd, clients, SIZES, **options)
    assert result.layers == (LAYERS if layerwise else None)
    start = first_logits(SIZES, variant, LAYERS if layerwise else None)
    assert_agrees(result, reference(global_sd, clients, SIZES, **options), start, dtype)


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_large_steps_equal_the_equations(variant, optimizer):
    """With lr=None every choice above stays near its start; here the weights leave it."""
    options = {"variant": variant, "optimizer": optimizer, "steps": 12, "lr": 0.1}
    global_sd, clients = make_cohort()
    result = call(fastagg.fedawa, global_sd, clients, SIZES, **options)
    shares = first_logits(SIZES, "released")
    assert (result.weights - shares).abs().max() > 0.05
    assert_agrees(result, reference(global_sd, clients, SIZES, **options), first_logits(SIZES, variant), torch.float64)


@pytest.mark.parametrize("variant", VARIANTS)
def test_clients_that_nearly_agree(variant):
    """Update vectors at a cosine of 0.99 in float32: 1 % of the Gram's digits are left for their distances, so
    1e-7 / (1 - cos) = 1e-5 of each step is error."""
    global_sd = make_global(torch.float32)
    common = make_client(global_sd, 50, 1.0)
    clients = []
    for k, scale in enumerate(SCALES):
        own = make_client(global_sd, k + 1, 0.1 * scale)
        clients.append({key: value + (own[key] - global_sd[key]) for key, value in common.items()})
    assert fastagg.gram(global_sd, clients).cosine().min() > 0.98
    result = call(fastagg.fedawa, global_sd, clients, SIZES, variant=variant, steps=5)
    tolerance = 1e-5 * (1 + 2 + 3 + 4 + 5) * ADAM_LR[variant]  # each of five steps builds on the ones before it
    assert_close(result.weights, reference(global_sd, clients, SIZES, variant=variant, steps=5)[0], rtol=tolerance)


ROUNDS = (("abc", (5, 1, 2)), ("bd", (1, 3)), ("ecda", (4, 2, 3, 5)), ("ab", (9, 1)), ("fcb", (2, 2, 1)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layerwise", [False, True], ids=["model", "layers"])
@pytest.mark.parametrize(("optimizer", "lr"), [("adam", 0.05), ("sgd", 0.2)])
@pytest.mark.parametrize("variant", VARIANTS)
def test_rounds_with_changing_cohorts(variant, optimizer, lr, layerwise, dtype):
    options = {"variant": variant, "optimizer": optimizer, "lr": lr, "layerwise": layerwise, "steps": 3}
    aggregator = fastagg.FedAWA(**options)
    model, carried = make_global(dtype), {}
    for t, (ids, sizes) in enumerate(ROUNDS):
        clients = [make_client(model, 10 * t + k + 1, SCALES["abcdef".index(i) % 5]) for k, i in enumerate(ids)]
        fresh = first_logits(sizes, variant, LAYERS if layerwise else None)
        start = torch.stack([carried.get(i, fresh[..., k]) for k, i in enumerate(ids)], -1)
        expected = reference(model, clients, sizes, logits=start, **options)
        result = call(aggregator.aggregate, model, clients, sizes, list(ids))
        assert_agrees(result, expected, start, dtype)
        if variant == "released":  # "paper" starts anew in every round
            carried.update(zip(ids, expected[1].unbind(-1), strict=True))
        model = dict(result)
    state = aggregator.state_dict()
    assert state["client_ids"] == list("abcdef" if variant == "released" else "")
    if not carried:
        return
    # errors of at most 5 rounds, each within what assert_agrees allows of a few steps of `lr`
    tolerance = 1e-8 if dtype == torch.float64 else 1e-5
    assert_close(state["logits"], torch.stack([carried[i] for i in state["client_ids"]]), rtol=0, atol=tolerance)


@pytest.mark.parametrize("layerwise", [False, True], ids=["model", "layers"])
def test_logits_continue_a_round_as_the_aggregator_does(layerwise):
    options = {"variant": "released", "steps": 2, "lr": 0.1, "layerwise": layerwise}
    global_sd, clients = make_cohort(torch.float32)
    aggregator = fastagg.FedAWA(**options)
    with pytest.warns(UserWarning, match="forgets what it learns"):
        first = call(fastagg.fedawa, global_sd, clients, SIZES, **options)
    assert identical(aggregator.aggregate(global_sd, clients, SIZES), first)
    again = call(fastagg.fedawa, first, clients, SIZES, logits=first.logits, **options)
    assert identical(call(aggregator.aggregate, first, clients, SIZES), again)
    assert not torch.equal(again.weights, first.weights)


@pytest.mark.parametrize("variant", VARIANTS)
def test_default_sizes_are_equal_shares(variant):
    global_sd, clients = make_cohort()
    result = call(fastagg.fedawa, global_sd, clients, variant=variant, steps=3)
    assert identical(result, fastagg.fedawa(global_sd, clients, [7] * 5, variant=variant, steps=3))


@pytest.mark.parametrize("variant", VARIANTS)
def test_first_weights(variant):
    """The released code starts at softmax(n), the paper at n."""
    global_sd, clients = make_cohort()
    shares = first_logits(SIZES, "released")
    result = call(fastagg.fedawa, global_sd, clients, SIZES, variant=variant, steps=0)
    assert_close(result.weights, shares.softmax(0) if variant == "released" else shares, rtol=1e-15)


@pytest.mark.parametrize("gamma", [1.0, 0.9])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layerwise", [False, True], ids=["model", "layers"])
@pytest.mark.parametrize("variant", [*VARIANTS, "cos"])
def test_the_model_is_the_mean_by_the_weights_returned(variant, layerwise, dtype, gamma):
    """Accumulated wide and rounded once: float32 may differ from the float64 mean by its last bit, 2^-23."""
    global_sd, clients = make_cohort(dtype)
    result = call(fastagg.fedawa, global_sd, clients, SIZES, variant=variant, layerwise=layerwise, gamma=gamma, steps=2)
    expected = naive_mix(clients, result.weights, layerwise, gamma)
    for key, value in expected.items():
        if value.is_floating_point():
            assert_close(result[key], value, rtol=2**-23 if dtype == torch.float32 else 1e-13, atol=1e-15)
        else:
            assert torch.equal(result[key], value)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layerwise", [False, True], ids=["model", "layers"])
@pytest.mark.parametrize(
    "options", [{}, {"variant": "released"}, {"variant": "released", "steps": 4}, {"variant": "cos"}], ids=str
)
def test_the_model_is_the_mix_bit_for_bit(options, layerwise, dtype):
    """In particular for one released step, where Gram and mix share a read."""
    global_sd, clients = make_cohort(dtype)
    result = call(fastagg.fedawa, global_sd, clients, SIZES, layerwise=layerwise, **options)
    assert identical(result, fastagg.mix(clients, result.weights, layerwise=layerwise))
    gram = fastagg.gram(global_sd, clients, layerwise=layerwise)
    assert torch.equal(result.gram.matrix, gram.matrix)


@pytest.mark.parametrize("layerwise", [False, True], ids=["model", "layers"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_statistics_stay_out_of_the_objective(variant, layerwise):
    global_sd, clients = make_cohort()
    options = {"variant": variant, "layerwise": layerwise, "steps": 4, "lr": 0.1}
    expected = fastagg.fedawa(global_sd, clients, SIZES, **options)
    for k, sd in enumerate(clients):
        for key in sd:
            if key.endswith(("running_mean", "running_var")):
                sd[key] = sd[key] * 1000**k
    result = call(fastagg.fedawa, global_sd, clients, SIZES, **options)
    assert torch.equal(result.weights, expected.weights)
    assert torch.equal(result.logits, expected.logits)


@pytest.mark.parametrize("variant", VARIANTS)
def test_params_choose_what_the_objective_sees(variant):
    global_sd, clients = make_cohort()
    options = {"variant": variant, "optimizer": "sgd", "steps": 4}
    keys = ["fc2.weight", "fc1.bias"]
    result = call(fastagg.fedawa, global_sd, clients, SIZES, params=keys, **options)
    only = [{key: sd[key] for key in keys} for sd in [global_sd, *clients]]
    weights, logits, _ = reference(only[0], only[1:], SIZES, **options)
    expected = weights, logits, naive_mix(clients, weights, False)
    assert_agrees(result, expected, first_logits(SIZES, variant), torch.float64)


@pytest.mark.parametrize("variant", VARIANTS)
def test_layers_regroup(variant):
    global_sd, clients = make_cohort()
    options = {"variant": variant, "optimizer": "sgd", "steps": 4}
    result = call(fastagg.fedawa, global_sd, clients, SIZES, layerwise=True, layers=group, **options)
    assert result.layers == ("body", "head")
    for row, name in enumerate(result.layers):
        part = [{key: value for key, value in sd.items() if group(key) == name} for sd in [global_sd, *clients]]
        weights, logits, state = reference(part[0], part[1:], SIZES, **options)
        assert_close(result.weights[row], weights, rtol=1e-9)
        assert_close(result.logits[row], logits, rtol=1e-9)
        for key in state:
            assert_close(result[key], state[key], rtol=1e-9, atol=1e-9)


def group(key):
    return "head" if key.startswith("fc2") else "body"


@pytest.mark.parametrize(
    "options", [{"variant": "released"}, {"variant": "paper", "layerwise": True}, {"variant": "cos"}], ids=str
)
def test_out_is_written_in_place(options):
    global_sd, clients = make_cohort(torch.float32)
    expected = fastagg.fedawa(global_sd, clients, SIZES, **options)
    out = {key: torch.zeros_like(value) for key, value in global_sd.items()}
    result = call(fastagg.fedawa, global_sd, clients, SIZES, out=out, **options)
    assert all(result[key] is out[key] for key in out)
    assert identical(result, expected)


WEIGHTS = torch.tensor([0.30, 0.15, 0.55, 0.07, 0.41], dtype=torch.float64)  # sum to 1.48


def layer_weights(layerwise):
    factors = torch.tensor([1.0, 0.3, 1.7, 0.8, 1.1], dtype=torch.float64)
    return factors[:, None] * WEIGHTS if layerwise else WEIGHTS


@pytest.mark.parametrize("layerwise", [False, True], ids=["model", "layers"])
@pytest.mark.parametrize("reg", REGS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_objective_equals_autograd(variant, reg, layerwise):
    global_sd, clients = make_cohort()
    gram = fastagg.gram(global_sd, clients, layerwise=layerwise)
    loss, gradient = fastagg.fedawa_objective(gram, layer_weights(layerwise), variant=variant, reg=reg)
    assert torch.as_tensor(loss).shape == gradient.shape[:-1]
    assert gradient.shape == ((5, 5) if layerwise else (5,))
    rows = layer_weights(layerwise).reshape(-1, 5)
    for i, keys in enumerate(scopes_of(global_sd, layerwise)):
        g, w = flatten(global_sd, keys), torch.stack([flatten(sd, keys) for sd in clients])
        l = rows[i].clone().requires_grad_()  # noqa: E741
        expected = objective(l, g, w, variant, reg)
        expected.backward()
        assert_close(torch.as_tensor(loss).double().reshape(-1)[i], expected.detach(), rtol=1e-12, atol=1e-12)
        assert_close(gradient.reshape(-1, 5)[i], l.grad, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("layerwise", [False, True], ids=["model", "layers"])
@pytest.mark.parametrize("reg", REGS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_objective_gradient_is_the_slope_of_its_loss(variant, reg, layerwise):
    """Central differences at h = 1e-5: h^2 from the third derivative and 1e-15 / h from rounding, both 1e-10."""
    gram = fastagg.gram(*make_cohort(), layerwise=layerwise)
    weights, h = layer_weights(layerwise), 1e-5

    def loss(l):  # noqa: E741
        return torch.as_tensor(fastagg.fedawa_objective(gram, l, variant=variant, reg=reg)[0])

    steps = h * torch.eye(5, dtype=torch.float64)
    slope = torch.stack([(loss(weights + e) - loss(weights - e)) / (2 * h) for e in steps], -1)
    _, gradient = fastagg.fedawa_objective(gram, weights, variant=variant, reg=reg)
    assert_close(gradient, slope, rtol=1e-8, atol=1e-8)


def test_regularisers_and_variants_differ():
    """Otherwise the comparisons above would compare nothing."""
    gram = fastagg.gram(*make_cohort())
    losses = {
        (variant, reg): float(fastagg.fedawa_objective(gram, WEIGHTS, variant=variant, reg=reg)[0])
        for variant in VARIANTS for reg in REGS
    }  # fmt: skip
    assert losses["paper", None] == losses["released", None]
    assert min(abs(a - b) for x, a in losses.items() for y, b in losses.items() if x[1] and x != y) > 1e-3


@pytest.mark.parametrize("layerwise", [False, True], ids=["model", "layers"])
@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_minimised_to_the_end_it_collapses_onto_one_client(variant, optimizer, layerwise):
    """Eq. 2 is 0 at every corner of the simplex, because a client alone is no distance from itself."""
    global_sd, clients = make_cohort(torch.float32)
    options = {"variant": variant, "optimizer": optimizer, "reg": None, "layerwise": layerwise}
    result = call(fastagg.fedawa, global_sd, clients, SIZES, steps=600, lr=0.3, **options)
    assert result.weights.isfinite().all()
    assert result.logits.isfinite().all()
    with_parameters = result.weights[:-1] if layerwise else result.weights
    assert (with_parameters.amax(-1) > 0.9).all()
    few = fastagg.fedawa(global_sd, clients, SIZES, steps=10, lr=1e-3, **options)
    assert few.weights.max() < 0.6


def scaled(sd, factor):
    return {key: value * factor if value.is_floating_point() else value.clone() for key, value in sd.items()}


def degenerate(case, dtype=torch.float32):
    g, clients = make_cohort(dtype)
    if case == "one client":
        return g, clients[:1]
    if case == "identical clients":
        return g, [copy.deepcopy(clients[1]) for _ in range(5)]
    if case == "no update":
        return g, [copy.deepcopy(g) for _ in range(5)]
    if case == "one without update":
        return g, [copy.deepcopy(g), *clients[1:]]
    if case == "all but one without update":
        return g, [clients[0], *(copy.deepcopy(g) for _ in range(4))]
    if case == "global model 0":
        return scaled(g, 0), clients
    if case == "a client 0":
        return g, [*clients[:4], scaled(g, 0)]
    if case == "a client against g":
        return g, [*clients[:4], scaled(clients[4], -0.7)]
    if case == "all against g":
        return scaled(g, -1), clients
    if case == "all 0":
        return scaled(g, 0), [scaled(g, 0) for _ in range(5)]
    if case == "opposite updates":  # at 0, so that they cancel without rounding; one client is their mean
        return scaled(g, 0), [clients[0], scaled(clients[0], -1), scaled(g, 0)]
    raise AssertionError(case)


DEGENERATE = (
    "one client", "identical clients", "no update", "one without update", "all but one without update",
    "global model 0", "a client 0", "a client against g", "all against g", "all 0", "opposite updates",
)  # fmt: skip


@pytest.mark.parametrize("layerwise", [False, True], ids=["model", "layers"])
@pytest.mark.parametrize("case", DEGENERATE)
def test_degenerate_cohorts_are_never_nan(case, layerwise):
    global_sd, clients = degenerate(case)
    sizes = None if case in ("opposite updates", "identical clients") else SIZES[: len(clients)]
    gram = fastagg.gram(global_sd, clients, layerwise=layerwise)
    choices = [{"variant": v, "reg": r, "optimizer": o} for v in VARIANTS for r in REGS for o in ("adam", "sgd")]
    for options in [*choices, {"variant": "cos"}]:
        for more in ({"steps": 1}, {"steps": 40, "lr": 0.5}):
            result = call(fastagg.fedawa, global_sd, clients, sizes, layerwise=layerwise, **options, **more)
            assert all(value.isfinite().all() for value in result.values()), options
            assert result.weights.isfinite().all(), options
            assert (result.weights >= 0).all(), options
            assert result.logits is None or result.logits.isfinite().all(), options
        if options.pop("optimizer", None) == "adam":
            loss, gradient = fastagg.fedawa_objective(gram, result.weights, **options)
            assert torch.as_tensor(loss).isfinite().all(), options
            assert gradient.isfinite().all(), options


@pytest.mark.parametrize("layerwise", [False, True], ids=["model", "layers"])
@pytest.mark.parametrize("variant", [*VARIANTS, "cos"])
@pytest.mark.parametrize("case", ["one client", "identical clients", "no update"])
def test_clients_that_are_the_same_give_that_client(case, variant, layerwise):
    """Weights that sum to 1 within 1e-16 cannot change a float32 before it is rounded."""
    global_sd, clients = degenerate(case)
    for steps in (1, 7):
        result = call(fastagg.fedawa, global_sd, clients, SIZES[: len(clients)], variant=variant, layerwise=layerwise,
                      steps=steps)  # fmt: skip
        assert identical(result, clients[0])


@pytest.mark.parametrize("reg", REGS)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(
    "case",
    ["one without update", "all but one without update", "global model 0", "a client 0", "a client against g",
     "all against g"],
)  # fmt: skip
def test_degenerate_cohorts_equal_the_equations(case, variant, reg):
    """Where a vector is 0 (its cosine is then 0) or a cosine negative, the equations still say what to do."""
    global_sd, clients = degenerate(case, torch.float64)
    options = {"variant": variant, "reg": reg, "steps": 4, "optimizer": "sgd"}
    result = call(fastagg.fedawa, global_sd, clients, SIZES, **options)
    expected = reference(global_sd, clients, SIZES, **options)
    assert_agrees(result, expected, first_logits(SIZES, variant), torch.float64)


@pytest.mark.parametrize("variant", VARIANTS)
def test_without_differences_there_is_nothing_to_learn(variant):
    global_sd, clients = degenerate("no update", torch.float64)
    result = call(fastagg.fedawa, global_sd, clients, SIZES, variant=variant, steps=10)
    # the gradient is exactly 0 but for rounding, of which Adam makes 1e-7 of a step
    assert_close(result.logits, first_logits(SIZES, variant), rtol=0, atol=1e-7 * ADAM_LR[variant])


@pytest.mark.parametrize("layerwise", [False, True], ids=["model", "layers"])
@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
@pytest.mark.parametrize("variant", [*VARIANTS, "cos"])
def test_a_client_without_data(variant, optimizer, layerwise):
    """log 0 must neither become NaN nor spoil the state that is carried."""
    global_sd, clients = make_cohort()
    aggregator = fastagg.FedAWA(variant=variant, optimizer=optimizer, layerwise=layerwise, steps=3)
    for sizes in ((0, 1, 2, 3, 4), (5, 1, 2, 3, 4)):
        result = call(aggregator.aggregate, global_sd, clients, sizes)
        assert all(value.isfinite().all() for value in result.values())
        assert result.weights.isfinite().all()
        without = sizes[0] == 0
        assert variant != "paper" or ((result.weights[..., 0] < 1e-200) == without).all()
    fastagg.FedAWA(variant=variant, layerwise=layerwise).load_state_dict(aggregator.state_dict())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layerwise", [False, True], ids=["model", "layers"])
def test_cos_variant(layerwise, dtype):
    global_sd, clients = make_cohort(dtype)
    clients[2] = {  # against the others, so that its weight is 0
        key: 2 * global_sd[key] - value if value.is_floating_point() else value for key, value in clients[3].items()
    }
    result = call(fastagg.fedawa, global_sd, clients, SIZES, variant="cos", layerwise=layerwise)
    shares = first_logits(SIZES, "released")
    rows = []
    for keys in scopes_of(global_sd, layerwise):
        g, w = flatten(global_sd, keys), torch.stack([flatten(sd, keys) for sd in clients])
        cos = F.cosine_similarity(w - g, (shares[:, None] * (w - g)).sum(0)[None], dim=1).clamp(min=0)
        rows.append(cos / cos.sum() if cos.sum() > 0 else shares)
    expected = torch.stack(rows) if layerwise else rows[0]
    # cosines are sums of a thousand products of numbers with 24 or 53 bits
    tolerance = 1e-12 if dtype == torch.float64 else 1e-6
    assert_close(result.weights, expected, rtol=tolerance, atol=tolerance)
    assert (result.weights.reshape(-1, 5)[0, 2] == 0).item()
    assert result.logits is None


@pytest.mark.parametrize("layerwise", [False, True], ids=["model", "layers"])
def test_cos_variant_falls_back_to_data_shares(layerwise):
    """sum n_k d_k = 0 is the only way no cosine is positive; these updates cancel without rounding."""
    global_sd = scaled(make_global(torch.float32), 0)
    update = {key: torch.full_like(value, 0.5) for key, value in global_sd.items()}
    clients = [scaled(update, factor) for factor in (1, -1, 2, -2)]
    sizes = (4, 4, 3, 3)
    result = call(fastagg.fedawa, global_sd, clients, sizes, variant="cos", layerwise=layerwise)
    shares = first_logits(sizes, "released")
    assert_close(result.weights, shares.expand_as(result.weights), rtol=1e-15)
    assert identical(result, fastagg.fedavg(global_sd, clients, sizes))


def aggregator_after_rounds(**options):
    aggregator = fastagg.FedAWA(**{"variant": "released", **options})
    for t, ids in enumerate(("abc", "cd")):
        global_sd, clients = make_cohort(torch.float32, len(ids), seed=t)
        aggregator.aggregate(global_sd, clients, SIZES[: len(ids)], list(ids))
    return aggregator


def same_state(a, b):
    return list(a) == list(b) and all(
        torch.equal(a[key], b[key]) if isinstance(a[key], torch.Tensor) else a[key] == b[key] for key in a
    )


@pytest.mark.parametrize("layerwise", [False, True], ids=["model", "layers"])
@pytest.mark.parametrize("variant", [*VARIANTS, "cos"])
def test_a_saved_state_continues_bit_for_bit(variant, layerwise, tmp_path):
    options = {"variant": variant, "layerwise": layerwise, "steps": 3, "lr": 0.1}
    aggregator = aggregator_after_rounds(**options)
    torch.save(aggregator.state_dict(), tmp_path / "state.pt")
    loaded = fastagg.FedAWA(**options)
    loaded.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert same_state(loaded.state_dict(), aggregator.state_dict())
    for t, ids in enumerate(("bcae", "ef", "abcd")):
        global_sd, clients = make_cohort(torch.float32, len(ids), seed=5 + t)
        results = [call(a.aggregate, global_sd, clients, None, list(ids)) for a in (aggregator, loaded)]
        assert identical(*results)
        assert torch.equal(results[0].weights, results[1].weights)
        assert same_state(loaded.state_dict(), aggregator.state_dict())


def test_a_state_dict_is_a_snapshot():
    aggregator = aggregator_after_rounds(lr=0.1)
    snapshot, kept = aggregator.state_dict(), copy.deepcopy(aggregator.state_dict())
    result = aggregator.aggregate(*make_cohort(torch.float32, 3), None, list("abz"))
    assert same_state(snapshot, kept)
    after = copy.deepcopy(aggregator.state_dict())
    assert not same_state(after, kept)
    for state in (snapshot, aggregator.state_dict()):
        state["logits"].zero_()
        state["client_ids"].clear()
    result.logits.zero_()
    assert same_state(aggregator.state_dict(), after)
    loaded = fastagg.FedAWA(variant="released", lr=0.1)
    loaded.load_state_dict(kept)
    kept["logits"].zero_()
    assert loaded.state_dict()["logits"].abs().min() > 0


def replaced(key, value):
    return lambda state: {**state, key: value(state[key]) if callable(value) else value}


BAD_STATES = {
    "method": replaced("method", "fedavg"),
    "variant": replaced("variant", "paper"),
    "logits by position": replaced("logits_by", "position"),
    "too few logits": replaced("logits", lambda T: T[:-1]),
    "too many logits": replaced("logits", lambda T: torch.cat([T, T])),
    "one axis more": replaced("logits", lambda T: T[..., None]),
    "NaN": replaced("logits", lambda T: T.index_fill(0, torch.tensor([1]), math.nan)),
    "layers": replaced("layers", lambda layers: list(LAYERS) if layers is None else None),
    "twice the same client": replaced("client_ids", lambda ids: [ids[0], *ids[:-1]]),
    "empty": lambda state: {},
    **{
        f"no {k}": lambda s, k=k: {x: s[x] for x in s if x != k}
        for k in ("method", "variant", "logits_by", "layers", "client_ids", "logits")
    },
}


@pytest.mark.parametrize("layerwise", [False, True], ids=["model", "layers"])
@pytest.mark.parametrize("bad", BAD_STATES)
def test_bad_states_are_refused_and_change_nothing(bad, layerwise):
    aggregator = aggregator_after_rounds(layerwise=layerwise)
    before = copy.deepcopy(aggregator.state_dict())
    donor = aggregator_after_rounds(layerwise=layerwise, steps=4, lr=0.2).state_dict()
    with pytest.raises(fastagg.InputError):
        aggregator.load_state_dict(BAD_STATES[bad](donor))
    assert same_state(aggregator.state_dict(), before)


@pytest.mark.parametrize("layerwise", [False, True], ids=["model", "layers"])
def test_a_state_of_the_other_scope_is_refused(layerwise):
    aggregator = aggregator_after_rounds(layerwise=layerwise)
    before = copy.deepcopy(aggregator.state_dict())
    with pytest.raises(fastagg.InputError):
        aggregator.load_state_dict(aggregator_after_rounds(layerwise=not layerwise).state_dict())
    assert same_state(aggregator.state_dict(), before)


def test_a_model_of_other_layers_is_refused():
    aggregator = aggregator_after_rounds(layerwise=True)
    before = copy.deepcopy(aggregator.state_dict())
    for new_ids in (list("abc"), list("xyz")):
        global_sd, clients = make_cohort(torch.float32, 3)
        with pytest.raises(fastagg.InputError, match="layers"):
            aggregator.aggregate(without(global_sd, "scale"), [without(sd, "scale") for sd in clients], None, new_ids)
    assert same_state(aggregator.state_dict(), before)


def without(sd, key):
    return {k: v for k, v in sd.items() if k != key}


def bad_round(case, g, clients, ids):
    sizes, out = SIZES[: len(ids)], None
    if case == "shape":
        clients[-1]["fc2.weight"] = clients[-1]["fc2.weight"].T.contiguous()
    elif case == "dtype":
        clients[-1]["bn1.running_var"] = clients[-1]["bn1.running_var"].double()
    elif case == "key":
        clients[-1] = without(clients[-1], "fc1.bias")
    elif case == "no clients":
        clients = []
    elif case == "sizes":
        sizes = (1, 2)
    elif case == "negative size":
        sizes = (1, 2, -1)
    elif case == "ids":
        ids = ["a", "b", "a"]
    elif case == "out":
        out = without(g, "fc1.bias")
    elif case == "out is an input":
        out = clients[0]
    return g, clients, sizes, ids, out


@pytest.mark.parametrize(
    "case", ["shape", "dtype", "key", "no clients", "sizes", "negative size", "ids", "out", "out is an input"]
)
@pytest.mark.parametrize("layerwise", [False, True], ids=["model", "layers"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_round_that_raises_leaves_the_state(variant, layerwise, case):
    aggregator = aggregator_after_rounds(variant=variant, layerwise=layerwise)
    before = copy.deepcopy(aggregator.state_dict())
    g, clients, sizes, ids, out = bad_round(case, *make_cohort(torch.float32, 3), ["a", "d", "new"])
    with pytest.raises(fastagg.InputError):
        aggregator.aggregate(g, clients, sizes, ids, out=out)
    assert same_state(aggregator.state_dict(), before)


@pytest.mark.parametrize(
    "options",
    [
        {"variant": "eq3"}, {"variant": None}, {"optimizer": "rmsprop"}, {"optimizer": None}, {"reg": "l2"},
        {"steps": -1}, {"steps": 1.5}, {"lr": -0.1}, {"lr": math.nan}, {"lr": math.inf}, {"gamma": math.nan},
        {"gamma": math.inf},
    ],
    ids=str,
)  # fmt: skip
def test_bad_options(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        fastagg.FedAWA(**options)
    with pytest.raises(ValueError, match=next(iter(options))):
        fastagg.fedawa(*make_cohort(), **options)


@pytest.mark.parametrize(("shape", "layerwise"), [((4,), False), ((5, 5), False), ((1, 5), False), ((), False),
                                                  ((5,), True), ((4, 5), True), ((5, 4), True)])  # fmt: skip
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_of_a_wrong_shape(variant, shape, layerwise):
    with pytest.raises(fastagg.InputError, match="logits"):
        fastagg.fedawa(*make_cohort(), variant=variant, logits=torch.zeros(shape), layerwise=layerwise)


def test_logits_that_are_not_finite():
    with pytest.raises(fastagg.InputError, match="logits"):
        fastagg.fedawa(*make_cohort(), logits=torch.tensor([0.0, 0.0, math.nan, 0.0, 0.0]))


def test_the_default_is_the_papers_algorithm():
    global_sd, clients = make_cohort()
    default = fastagg.fedawa(global_sd, clients, SIZES)
    assert identical(default, fastagg.fedawa(global_sd, clients, SIZES, variant="paper", steps=5, lr=0.05))
    expected = reference(global_sd, clients, SIZES, variant="paper", steps=5)
    assert_agrees(default, expected, first_logits(SIZES, "paper"), torch.float64)
    assert fastagg.aggregator("fedawa").variant == "paper"


def test_the_paper_starts_anew_in_every_round():
    """Carried over rounds, the weights would collapse onto one client."""
    global_sd, clients = make_cohort(torch.float32)
    server = fastagg.FedAWA()
    first, second = (server.aggregate(global_sd, clients, SIZES, list("abcde")) for _ in range(2))
    assert torch.equal(first.weights, second.weights)
    assert server.state_dict()["client_ids"] == []


@pytest.mark.filterwarnings("error")
def test_only_a_released_call_that_forgets_its_logits_warns():
    global_sd, clients = make_cohort(torch.float32)
    with pytest.warns(UserWarning, match="forgets what it learns") as caught:
        fastagg.fedawa(global_sd, clients, variant="released")
    assert caught[0].filename == __file__
    fastagg.fedawa(global_sd, clients, variant="released", logits=torch.zeros(5))
    fastagg.FedAWA(variant="released").aggregate(global_sd, clients)
    fastagg.fedawa(global_sd, clients)


def test_logits_by_position_stay_where_they_are():
    """What the authors' code does with partial participation: the logit belongs to the place, whoever stands there."""
    rounds = [("abc", (5, 1, 2)), ("cab", (2, 5, 1)), ("xyz", (1, 1, 1))]
    server, logits, model = fastagg.FedAWA(variant="released", logits_by="position", lr=0.05), None, make_global()
    for t, (ids, sizes) in enumerate(rounds):
        clients = [make_client(model, 10 * t + k + 1, SCALES[k]) for k in range(3)]
        start = first_logits(sizes, "released") if logits is None else logits
        expected = reference(model, clients, sizes, variant="released", logits=start, lr=0.05)
        result = server.aggregate(model, clients, sizes, list(ids))
        assert_agrees(result, expected, start, torch.float64)
        logits, model = expected[1], dict(result)
    loaded = fastagg.FedAWA(variant="released", logits_by="position")
    loaded.load_state_dict(server.state_dict())
    assert loaded.state_dict()["client_ids"] == [0, 1, 2]
    fewer = loaded.aggregate(model, clients[:2])  # positions need no ids
    assert_close(fewer.weights, logits[:2].softmax(0), rtol=1e-9)


def test_logits_by_position_pass_over_a_dropped_client():
    global_sd, clients = make_cohort(torch.float32, 3)
    server = fastagg.FedAWA(variant="released", logits_by="position", on_nonfinite="drop", lr=0.05)
    server.aggregate(global_sd, clients, None, list("cab"))
    before = server.state_dict()["logits"].clone()
    bad = {key: value * math.nan if value.is_floating_point() else value for key, value in clients[1].items()}
    result = server.aggregate(global_sd, [clients[0], bad, clients[2]], None, list("cab"))
    after = dict(zip(server.state_dict()["client_ids"], server.state_dict()["logits"].tolist(), strict=True))
    assert result.dropped == ["a"]
    old = dict(zip(server.state_dict()["client_ids"], before.tolist(), strict=True))
    assert after[1] == old[1]
    assert after[0] != old[0]
    assert after[2] != old[2]


@pytest.mark.parametrize("layerwise", [False, True], ids=["model", "layers"])
def test_clients_that_agree_far_better_than_with_the_global_model(layerwise):
    """A thousandth of their distance to g apart: float32 products have no digit of that left, but models do. These have
    eps * |w| / |w_i - w_j| = 1e-7 * 10 / 1e-2 = 1e-4 of error, from their own rounding."""
    global_sd = make_global(torch.float32)
    common = make_client(global_sd, 50, 10.0)
    clients = []
    for k, scale in enumerate(SCALES):
        own = make_client(global_sd, k + 1, 0.01 * scale)
        clients.append({key: value + (own[key] - global_sd[key]) for key, value in common.items()})
    assert fastagg.gram(global_sd, clients).cosine().min() > 1 - 1e-5
    result = call(fastagg.fedawa, global_sd, clients, SIZES, layerwise=layerwise)
    expected = reference(global_sd, clients, SIZES, variant="paper", steps=5, layerwise=layerwise)[0]
    assert (expected - expected.mean(-1, keepdim=True)).abs().max() > 0.1
    assert_close(result.weights, expected, rtol=1e-4)
