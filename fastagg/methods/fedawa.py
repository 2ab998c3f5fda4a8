"""FedAWA (Shi et al., CVPR 2025): client weights learned from the geometry of the client updates.

Logits T, weights lam = softmax(T), client vectors d_k = w_k - g:

    loss = sum_k lam_k ||d_k - sum_j lam_j d_j|| + regulariser                                      (Eq. 3)

The whole objective and its gradient are read off the Gram, so optimiser steps cost microseconds, and with layers
(FedAWA-L, Eq. 4) all of them are solved at once on [L, K] arrays. Distances read off a float32 Gram lose accuracy as
its error (under 1e-6) over 1 - cos(d_k, d_j). Where clients agree so well that this matters, "paper" reads them once
more, centred on one of them; "released" does not.

A trap: minimised to the end, the objective collapses onto one client (whose distance to itself is 0). The method is
a few small steps from the data shares, not an argmin.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import field, replace
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
import torch

from fastagg.extend import (
    ClientValue,
    Cohort,
    GlobalAggregator,
    Gram,
    InputError,
    Layout,
    Pass,
    Range,
    Result,
    RoundInput,
    Weights,
    check_choice,
    float64,
    ratio,
    register,
)
from fastagg.methods.feddisco import LABEL_DIST, FedDisco

# Defaults of steps and of Adam's lr. Those of "paper" were chosen by benchmarks/fedawa_steps.py, see docs/methods.md.
STEPS = {"paper": 5, "released": 1}
LR = {"paper": 0.05, "released": 1e-3}


class Carried(NamedTuple):
    """What a FedAWA aggregator remembers"""

    logits: dict[Any, np.ndarray]  # client id -> [] or [L]
    layers: tuple[str, ...] | None = None


@register
class FedAWA(GlobalAggregator):
    """Client weights learned in every round: clients whose updates agree with the weighted mean update gain weight.

    variant     "paper": Algorithm 1. Every round starts from the data shares, takes a few optimiser steps on Eq. 3 and
                aggregates with the optimised weights. Two reads of the clients; nothing is carried over rounds.
                "released": what the authors' code does and their tables show, for reproduction. The regulariser is
                sum_k lam_k (1 - cos(g, w_k)); the logits start at the raw data shares and are carried from round to
                round; a round uses the weights from before its last step. With one step, these are known in advance, so
                the round is a single read, and its weights do not depend on what the clients sent in it.
                "cos": FedAWA-COS (Table 4), weights proportional to max(0, cos(d_k, sum_j n_j d_j)); no optimiser.
    steps       optimiser steps per round; default: 5 in "paper", 1 in "released"
    lr          learning rate; default for "adam" (betas 0.5, 0.999): 0.05 in "paper", 1e-3 in "released"; for "sgd"
                (momentum 0.9, weight decay 5e-4): 1e-2
    optimizer   "adam" or "sgd"
    reg         "cos", "euc" (the distance to g; in "released", its square per element) or None
    gamma       scales the aggregated parameters (not the buffers)
    layerwise   FedAWA-L: separate weights for every layer
    logits_by   "released" carries one logit per client id ("id"), or per position in client_sds ("position"), as the
                authors' code does when only some of the clients take part
    start       the weights to start from: "shares" of the data; "feddisco": those of FedDisco with its defaults (Figure
                6): every round then needs label_dist. "released" starts at these as logits, as it does at shares
    label_dist  per round: each client's label distribution, [K, classes], as counts or shares; the start is FedDisco's
    logits      per round: the starting point, [K] or [L, K], for example .logits of a former result. Passing them on in
                "paper" makes the weights collapse onto one client within a few rounds.

    The result has .weights ([K], or [L, K] with .layers), .gram and .logits. With variant="released", use an
    aggregator, which carries the logits (state_dict() and load_state_dict() let a server resume after a crash), or pass
    logits=.
    """

    name = "fedawa"
    paper = "Shi et al., CVPR 2025"
    reads = "products"
    round_inputs = (
        RoundInput("logits", "the logits to start from", client_axis=-1, entry_dims=None, from_clients=False),
        replace(LABEL_DIST, required=False),
    )
    client_values = (ClientValue("logits"),)

    variant: Literal["paper", "released", "cos"] = "paper"
    steps: Annotated[int, Range(0)] | None = None
    lr: Annotated[float, Range(above=0)] | None = None
    optimizer: Literal["adam", "sgd"] = "adam"
    reg: Literal["cos", "euc"] | None = "cos"
    gamma: Annotated[float, Range()] = 1.0
    layerwise: bool = False
    logits_by: Literal["id", "position"] = "id"
    start: Literal["shares", "feddisco"] = "shares"
    state: Carried = field(init=False, default_factory=lambda: Carried({}), repr=False)

    def check_options(self) -> None:
        if self.start == "feddisco":
            if self.variant == "cos":
                raise ValueError(
                    "fedawa: variant='cos' has no weights to start from; choose another, or start='shares'"
                )
            self.require("label_dist")
        if self.steps is None:
            self.steps = STEPS.get(self.variant, 1)
        if self.lr is None:
            self.lr = LR.get(self.variant, 1e-3) if self.optimizer == "adam" else 1e-2

    @property
    def knows_weights(self) -> bool:
        """The weights of a round do not depend on its Gram"""
        return self.variant == "released" and (self.steps or 0) <= 1

    def passes(self, layout: Layout, inputs: Mapping[str, Any]) -> tuple[Pass, ...]:
        return ("gram_mix",) if self.knows_weights else ("gram", "mix")

    def products(self) -> int:
        """With the weights, and with the weights over distances, in every step"""
        return 1 if self.variant == "cos" else 2 * (self.steps or 0)

    def weigh(self, cohort: Cohort, logits: np.ndarray | None = None, label_dist: np.ndarray | None = None) -> Weights:
        layers, carried = cohort.layers if self.layerwise else None, cohort.state
        if carried.logits and layers != carried.layers:
            raise InputError(
                f"the model's layers are {layers}, but this aggregator carries logits for {carried.layers}"
            )
        n = cohort.shares if label_dist is None else FedDisco().weigh(cohort, label_dist).values
        if self.variant == "cos" and label_dist is not None:
            raise InputError("fedawa: variant='cos' has no weights to start from, and takes no label_dist")
        start = self._start(cohort, n, logits)
        first = cohort.shares if self.variant == "cos" else softmax(start)
        if self.knows_weights:
            return Weights(first, scale=self.gamma, with_gram=True, about={"logits": start})
        gram = cohort.gram(self.layerwise, times=first)
        if self.variant == "cos":
            return Weights(cosine_weights(gram, cohort.shares), scale=self.gamma, about={"logits": None})
        distances = cohort.distance_gram(self.layerwise, times=first) if self.variant == "paper" else gram
        weights, after = solve(gram, start, self, distances)
        if self.variant == "paper" and logits is None:
            weights = np.where(n > 0, weights, 0.0)  # 1e-300, where a share of 0 has no finite log
        return Weights(weights, scale=self.gamma, about={"logits": after})

    def learn(self, cohort: Cohort, weights: Weights, result: Result | None) -> None:
        after = weights.about["logits"]
        if after is None:
            return
        if self.knows_weights and self.steps:
            after = solve(cohort.gram(self.layerwise, times=softmax(after)), after, self)[1]
        if not np.isfinite(after).all():
            raise InputError("fedawa: updates are so long that the objective is beyond float64")
        if self.variant == "released":
            new = {name: after[..., k].copy() for k, name in enumerate(self._names(cohort))}
            cohort.state = Carried(cohort.state.logits | new, cohort.layers if self.layerwise else None)
        weights.about["logits"] = torch.from_numpy(after)

    def describe_dropped(self, result: Result, ids: list[Any], inputs: Mapping[str, Any]) -> None:
        """A dropped client keeps the logit it came with; one that had none stands at the mean of the others"""
        if result.logits is None:
            return
        given, logits = inputs.get("logits"), result.logits  # [K] or [L, K]
        mean = logits.nanmean(-1)
        for k, (client, name) in enumerate(zip(ids, ids if self.logits_by == "id" else range(len(ids)), strict=True)):
            if client in result.dropped:
                known = float64(given)[..., k] if given is not None else self.state.logits.get(name)
                logits[..., k] = mean if known is None else torch.as_tensor(known, device="cpu")

    def _start(self, cohort: Cohort, n: np.ndarray, given: np.ndarray | None) -> np.ndarray:
        """Logits to start from: those given, those remembered, or the method's first, of weights n [K]"""
        start = n if self.variant == "released" else np.log(np.maximum(n, 1e-300))  # a share of 0 has no finite log
        start = np.tile(start, (len(cohort.layers), 1)) if self.layerwise else start.copy()
        if given is not None:
            if given.shape != start.shape:
                raise InputError(f"logits have shape {given.shape}, expected {start.shape}")
            return given
        for k, name in enumerate(self._names(cohort)):
            if name in cohort.state.logits:
                start[..., k] = cohort.state.logits[name]
        return start

    def _names(self, cohort: Cohort) -> Sequence[Any]:
        """What the clients' logits are remembered by"""
        return cohort.ids if self.logits_by == "id" else cohort.positions

    def why_not_pre(self, buckets: bool) -> str:
        return super().why_not_pre(buckets and self.variant == "released")  # the others remember nothing

    def known_clients(self) -> Iterable[Any]:
        return self.state.logits if self.logits_by == "id" else ()

    def warn_state_lost(self, inputs: Mapping[str, Any], remedy: str) -> None:
        if self.variant == "released" and inputs.get("logits") is None:
            warnings.warn(
                "fedawa: variant='released' learns over rounds, and this call forgets what it learns: its weights "
                f"start at the data shares each time. {remedy}, pass logits=, or use variant='paper', which learns "
                "within one round.",
                stacklevel=3,
            )

    def state_dict(self) -> dict[str, Any]:
        """Plain data: strings, lists and one float64 tensor [clients] or [clients, L]."""
        return {
            **super().state_dict(),
            "variant": self.variant,
            "logits_by": self.logits_by,
            "layers": None if self.state.layers is None else list(self.state.layers),
            "client_ids": list(self.state.logits),
            "logits": torch.from_numpy(np.array(list(self.state.logits.values()), dtype=np.float64)),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.check_state(state, ("variant", "logits_by", "layers", "client_ids", "logits"))
        for option in ("variant", "logits_by"):
            if not isinstance(state[option], str) or state[option] != getattr(self, option):
                raise InputError(
                    f"fedawa state: {option} is {state[option]!r}, this aggregator's is {getattr(self, option)!r}"
                )
        ids, [logits] = self.read_clients(state, "logits")
        if state["layers"] is not None and not isinstance(state["layers"], list | tuple):
            raise InputError(f"fedawa state: layers are a {type(state['layers']).__name__}, expected a list")
        layers = None if state["layers"] is None else tuple(state["layers"])
        if ids and (layers is not None) != self.layerwise:
            raise InputError(f"fedawa state: layers are {layers}, but layerwise={self.layerwise}")
        expected = (len(ids),) if layers is None else (len(ids), len(layers))
        if logits.shape != expected:
            raise InputError(f"fedawa state: logits have shape {logits.shape}, expected {expected}")
        if not np.isfinite(logits).all():
            raise InputError("fedawa state: logits are not finite")
        super().load_state_dict(state)
        self.state = Carried(dict(zip(ids, logits, strict=True)), layers)


def fedawa_objective(
    gram: Gram, weights, *, variant: str = "paper", reg: str | None = "cos"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes FedAWA's loss and its gradient in the weights: (scalar, [K]), or ([L], [L, K]) for a layer-wise Gram.

    weights are [K] or [L, K] and need not sum to 1. With weights = softmax(T), the gradient in the logits T is
    weights * (gradient - (weights * gradient).sum()).
    """
    check_choice("fedawa_objective", "variant", variant, ("released", "paper"))
    check_choice("fedawa_objective", "reg", reg, ("cos", "euc", None))
    given, expected = float64(weights), tuple(gram.squares.shape)
    if given.shape not in (expected, (gram.K,)):
        raise InputError(f"weights have shape {given.shape}, expected {expected}")
    loss, gradient = _objective(gram, variant, reg)(np.broadcast_to(given, expected), True)
    return torch.as_tensor(loss, device="cpu"), torch.from_numpy(gradient)


# Below, arithmetic in float64 on what the Gram says: lam (weights) and T (logits) are [K] or [L, K].


def softmax(T: np.ndarray) -> np.ndarray:
    e = np.exp(T - T.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def _objective(
    gram: Gram, variant: str, reg: str | None, distances: Gram | None = None
) -> Callable[[np.ndarray, bool], tuple]:
    """(lam, want_loss) -> (loss, gradient), with everything that does not depend on lam worked out once.

    distances   a Gram to read the distances of clients off, if another. On weights that sum to 1 they do not depend on
                its center, nor does the gradient but for a constant, which a softmax takes no notice of.
    """
    layers = gram.layerwise
    other = gram if distances is None else distances
    squares, b, c = gram.on_host
    c = c[:, None] if layers else c[()]
    own = other.on_host.squares
    least = 1e-15 * own + 1e-300  # of a squared distance: what float64 can tell from zero
    r = np.zeros_like(squares)  # what "released" adds, linear in lam
    if variant == "released" and reg == "cos":
        r = _one_minus_cosine(c, b, squares, 1.0)
    elif variant == "released" and reg == "euc":
        r = squares / np.maximum(gram.numel.numpy()[..., None], 1)

    def deviation(lam, want_loss):  # and the product with lam
        Hl = other @ lam
        distance = np.sqrt(np.maximum(own + _dot(lam, Hl) - 2 * Hl, least))  # ||d_k - sum lam d||
        pull = lam / distance
        cost = distance + r
        gradient = cost + Hl * pull.sum(-1, keepdims=layers) - other @ pull
        return _dot(lam, cost) if want_loss else None, gradient, Hl

    def released(lam, want_loss):
        loss, gradient, _ = deviation(lam, want_loss)
        return _last(loss), gradient

    unit = _power_of_two(np.maximum(c, squares.max(-1, keepdims=layers)))  # keeps fourth powers within float64
    C, B, root = c * unit, b * unit, np.sqrt(c * unit)

    def paper(lam, want_loss):
        loss, gradient, Hl = deviation(lam, want_loss)
        Gl = Hl if other is gram else gram @ lam
        q = _dot(lam, Gl)  # ||sum lam d||^2
        s = lam.sum(-1, keepdims=layers)
        a = _dot(lam, b)  # <sum lam d, g>
        if reg == "euc":
            e = s - 1  # sum lam w - g = e g + sum lam d
            length = np.sqrt(np.maximum(e * e * c + 2 * e * a + q, 0))
            return _last(loss, length), gradient + ratio(e * c + a + e * b + Gl, length)
        away = _one_minus_cosine(c, a, q, s) if want_loss else None
        return _last(loss, away), gradient - cosine_slope(a * unit, q * unit, Gl * unit, s)

    def cosine_slope(a, q, Gl, s):  # all in the unit, which cancels
        length = np.sqrt(np.maximum(s * s * C + 2 * s * a + q, 0))  # ||sum lam w||
        slope = (C * q - a * a) + B * (s * a + q) - Gl * (s * C + a)  # the c^2 terms cancel exactly: left out
        return ratio(slope, length**3 * root)

    return released if variant == "released" or reg is None else paper


def _one_minus_cosine(c, a, q, s):
    """1 - cos(g, s g + d) with c = ||g||^2, a = <g, d>, q = ||d||^2; without cancellation when d is small"""
    unit = _power_of_two(np.maximum(c, q))
    c, a, q = c * unit, a * unit, q * unit
    dot = s * c + a
    lengths = np.sqrt(np.maximum(c * (s * s * c + 2 * s * a + q), 0))
    small = ratio(np.maximum(c * q - a * a, 0), lengths * (lengths + np.abs(dot)))
    return np.where(lengths == 0, 1.0, np.where(dot > 0, small, 2 - small))


def _power_of_two(x):
    """1 / x rounded to a power of two, by which numbers can be multiplied without a rounding; 1 for 0"""
    return np.ldexp(1.0, -np.frexp(x)[1])


def _dot(x, y):
    """Over clients: a scalar, or [L, 1] with layers"""
    return x @ y if x.ndim == 1 else (x * y).sum(-1, keepdims=True)


def _last(loss: Any, more: Any = 0.0) -> Any:
    """The loss as [] or [L]"""
    if loss is None:
        return None
    total = np.asarray(loss + more)
    return total[..., 0] if total.ndim else total


def solve(gram: Gram, T: np.ndarray, o: FedAWA, distances: Gram | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Weights and logits after o.steps optimiser steps from T; "released" uses the weights from before the last one."""
    f = _objective(gram, o.variant, o.reg, distances)
    T, first, second = T.copy(), np.zeros_like(T), np.zeros_like(T)
    lam = softmax(T)
    lr, steps = o.lr or 0.0, o.steps or 0  # which are numbers by now
    for step in range(1, steps + 1):
        lam = softmax(T)
        _, v = f(lam, False)
        g = lam * (v - _dot(lam, v))
        if o.optimizer == "adam":
            first = 0.5 * (first + g)
            second *= 0.999
            second += 0.001 * g * g
            scale = (1 - 0.999**step) ** -0.5
            T -= (lr / (1 - 0.5**step)) * first / (scale * np.sqrt(second) + 1e-8)
        else:
            g = g + 5e-4 * T
            first = g if step == 1 else 0.9 * first + g
            T -= lr * first
    return (lam if o.variant == "released" else softmax(T)), T


def cosine_weights(gram: Gram, n: np.ndarray) -> np.ndarray:
    """FedAWA-COS; the data shares where no client agrees with the mean update"""
    squares = gram.on_host.squares
    unit = _power_of_two(squares.max(-1, keepdims=True))  # products of squares could leave float64
    squares, along = squares * unit, (gram @ n) * unit
    norms = np.sqrt(np.maximum(squares * (along * n).sum(-1, keepdims=True), 0))
    w = np.maximum(ratio(along, norms), 0)
    total = w.sum(-1, keepdims=True)
    return np.where(total > 0, ratio(w, total), n)
