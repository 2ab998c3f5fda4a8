"""Made-up rounds for the tests: a global model and K heterogeneous clients."""

from __future__ import annotations

import torch

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def make(K, shapes, dtype=torch.float32, *, scale=1e-2, seed=0, offset=0, integers=False):
    """(global_sd, client_sds): shapes is {name: shape}; offset moves every tensor off its natural alignment."""
    generator = torch.Generator().manual_seed(seed)

    def values(shape):
        if integers:
            return torch.randint(-4, 5, shape, generator=generator).double()
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    def place(x):
        memory = torch.empty(x.numel() + offset, dtype=dtype)
        view = memory[offset:].view(x.shape)
        view.copy_(x)
        return view

    center = {name: values(shape) for name, shape in shapes.items()}
    shared = {name: values(shape) for name, shape in shapes.items()}  # updates agree in part, as real ones do
    step = 1 if integers else scale
    clients = [
        {name: place(g + step * (values(g.shape) + (k % 3) * shared[name])) for name, g in center.items()}
        for k in range(K)
    ]
    return {name: place(g) for name, g in center.items()}, clients


def make_with_batch_norm(K, shapes, dtype, *, seed, scale):
    """make(), with running variances that are positive and counters that differ"""
    g, clients = make(K, shapes, dtype, seed=seed, scale=scale)
    for k, sd in enumerate([g, *clients]):
        sd["bn.running_var"] = sd["bn.running_var"].abs()
        sd["bn.num_batches_tracked"] = torch.tensor(10 + 7 * k % 5)
    return g, clients


def clone(sd):
    return {key: value.clone() for key, value in sd.items()}


def degenerate(shapes):
    """Cohorts (name, global_sd, client_sds) in which distances, directions or scales vanish"""
    g, clients = make(4, shapes, torch.float64, scale=0.1)
    zero = {key: torch.zeros_like(value) for key, value in g.items()}
    pair = [{key: sign * value for key, value in g.items()} for sign in (1, -1)]
    yield "no update", g, [clone(g) for _ in range(3)]
    yield "one update zero", g, [clone(g), *clients]
    yield "all zero", zero, [clone(zero), clone(zero)]
    yield "updates cancel", zero, pair
    yield "one is the mean", zero, [*pair, clone(zero)]
    for scale in (1e6, 1e-20):
        yield f"scale {scale}", zero, [{key: scale * value for key, value in sd.items()} for sd in clients]


def snapshot(*state_dicts):
    return [clone(sd) for sd in state_dicts]


def assert_unchanged(state_dicts, before):
    for sd, old in zip(state_dicts, before, strict=True):
        assert list(sd) == list(old)
        for key, value in sd.items():
            assert torch.equal(_bytes(value), _bytes(old[key])), key


def _bytes(tensor):
    return tensor.detach().resolve_neg().contiguous().view(-1).view(torch.uint8)


def assert_same_bits(a, b):
    assert list(a) == list(b)
    for key in a:
        assert a[key].dtype == b[key].dtype
        assert torch.equal(a[key], b[key]), key


def flat(sd):
    """All tensors of a state dict end to end, float64"""
    return torch.cat([value.detach().double().reshape(-1) for value in sd.values()])


def median_of(tensors):
    """The coordinate-wise median: of an even number of floats the mean of the middle two, of integers the lower one"""
    ordered = torch.stack([t.double() if t.is_floating_point() else t for t in tensors]).sort(0).values
    low, high = ordered[(len(tensors) - 1) // 2], ordered[len(tensors) // 2]
    return ((low + high) / 2 if tensors[0].is_floating_point() else low).to(tensors[0].dtype)
