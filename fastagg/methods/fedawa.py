"""FedAWA (Shi et al., CVPR 2025): weights learned from how the client vectors lie to each other.

Logits T, weights lam = softmax(T), client vectors d_k = w_k - g:

    loss = sum_k lam_k ||d_k - sum_j lam_j d_j|| + regulariser                                      (Eq. 3)

The whole objective and its gradient are read off the Gram, so optimiser steps cost microseconds, and with layers
(FedAWA-L, Eq. 4) all of them are solved at once on [L, K] arrays. Distances read off a float32 Gram lose accuracy as
its error (under 1e-6) over 1 - cos(d_k, d_j): fine until clients agree to a cosine of about 0.9999.

A trap: minimised to the end, the objective collapses onto one client (whose distance to itself is 0). The method is
a few small steps from the data shares, not an argmin.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

import numpy as np
import torch

from fastagg import core
from fastagg import table as tables
from fastagg.core import Layers, Params
from fastagg.gram import Gram
from fastagg.methods.common import check_client_ids, data_shares, float64, scaled_rows
from fastagg.result import Result
from fastagg.table import InputError, StateDict, Table

VARIANTS = ("released", "paper", "cos")


@dataclass(frozen=True)
class Options:
    """Options of fedawa and FedAWA, checked."""

    variant: str = "released"
    steps: int = 1
    lr: float | None = None
    optimizer: str = "adam"
    reg: str | None = "cos"
    gamma: float = 1.0
    layerwise: bool = False

    def __post_init__(self) -> None:
        for name, allowed in (("variant", VARIANTS), ("optimizer", ("adam", "sgd")), ("reg", ("cos", "euc", None))):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name}={getattr(self, name)!r}: expected one of {', '.join(map(repr, allowed))}")
        if not isinstance(self.steps, Integral) or isinstance(self.steps, bool) or self.steps < 0:
            raise ValueError(f"steps={self.steps!r}: expected an integer >= 0")
        if self.lr is not None and not (isinstance(self.lr, Real) and 0 < self.lr < float("inf")):
            raise ValueError(f"lr={self.lr!r}: expected a number > 0")
        if not (isinstance(self.gamma, Real) and np.isfinite(self.gamma)):
            raise ValueError(f"gamma={self.gamma!r}: expected a finite number")
        if not isinstance(self.layerwise, bool | np.bool_):
            raise ValueError(f"layerwise={self.layerwise!r}: expected True or False")


def fedawa(
    global_sd: StateDict, client_sds: Sequence[StateDict], sizes=None, *, variant: str = "released", steps: int = 1,
    lr: float | None = None, optimizer: str = "adam", reg: str | None = "cos", gamma: float = 1.0,
    layerwise: bool = False, logits=None, params: Params = None, layers: Layers = None, out: StateDict | None = None,
) -> Result:  # fmt: skip
    """One round of FedAWA.

    variant     "released": what the authors' code does and their tables show. The regulariser is sum_k lam_k r_k with
                r_k = 1 - cos(g, w_k); logits start at the data shares; the aggregate uses the weights from before the
                last step, so with one step they are known up front and the round is a single read of the clients.
                "paper": Eq. 3 as written. The regulariser is the distance of the aggregate to g; logits start at the
                log shares, so that the first weights are the shares; the weights from after the last step are used.
                "cos": FedAWA-COS (Table 4), weights proportional to max(0, cos(d_k, sum_j n_j d_j)); no optimiser.
    steps       optimiser steps per round
    lr          default 1e-3 for "adam" (betas 0.5, 0.999), 1e-2 for "sgd" (momentum 0.9, weight decay 5e-4)
    reg         "cos", "euc" (squared distance per element; the plain distance in "paper") or None
    gamma       scales the aggregated parameters (not the buffers)
    layerwise   FedAWA-L: weights of its own for every layer
    logits      where to start: a former result's .logits, [K] or [L, K]; FedAWA carries them for you
    params, layers, out   as in fastagg.gram and fastagg.mix

    The result has .weights ([K], or [L, K] with .layers), .gram and .logits.
    """
    options = Options(variant, steps, lr, optimizer, reg, gamma, layerwise)
    table = tables.build(core.need_global(global_sd), client_sds, params=params, layers=layers)
    n = data_shares(sizes, table.K)
    start = first_logits(n, options, len(table.layout.layers))
    if logits is not None:
        given = float64(logits)
        if given.shape != start.shape:
            raise InputError(f"logits have shape {given.shape}, expected {start.shape}")
        if not np.isfinite(given).all():
            raise InputError("logits are not finite")
        start = given
    return _aggregate(table, n, start, options, out)


class FedAWA:
    """FedAWA over rounds: the logits of each client id are carried from round to round, also past rounds it misses.

    >>> aggregator = fastagg.FedAWA(layerwise=True)
    >>> global_sd = aggregator.aggregate(global_sd, client_sds, sizes, client_ids=["hospital-3", "hospital-7"])

    Options are those of fastagg.fedawa. state_dict() and load_state_dict() let a server resume after a crash.
    A round that raises leaves the state as it was.
    """

    def __init__(self, *, params: Params = None, layers: Layers = None, **options: Any) -> None:
        self.options = Options(**options)
        self._form = {"params": params, "layers": layers}
        self._logits: dict[Any, np.ndarray] = {}  # client id -> [] or [L]
        self._layers: tuple[str, ...] | None = None

    def aggregate(
        self, global_sd: StateDict, client_sds: Sequence[StateDict], sizes=None, client_ids=None, *,
        out: StateDict | None = None,
    ) -> Result:  # fmt: skip
        """One round. client_ids names the clients over rounds (default: their positions 0, 1, ...)."""
        client_sds = list(client_sds)
        ids = check_client_ids(client_ids, len(client_sds))
        table = tables.build(core.need_global(global_sd), client_sds, client_ids=ids, **self._form)
        layers = table.layout.layers if self.options.layerwise else None
        if self._logits and layers != self._layers:
            raise InputError(f"the model's layers are {layers}, but this aggregator carries logits for {self._layers}")
        n = data_shares(sizes, table.K)
        start = first_logits(n, self.options, len(table.layout.layers))
        for k, name in enumerate(ids):
            if name in self._logits:
                start[..., k] = self._logits[name]
        result = _aggregate(table, n, start, self.options, out)
        if result.logits is not None:
            carried = result.logits.numpy()
            self._logits.update((name, carried[..., k].copy()) for k, name in enumerate(ids))
            self._layers = layers
        return result

    def state_dict(self) -> dict[str, Any]:
        """Plain data: strings, lists and one float64 tensor [clients] or [clients, L]."""
        return {
            "method": "fedawa",
            "variant": self.options.variant,
            "layers": None if self._layers is None else list(self._layers),
            "client_ids": list(self._logits),
            "logits": torch.tensor(np.array(list(self._logits.values()), dtype=np.float64)),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over a state_dict(); one that does not fit raises and changes nothing."""
        if not isinstance(state, Mapping) or {"method", "variant", "layers", "client_ids", "logits"} - set(state):
            raise InputError("FedAWA state: expected what state_dict() returned")
        for name, mine in (("method", "fedawa"), ("variant", self.options.variant)):
            if state[name] != mine:
                raise InputError(f"FedAWA state: {name} is {state[name]!r}, this aggregator's is {mine!r}")
        try:
            layers = None if state["layers"] is None else tuple(state["layers"])
            ids = check_client_ids(list(state["client_ids"]), len(state["client_ids"]))
            logits = float64(state["logits"])
        except (TypeError, ValueError, RuntimeError) as error:
            raise InputError(f"FedAWA state: {error}") from error
        if ids and (layers is not None) != self.options.layerwise:
            raise InputError(f"FedAWA state: layers are {layers}, but layerwise={self.options.layerwise}")
        expected = (len(ids),) if layers is None else (len(ids), len(layers))
        if logits.shape != expected:
            raise InputError(f"FedAWA state: logits have shape {logits.shape}, expected {expected}")
        if not np.isfinite(logits).all():
            raise InputError("FedAWA state: logits are not finite")
        self._logits = dict(zip(ids, logits, strict=True))
        self._layers = layers


def fedawa_objective(
    gram: Gram, weights, *, variant: str = "released", reg: str | None = "cos"
) -> tuple[torch.Tensor, torch.Tensor]:
    """FedAWA's loss and its gradient in the weights: (scalar, [K]) for a model's Gram, ([L], [L, K]) for layers'.

    weights are [K] or [L, K] and need not sum to 1. In the logits T of weights = softmax(T) the gradient is
    weights * (gradient - (weights * gradient).sum()).
    """
    Options(variant=variant, reg=reg)
    if variant == "cos":
        raise ValueError("variant='cos' has no objective")
    C = gram.matrix.cpu().numpy()
    given, expected = float64(weights), (*C.shape[:-2], gram.K)
    if given.shape not in (expected, (gram.K,)):
        raise InputError(f"weights have shape {given.shape}, expected {expected}")
    loss, gradient = objective(C, gram.numel.numpy(), np.broadcast_to(given, expected), variant, reg)
    return torch.as_tensor(loss), torch.from_numpy(gradient)


def _aggregate(table: Table, n: np.ndarray, start: np.ndarray, o: Options, out: StateDict | None) -> Result:
    known = o.variant == "released" and o.steps <= 1  # the weights of this round do not depend on this round's Gram
    logits = start
    if known:
        weights = softmax(start)
        scaled, row = scaled_rows(table, weights, o.gamma)
        gram, [result] = core.gram_mix_of(table, o.layerwise, scaled, row, out)
        core.check_finite(table, gram)
        if o.steps:
            _, logits = solve(gram, start, o)
    else:
        gram = core.gram_of(table, o.layerwise)
        core.check_finite(table, gram)
        if o.variant == "cos":
            weights, logits = cosine_weights(gram.matrix.cpu().numpy(), n), None
        else:
            weights, logits = solve(gram, start, o)
        scaled, row = scaled_rows(table, weights, o.gamma)
        [result] = core.mix_of(table, scaled, row, out)
    result.gram = gram
    result.weights = torch.from_numpy(weights)
    result.layers = table.layout.layers if o.layerwise else None
    result.logits = None if logits is None else torch.from_numpy(logits)
    return result


# Below, K-by-K arithmetic in float64: C is [K+1, K+1] or [L, K+1, K+1]; lam (weights) and T (logits) are [K] or [L, K].


def first_logits(n: np.ndarray, o: Options, layers: int) -> np.ndarray:
    start = n if o.variant == "released" else np.log(np.maximum(n, 1e-300))  # a share of 0 has no finite log
    return np.tile(start, (layers, 1)) if o.layerwise else start.copy()


def softmax(T: np.ndarray) -> np.ndarray:
    e = np.exp(T - T.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def objective(C: np.ndarray, numel, lam: np.ndarray, variant: str, reg: str | None) -> tuple[np.ndarray, np.ndarray]:
    """loss [] or [L], and its gradient in lam"""
    return _objective(C, numel, variant, reg)(lam, True)


def _objective(C: np.ndarray, numel, variant: str, reg: str | None) -> Callable[[np.ndarray, bool], tuple]:
    """(lam, want_loss) -> (loss, gradient), with all that does not depend on lam worked out once"""
    c, b, G = C[..., :1, 0], C[..., 0, 1:], np.ascontiguousarray(C[..., 1:, 1:])
    squares = np.einsum("...kk->...k", G).copy()
    r = np.zeros_like(squares)  # what "released" adds, linear in lam
    if variant == "released" and reg == "cos":
        r = _one_minus_cosine(c, b, squares, 1.0)
    elif variant == "released" and reg == "euc":
        r = squares / np.maximum(np.asarray(numel)[..., None], 1)

    def deviation(lam, want_loss):
        Gl = _matvec(G, lam)
        q = _dot(lam, Gl)  # ||sum lam d||^2
        apart = squares - 2 * Gl + q  # ||d_k - sum lam d||^2, zero below what float64 can tell from zero
        distance = np.sqrt(np.where(apart > 1e-15 * (squares + q), apart, 0))
        pull = _ratio(lam, distance)
        cost = distance + r
        gradient = cost + Gl * pull.sum(-1, keepdims=True) - _matvec(G, pull)
        return _dot(lam, cost) if want_loss else None, gradient, Gl, q

    def released(lam, want_loss):
        loss, gradient, _, _ = deviation(lam, want_loss)
        return loss[..., 0] if want_loss else None, gradient

    def paper(lam, want_loss):
        loss, gradient, Gl, q = deviation(lam, want_loss)
        s = lam.sum(-1, keepdims=True)
        a = _dot(lam, b)  # <sum lam d, g>
        if reg == "euc":
            e = s - 1  # sum lam w - g = e g + sum lam d
            length = np.sqrt(np.maximum(e * e * c + 2 * e * a + q, 0))
            return (loss + length)[..., 0] if want_loss else None, gradient + _ratio(e * c + a + e * b + Gl, length)
        length = np.sqrt(np.maximum(s * s * c + 2 * s * a + q, 0))  # ||sum lam w||
        slope = (c * q - a * a) + b * (s * a + q) - Gl * (s * c + a)  # the c^2 terms cancel exactly: left out
        loss = (loss + _one_minus_cosine(c, a, q, s))[..., 0] if want_loss else None
        return loss, gradient - _ratio(slope, length**3 * np.sqrt(c))

    return released if variant == "released" or reg is None else paper


def _one_minus_cosine(c, a, q, s):
    """1 - cos(g, s g + d) with c = ||g||^2, a = <g, d>, q = ||d||^2; without cancellation when d is small"""
    dot = s * c + a
    lengths = np.sqrt(np.maximum(c * (s * s * c + 2 * s * a + q), 0))
    small = _ratio(np.maximum(c * q - a * a, 0), lengths * (lengths + np.abs(dot)))
    return np.where(lengths == 0, 1.0, np.where(dot > 0, small, 2 - small))


def _matvec(A, x):
    return A @ x if x.ndim == 1 else (A @ x[..., None])[..., 0]


def _dot(x, y):  # over clients, kept as a last dimension of 1
    return (x * y).sum(-1, keepdims=True)


def _ratio(a, b):
    """a / b, and 0 where b is 0"""
    zero = b == 0
    return np.where(zero, 0.0, a / (b + zero))


def solve(gram: Gram, T: np.ndarray, o: Options) -> tuple[np.ndarray, np.ndarray]:
    """Weights and logits after o.steps optimiser steps from T; "released" uses the weights from before the last one."""
    f = _objective(gram.matrix.cpu().numpy(), gram.numel.numpy(), o.variant, o.reg)
    lr = o.lr if o.lr is not None else 1e-3 if o.optimizer == "adam" else 1e-2
    T, first, second = T.copy(), np.zeros_like(T), np.zeros_like(T)
    lam = softmax(T)
    for step in range(1, o.steps + 1):
        lam = softmax(T)
        _, v = f(lam, False)
        g = lam * (v - _dot(lam, v))
        if o.optimizer == "adam":
            first = 0.5 * first + 0.5 * g
            second = 0.999 * second + 0.001 * g * g
            scale = (1 - 0.999**step) ** 0.5
            T -= lr / (1 - 0.5**step) * first / (np.sqrt(second) / scale + 1e-8)
        else:
            g = g + 5e-4 * T
            first = g if step == 1 else 0.9 * first + g
            T -= lr * first
    return (lam if o.variant == "released" else softmax(T)), T


def cosine_weights(C: np.ndarray, n: np.ndarray) -> np.ndarray:
    """FedAWA-COS; the data shares where no client agrees with the mean update"""
    G = C[..., 1:, 1:]
    along = G @ n
    norms = np.sqrt(np.maximum(np.einsum("...kk->...k", G) * (along * n).sum(-1, keepdims=True), 0))
    w = np.maximum(_ratio(along, norms), 0)
    total = w.sum(-1, keepdims=True)
    return np.where(total > 0, _ratio(w, total), n)
