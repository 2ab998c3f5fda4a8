"""Aggregation in plain PyTorch: what fastagg is timed against, and checked against.

Every job is written twice. `usual` is the code people have: loops over keys, deepcopy, flatten and stack, autograd.
`best` is the best we know without a kernel of one's own: torch._foreach_ and in-place sums, a Gram matrix added up over
blocks that fit into the caches, K x K arithmetic in closed form.

All take (global_sd, client_sds), and clients count equally. A layer is a module and has a parameter that is not zero.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

import fastagg

StateDict = dict[str, Tensor]
Clients = Sequence[StateDict]
BUFFERS = ("running_mean", "running_var", "num_batches_tracked")
BLOCK = 65536  # elements: 5 MB of 20 clients, and smaller ones cost more in calls than they save in memory


def _parameters(keys: Iterable[str]) -> list[str]:
    return [key for key in keys if not key.endswith(BUFFERS)]


def _layers(global_sd: StateDict) -> list[list[str]]:
    """The keys of each layer"""
    layers: dict[str, list[str]] = {}
    for key in global_sd:
        layers.setdefault(key.rpartition(".")[0], []).append(key)
    return list(layers.values())


def _equal(client_sds: Clients) -> Tensor:
    return torch.full((len(client_sds),), 1 / len(client_sds), dtype=torch.float64)


def _mix_layers(client_sds: Clients, layers: list[list[str]], weights: Tensor, mix: Callable) -> StateDict:
    """Each layer by its row of weights, [L, K]"""
    out: StateDict = {}
    for keys, row in zip(layers, weights, strict=True):
        out |= mix(client_sds, row, keys) if keys else {}
    return {key: out[key] for key in client_sds[0]}


def _mix_loop(client_sds: Clients, weights: Tensor, keys: Iterable[str] | None = None) -> StateDict:
    """Usual: for every key, for every client"""
    out = copy.deepcopy(client_sds[0]) if keys is None else {key: client_sds[0][key].clone() for key in keys}
    for key in out:
        if not out[key].is_floating_point():
            out[key] = torch.stack([sd[key] for sd in client_sds]).amax(0)
            continue
        total = torch.zeros_like(out[key])
        for w, sd in zip(weights, client_sds, strict=True):
            total += w * sd[key]
        out[key] = total
    return out


def _flatten(sd: StateDict, keys: list[str]) -> Tensor:
    return torch.cat([sd[key].reshape(-1) for key in keys])


def _squared_distances_loop(client_sds: Clients) -> Tensor:
    """Usual: ||w_i - w_j||^2 of every pair, one after the other, [K, K]"""
    keys = _parameters(client_sds[0])
    vectors = [_flatten(sd, keys) for sd in client_sds]
    squares = torch.zeros(len(vectors), len(vectors))
    for i, a in enumerate(vectors):
        for j, b in enumerate(vectors[:i]):
            squares[i, j] = squares[j, i] = torch.linalg.vector_norm(a - b) ** 2
    return squares


def _mix_foreach(client_sds: Clients, weights: Tensor, keys: Iterable[str]) -> StateDict:
    """Best: weights as Python numbers, which scale what is added without a temporary"""
    out = dict.fromkeys(keys)
    mixed = [key for key in out if client_sds[0][key].is_floating_point()]
    first, *others = weights.tolist()
    total = torch._foreach_mul([client_sds[0][key] for key in mixed], first)
    for w, sd in zip(others, client_sds[1:], strict=True):
        torch._foreach_add_(total, [sd[key] for key in mixed], alpha=w)
    out |= zip(mixed, total, strict=True)
    return {k: torch.stack([sd[k] for sd in client_sds]).amax(0) if v is None else v for k, v in out.items()}


def _blocks(tensors: Sequence[Tensor]) -> Iterable[Sequence[Tensor]]:
    """The same stretch of all tensors, again and again; most tensors of a model are one stretch"""
    flat = [tensor.reshape(-1) for tensor in tensors]
    return [flat] if flat[0].numel() <= BLOCK else zip(*[tensor.split(BLOCK) for tensor in flat], strict=True)


def _mix_matmul(client_sds: Clients, mixing: Tensor) -> list[StateDict]:
    """M weighted sums for mixing [M, K]; the results of a key are rows of one matrix"""
    outs: list[StateDict] = [{} for _ in mixing]
    for key, like in client_sds[0].items():
        tensors = [sd[key] for sd in client_sds]
        if like.is_floating_point():
            rows = like.new_empty(len(mixing), *like.shape)
            for to, block in zip(rows.view(len(mixing), -1).split(BLOCK, 1), _blocks(tensors), strict=True):
                torch.mm(mixing.to(like.dtype), torch.stack(block), out=to)
        else:
            rows = torch.stack(tensors).amax(0).repeat(len(mixing), *[1] * like.dim())
        for out, row in zip(outs, rows.unbind(), strict=True):
            out[key] = row
    return outs


def _gram_of(global_sd: StateDict, client_sds: Clients, keys: list[str]) -> Tensor:
    """Best: float32 products of a block, added up in float64"""
    models = (global_sd, *client_sds)
    total = torch.zeros(len(models), len(models), dtype=torch.float64)
    for key in keys:
        for block in _blocks([sd[key] for sd in models]):
            rows = torch.stack(block)
            rows[1:] -= rows[0]
            total += rows @ rows.T
    return total


def _squared_distances(global_sd: StateDict, client_sds: Clients) -> Tensor:
    G = gram_best(global_sd, client_sds)[1:, 1:]
    return (G.diagonal()[:, None] + G.diagonal() - 2 * G).clamp(min=0).fill_diagonal_(0)


def fedavg_usual(global_sd: StateDict, client_sds: Clients) -> StateDict:
    return _mix_loop(client_sds, _equal(client_sds))


@torch.no_grad()
def fedavg_best(global_sd: StateDict, client_sds: Clients) -> StateDict:
    return _mix_foreach(client_sds, _equal(client_sds), global_sd)


@torch.no_grad()
def fedavg_add(global_sd: StateDict, client_sds: Clients) -> StateDict:
    """Key by key: more calls than with _foreach_, but the sum of a small tensor stays in the caches"""
    share, out = 1 / len(client_sds), {}
    for key in global_sd:
        first, *others = tensors = [sd[key] for sd in client_sds]
        out[key] = first * share if first.is_floating_point() else torch.stack(tensors).amax(0)
        for other in others if first.is_floating_point() else ():
            out[key].add_(other, alpha=share)
    return out


@torch.no_grad()
def fedavg_stack(global_sd: StateDict, client_sds: Clients) -> StateDict:
    return _mix_matmul(client_sds, _equal(client_sds)[None])[0]


def gram_usual(global_sd: StateDict, client_sds: Clients) -> Tensor:
    keys = _parameters(global_sd)
    rows = torch.stack([_flatten(sd, keys) for sd in (global_sd, *client_sds)])
    rows[1:] -= rows[0]
    return rows @ rows.T


@torch.no_grad()
def gram_best(global_sd: StateDict, client_sds: Clients) -> Tensor:
    return _gram_of(global_sd, client_sds, _parameters(global_sd))


STEPS, LR = fastagg.FedAWA().steps, fastagg.FedAWA().lr  # of FedAWA as in the paper, which is the default


def _client_vectors(global_sd: StateDict, client_sds: Clients, keys: list[str]) -> tuple[Tensor, Tensor]:
    """The global model [D] and the client models [K, D], flattened; filled in place by a careful author"""
    g = _flatten(global_sd, keys)
    vectors = torch.empty(len(client_sds), g.numel())
    for k, sd in enumerate(client_sds):
        torch.cat([sd[key].reshape(-1) for key in keys], out=vectors[k])
    return g, vectors


def _fedawa_autograd(global_sd: StateDict, client_sds: Clients, keys: list[str]) -> tuple[Tensor, Tensor]:
    """Algorithm 1 on some keys: flatten, stack, autograd. Returns weights and logits."""
    g, vectors = _client_vectors(global_sd, client_sds, keys)
    vectors -= g
    T = _equal(client_sds).log().float().requires_grad_()
    optimizer = torch.optim.Adam([T], lr=LR, betas=(0.5, 0.999))
    for _ in range(STEPS):
        weights = torch.softmax(T, 0)
        merged = weights @ vectors
        distance = torch.stack([torch.linalg.vector_norm(v - merged) for v in vectors])
        loss = (weights * distance).sum() + 1 - cosine_similarity(g + merged, g, dim=0)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return torch.softmax(T.detach(), 0), T.detach()


def _fedawa_on_grams(grams: Tensor, clients: int) -> tuple[Tensor, Tensor]:
    """The same for all layers at once, with every product read off their Grams, [L, K+1, K+1]"""
    c, b, G = grams[:, 0, 0], grams[:, 0, 1:], grams[:, 1:, 1:]
    squares = G.diagonal(dim1=1, dim2=2)
    T = torch.full_like(b, 1 / clients).log().requires_grad_()
    optimizer = torch.optim.Adam([T], lr=LR, betas=(0.5, 0.999))
    for _ in range(STEPS):
        weights = torch.softmax(T, 1)
        along = (G @ weights[..., None])[..., 0]  # <d_k, sum_j weights_j d_j>
        square = (weights * along).sum(1)
        distance = (squares - 2 * along + square[:, None]).sqrt()
        moved = (weights * b).sum(1)
        cosine = (c + moved) / (c * (c + 2 * moved + square)).sqrt()
        loss = ((weights * distance).sum(1) + 1 - cosine).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return torch.softmax(T.detach(), 1), T.detach()


def fedawa_usual(global_sd: StateDict, client_sds: Clients, layerwise: bool = False) -> tuple:
    """(state dict, weights, logits); [L, K] with layerwise, which is FedAWA-L"""
    layers = _layers(global_sd) if layerwise else [list(global_sd)]
    learned = [_fedawa_autograd(global_sd, client_sds, _parameters(keys)) for keys in layers]
    weights, logits = map(torch.stack, zip(*learned, strict=True))
    out = _mix_layers(client_sds, layers, weights, _mix_loop)
    return (out, weights, logits) if layerwise else (out, weights[0], logits[0])


def fedawa_best(global_sd: StateDict, client_sds: Clients, layerwise: bool = False) -> tuple:
    layers = _layers(global_sd) if layerwise else [list(global_sd)]
    with torch.no_grad():
        grams = torch.stack([_gram_of(global_sd, client_sds, _parameters(keys)) for keys in layers])
    weights, logits = _fedawa_on_grams(grams, len(client_sds))
    with torch.no_grad():
        out = _mix_layers(client_sds, layers, weights, _mix_foreach)
    return (out, weights, logits) if layerwise else (out, weights[0], logits[0])


def fedawa_released_usual(global_sd: StateDict, client_sds: Clients) -> tuple:
    """One step as the authors' code takes it; the weights are those from before it"""
    keys = _parameters(global_sd)
    g, vectors = _client_vectors(global_sd, client_sds, keys)
    away = 1 - (vectors @ g) / (torch.linalg.vector_norm(vectors, dim=1) * torch.linalg.vector_norm(g))
    vectors -= g
    T = _equal(client_sds).float().requires_grad_()
    optimizer = torch.optim.Adam([T], lr=1e-3, betas=(0.5, 0.999))
    weights = torch.softmax(T, 0)
    merged = weights @ vectors
    distance = torch.stack([torch.linalg.vector_norm(v - merged) for v in vectors])
    loss = (weights * distance).sum() + (weights * away).sum()
    loss.backward()
    optimizer.step()
    weights = weights.detach()
    return _mix_loop(client_sds, weights), weights, T.detach()


@torch.no_grad()
def fedawa_released_best(global_sd: StateDict, client_sds: Clients) -> tuple:
    gram = _gram_of(global_sd, client_sds, _parameters(global_sd))
    c, b, G = gram[0, 0], gram[0, 1:], gram[1:, 1:]
    squares, logits = G.diagonal(), _equal(client_sds)
    weights = logits.softmax(0)
    along = G @ weights
    distance = (squares - 2 * along + weights @ along).sqrt()
    away = 1 - (c + b) / (c * (c + 2 * b + squares)).sqrt()
    pull = weights / distance
    slope = distance + away + along * pull.sum() - G @ pull
    gradient = weights * (slope - weights @ slope)
    logits = logits - 1e-3 * gradient / (gradient.abs() + 1e-8)  # what Adam's first step comes to
    return _mix_foreach(client_sds, weights, list(global_sd)), weights, logits


def _mix_by_cosine(client_sds: Clients, cosines: Tensor, mix: Callable) -> tuple[StateDict, Tensor]:
    """L-DAWA: parameters shrink with the cosine, [L, K]; statistics must not, so theirs are shares"""
    layers = _layers(client_sds[0])
    parts = [_parameters(keys) for keys in layers] + [[k for k in keys if k.endswith(BUFFERS)] for keys in layers]
    weights, positive = cosines / len(client_sds), cosines.clamp(min=0)
    rows = torch.cat([weights, positive / positive.sum(1, keepdim=True)])
    return _mix_layers(client_sds, parts, rows, mix), weights


def ldawa_usual(global_sd: StateDict, client_sds: Clients) -> tuple[StateDict, Tensor]:
    """(state dict, weights [L, K])"""
    cosines = []
    for keys in map(_parameters, _layers(global_sd)):
        g = _flatten(global_sd, keys)
        cosines.append(torch.stack([cosine_similarity(_flatten(sd, keys), g, dim=0) for sd in client_sds]))
    return _mix_by_cosine(client_sds, torch.stack(cosines), _mix_loop)


@torch.no_grad()
def ldawa_best(global_sd: StateDict, client_sds: Clients) -> tuple[StateDict, Tensor]:
    """Two inner products per tensor, and no Gram: nothing is copied"""
    cosines = []
    for keys in map(_parameters, _layers(global_sd)):
        dots = []
        for key in keys:
            g, *clients = (sd[key].reshape(-1) for sd in (global_sd, *client_sds))
            dots += [dot for w in (g, *clients) for dot in (torch.dot(w, g), torch.dot(w, w))]
        along, squares = torch.stack(dots).view(len(keys), -1, 2).sum(0, dtype=torch.float64).unbind(1)
        cosines.append(along[1:] / (squares[1:] * squares[0]).sqrt())
    return _mix_by_cosine(client_sds, torch.stack(cosines), _mix_foreach)


def _with_medians(out: StateDict, client_sds: Clients) -> StateDict:
    """What is not a parameter as the median over all clients, as robust methods have it"""
    for key in out.keys() - set(_parameters(out)):
        ordered = torch.stack([sd[key] for sd in client_sds]).sort(0).values
        low, high = ordered[(len(ordered) - 1) // 2], ordered[len(ordered) // 2]
        out[key] = (low + high) / 2 if low.is_floating_point() else low
    return out


def _krum_scores(squares: Tensor, f: int) -> Tensor:
    """The first of the sorted distances is a client's own, 0"""
    return squares.sort(dim=1).values[:, 1 : len(squares) - f - 1].sum(1)


def krum_usual(global_sd: StateDict, client_sds: Clients, f: int = 2) -> tuple[StateDict, int]:
    """(the client's state dict, its index)"""
    chosen = int(_krum_scores(_squared_distances_loop(client_sds), f).argmin())
    return _with_medians(copy.deepcopy(client_sds[chosen]), client_sds), chosen


@torch.no_grad()
def krum_best(global_sd: StateDict, client_sds: Clients, f: int = 2) -> tuple[StateDict, int]:
    chosen = int(_krum_scores(_squared_distances(global_sd, client_sds), f).argmin())
    return _with_medians({key: value.clone() for key, value in client_sds[chosen].items()}, client_sds), chosen


def _weiszfeld(distances_to: Callable[[Tensor], Tensor], weights: Tensor, nu: float) -> Tensor:
    """Up to 100 iterations; distances_to gives the clients' distances to their mean with these weights"""
    for _ in range(100):
        new = 1 / distances_to(weights).clamp(min=nu)
        new /= new.sum()
        done = ((new - weights).abs() <= 1e-6 * weights).all()
        weights = new
        if done:
            break
    return weights


def geometric_median_usual(global_sd: StateDict, client_sds: Clients, nu: float = 1e-6) -> tuple[StateDict, Tensor]:
    """(state dict, weights). Every iteration reads all models; nu is absolute, where fastagg's goes with distances."""
    keys = _parameters(global_sd)
    vectors = torch.stack([_flatten(sd, keys) for sd in client_sds])

    def distances_to(weights: Tensor) -> Tensor:
        mean = weights @ vectors
        return torch.stack([torch.linalg.vector_norm(v - mean) for v in vectors])

    weights = _weiszfeld(distances_to, _equal(client_sds).float(), nu)
    return _with_medians(_mix_loop(client_sds, weights), client_sds), weights


@torch.no_grad()
def geometric_median_best(global_sd: StateDict, client_sds: Clients) -> tuple[StateDict, Tensor]:
    squares = _squared_distances(global_sd, client_sds)

    def distances_to(weights: Tensor) -> Tensor:
        along = squares @ weights
        return (along - 0.5 * (weights @ along)).clamp(min=0).sqrt()

    nu = 1e-6 * float(squares[squares > 0].min()) ** 0.5
    weights = _weiszfeld(distances_to, _equal(client_sds), nu)
    return _with_medians(_mix_foreach(client_sds, weights, global_sd), client_sds), weights


def fedadam_usual(global_sd: StateDict, client_sds: Clients, lr=0.01, beta1=0.9, beta2=0.99, tau=1e-3) -> StateDict:
    out = fedavg_usual(global_sd, client_sds)
    for key in _parameters(global_sd):
        g, delta = global_sd[key], out[key] - global_sd[key]
        m, v = torch.zeros_like(g), torch.full_like(g, tau**2)  # as the first round finds them
        m = beta1 * m + (1 - beta1) * delta
        v = beta2 * v + (1 - beta2) * delta**2
        out[key] = g + lr * m / (v.sqrt() + tau)
    return out


@torch.no_grad()
def fedadam_best(global_sd: StateDict, client_sds: Clients, lr=0.01, beta1=0.9, beta2=0.99, tau=1e-3) -> StateDict:
    """In place, and no old moments to read; m and v end in tensors of their own, for a server keeps them"""
    out = fedavg_best(global_sd, client_sds)
    for key in _parameters(global_sd):
        g, delta = global_sd[key], out[key].sub_(global_sd[key])
        v = torch.full_like(g, beta2 * tau**2).addcmul_(delta, delta, value=1 - beta2)
        m = delta.mul_(1 - beta1)
        root = v.sqrt().add_(tau)
        out[key] = torch.addcdiv(g, m, root, value=lr, out=root)
    return out


def _attention(squares: Tensor) -> Tensor:
    """[K, K], rows sum to 1: near clients count more, on the scale of the mean squared distance"""
    K = len(squares)
    attention = (torch.exp(-squares * (K * (K - 1) / squares.sum())) / K).fill_diagonal_(0)
    return attention + torch.diag(1 - attention.sum(1))


def fedamp_usual(global_sd: StateDict, client_sds: Clients) -> list[StateDict]:
    """A state dict per client"""
    return [_mix_loop(client_sds, row) for row in _attention(_squared_distances_loop(client_sds))]


@torch.no_grad()
def fedamp_best(global_sd: StateDict, client_sds: Clients) -> list[StateDict]:
    return _mix_matmul(client_sds, _attention(_squared_distances(global_sd, client_sds)))


# Do the answers agree? PyTorch's sums here are float32. Over K clients they err by some 1e-7 of a value. Over millions
# of elements a running sum grows too large to take the last ones whole: torch.linalg.vector_norm is 4e-6 too small for
# the 0.3 million of a ResNet-20, 8e-4 for the 11 million of a ResNet-18. A matmul of 20 rows errs by 1e-5, but one of
# few rows by far more: the usual Gram of 5 ResNet-18s is wrong by 5e-3, of 5 ViT-Bs by 6e-2, and does not agree.


def _error_of_norms(model: StateDict) -> float:
    """Above what was measured, of models of up to 11 million elements"""
    return 1e-5 + 1e-10 * sum(value.numel() for value in model.values())


def _same_models(ours: Any, theirs: Any, rtol: float = 1e-5) -> None:
    """State dicts, or lists of them"""
    pairs = zip(ours, theirs, strict=True) if isinstance(theirs, list) else [(ours, theirs)]
    for a, b in pairs:
        assert list(a) == list(b)
        for key, value in b.items():
            torch.testing.assert_close(a[key], value, rtol=rtol, atol=1e-5, msg=lambda m, key=key: f"{key}: {m}")


def _same_weights(ours: fastagg.Result, theirs: tuple) -> None:
    rtol = _error_of_norms(ours)
    _same_models(ours, theirs[0], rtol)
    torch.testing.assert_close(ours.weights, theirs[1].double(), rtol=rtol, atol=1e-7)


def _same_logits(ours: fastagg.Result, theirs: tuple, variant: str = "paper", lr: float = LR) -> None:
    """Adam's first step is lr times the sign of the gradient: float32 cannot tell where that is near zero"""
    start = torch.full_like(ours.weights, 1 / ours.weights.shape[-1])
    slope = fastagg.fedawa_objective(ours.gram, start, variant=variant)[1]
    gradient = slope - (start * slope).sum(-1, keepdim=True)
    clear = gradient.abs() > 100 * _error_of_norms(ours) * slope.abs()
    assert clear.double().mean() > 0.7
    apart = (ours.logits - theirs[2].double()).abs()
    assert apart[clear].max() < 0.02 * lr, apart
    _same_models(ours, theirs[0], rtol=1e-3)


def _same_released(ours: fastagg.Result, theirs: tuple) -> None:
    _same_weights(ours, theirs)
    _same_logits(ours, theirs, "released", 1e-3)


def _same_choice(ours: fastagg.Result, theirs: tuple[StateDict, int]) -> None:
    """Clients whose scores are the same to float32 may both be chosen"""
    scores = _krum_scores(ours.gram.squared_distances(), 2)
    assert scores[theirs[1]] <= scores.min() * (1 + 4 * _error_of_norms(ours))
    if ours.weights[theirs[1]] == 1:
        _same_models(ours, theirs[0])


def _same_gram(ours: fastagg.Gram, theirs: Tensor) -> None:
    """Relative to the lengths of both vectors: a product may be near zero, its error is not"""
    lengths = ours.matrix.diagonal().sqrt()
    error = ((ours.matrix - theirs).abs() / (lengths[:, None] * lengths)).max().item()
    assert error < 1e-4, f"inner products differ by {error:.1e} of the vectors' lengths"


@dataclass
class Job:
    name: str
    fastagg: Callable[..., Any]  # takes out=, except for the Gram
    usual: Callable[..., Any]
    best: dict[str, Callable[..., Any]]  # by how it is done
    agree: Callable[[Any, Any], None]  # of (fastagg's result, another's): raises AssertionError where they differ
    least: int = 2  # clients

    def in_pytorch(self) -> dict[str, Callable[..., Any]]:
        """The usual code, and the best where there is one such"""
        [best] = self.best.values()
        return {"usual PyTorch": self.usual, "best PyTorch": best}


_layerwise = partial(partial, layerwise=True)


def _released(global_sd: StateDict, client_sds: Clients, out: StateDict | None = None) -> fastagg.Result:
    """A round of the authors' variant, by an aggregator, as it carries its logits"""
    return fastagg.FedAWA(variant="released").aggregate(global_sd, client_sds, out=out)


_JOBS = [
    Job("fedavg", fastagg.fedavg, fedavg_usual,
        {"torch._foreach_": fedavg_best, "add_ loop": fedavg_add, "stack + matmul": fedavg_stack}, _same_models),
    Job("gram", fastagg.gram, gram_usual, {"blocks": gram_best}, _same_gram),
    Job("fedawa", fastagg.fedawa, fedawa_usual, {"gram": fedawa_best}, _same_logits),
    Job("fedawa_released", _released, fedawa_released_usual, {"gram": fedawa_released_best}, _same_released),
    Job("fedawa_layerwise", _layerwise(fastagg.fedawa), _layerwise(fedawa_usual),
        {"grams": _layerwise(fedawa_best)}, _same_logits),
    Job("ldawa", fastagg.ldawa, ldawa_usual, {"dots": ldawa_best}, _same_weights),
    Job("krum", partial(fastagg.krum, f=2), krum_usual, {"gram": krum_best}, _same_choice, least=7),
    Job("geometric_median", fastagg.geometric_median, geometric_median_usual,
        {"gram": geometric_median_best}, _same_weights),
    Job("fedadam", fastagg.fedadam, fedadam_usual, {"in place": fedadam_best}, _same_models),
    Job("fedamp", fastagg.fedamp, fedamp_usual, {"gram": fedamp_best}, _same_models),
]  # fmt: skip
CONTESTANTS: dict[str, Job] = {job.name: job for job in _JOBS}
