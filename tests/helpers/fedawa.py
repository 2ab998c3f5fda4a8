"""FedAWA's equations transcribed naively, in float64, and rounds to hold them against."""

import functools

import torch
from torch import nn
from torch.nn import functional as F

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


def scaled(sd, factor):
    return {key: value * factor if value.is_floating_point() else value.clone() for key, value in sd.items()}
