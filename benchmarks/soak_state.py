"""What methods should remember after many rounds, worked out slowly in float64: for benchmarks.soak.

Each class sees every round; at the end errors() compares what it has with the method's state_dict(), and gives errors
and the tolerances that they must be within.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy.cluster import hierarchy

CLIENTS = 60
PARAMS = {
    "conv.weight": (8, 3, 3, 3), "conv.bias": (8,), "bn.weight": (8,), "bn.bias": (8,),
    "fc.weight": (32, 64), "fc.bias": (32,), "head.weight": (10, 32), "head.bias": (10,),
}  # fmt: skip
SIZES = {key: int(np.prod(shape)) for key, shape in PARAMS.items()}
GRAM_ERROR = 36 * 2.0**-24  # relative: float32 for at most 36 additions, then float64
Errors = tuple[Any, Any]  # of the method, and what they may be


@dataclass
class Round:
    global_sd: dict[str, torch.Tensor]
    clients: list[dict[str, torch.Tensor]]
    sizes: list[int]
    ids: list[str]
    dtype: torch.dtype
    n: torch.Tensor  # [K], data shares
    g: torch.Tensor  # [D], the global parameters as the methods see them, in float64
    w: torch.Tensor  # [K, D], the clients' alike

    @property
    def d(self) -> torch.Tensor:
        return self.w - self.g


class Angles:
    """FedAdp: all angles are kept, and averaged once, at the end"""

    def __init__(self, rounds: int) -> None:
        self.t, self.seen = (
            0,
            np.full((2, rounds, CLIENTS), np.nan),
        )  # angles and tolerances; made now: it must not grow

    def see(self, r: Round, result: Any) -> None:
        d = r.d
        mean, lengths = r.n @ d, d.norm(dim=1)
        cosine = (d @ mean / (lengths * mean.norm())).clamp(-1, 1)
        wrong = 2 * GRAM_ERROR * (r.n @ lengths / mean.norm()).item()  # of a cosine: its sums may cancel
        sine = (1 - cosine**2).sqrt().clamp(min=wrong**0.5)
        columns = [number(name) for name in r.ids]
        self.seen[:, self.t, columns] = np.stack([torch.arccos(cosine), wrong / sine])
        self.t += 1

    def errors(self, state: dict[str, Any]) -> Errors:
        seen = self.seen[:, :, [number(name) for name in state["client_ids"]]]
        mean, tolerance = np.nanmean(seen, axis=1)
        rounds = (~np.isnan(seen[0])).sum(0)
        return np.where(rounds == state["rounds"].numpy(), np.abs(state["angles"].numpy() - mean), np.inf), tolerance


class Moments:
    """FedAdam and FedAvgM: moments in float64, and with them how far rounding may have taken the method's own"""

    def __init__(self, method: str) -> None:
        self.adam = method == "fedadam"
        total = sum(SIZES.values())
        self.m, self.m_error, self.v_error = torch.zeros(3, total, dtype=torch.float64)
        self.v = torch.full((total,), 1e-3**2, dtype=torch.float64)

    def see(self, r: Round, result: Any) -> None:
        delta, unit, info = r.n @ r.d, torch.finfo(torch.float32).eps, torch.finfo(r.dtype)
        wide = torch.float64 if r.dtype in (torch.float32, torch.float64) else torch.float32  # what sums are made in
        error = info.eps * delta.abs() + info.eps * info.smallest_normal  # of delta, rounded to the dtype
        error += torch.finfo(wide).eps * (len(r.ids) + 2) * (r.n @ r.w.abs() + r.g.abs())  # and of its sum
        keep, add = (0.9, 0.1) if self.adam else (0.9, 1.0)
        self.m_error = keep * self.m_error + add * error + 2 * unit * (keep * self.m.abs() + add * delta.abs())
        self.m = keep * self.m + add * delta
        self.v_error = 0.99 * self.v_error + 0.01 * error * (2 * delta.abs() + error)
        self.v_error += 3 * unit * (0.99 * self.v + 0.01 * delta**2)
        self.v = 0.99 * self.v + 0.01 * delta**2

    def errors(self, state: dict[str, Any]) -> Errors:
        flat = {
            name: torch.cat([state[name][key].double().reshape(-1) for key in PARAMS]) for name in "mv"[: 1 + self.adam]
        }
        found = [(flat["m"] - self.m, self.m_error)] + ([(flat["v"] - self.v, self.v_error)] if self.adam else [])
        return tuple(torch.cat(some).abs().numpy() for some in zip(*found, strict=True))


class Logits:
    """FedAWA with SGD: the released objective, one step, by autograd on all parameters"""

    lr = 1e-2

    def __init__(self) -> None:
        self.logits: dict[str, float] = {}
        self.tolerance: dict[str, float] = {}

    def see(self, r: Round, result: Any) -> None:
        start = [self.logits.get(name, share) for name, share in zip(r.ids, r.n.tolist(), strict=True)]
        T = torch.tensor(start, dtype=torch.float64, requires_grad=True)
        away = 1 - torch.nn.functional.cosine_similarity(r.w, r.g[None], dim=1)
        weights, d = T.softmax(0), r.d
        distance = (d - weights @ d).norm(dim=1)
        (gradient,) = torch.autograd.grad((weights * (distance + away)).sum(), T)
        after = T.detach() - self.lr * (gradient + 5e-4 * T.detach())
        # A squared distance is a sum of entries of the Gram, none above the largest square: four times their error is
        # that of the square. The gradient's is as that of a distance, times the client's weight.
        wrong = 4 * GRAM_ERROR * d.norm(dim=1).max().item() ** 2 / distance.min().item()
        for name, value, weight in zip(r.ids, after.tolist(), weights.tolist(), strict=True):
            self.logits[name] = value
            self.tolerance[name] = self.tolerance.get(name, 1e-12) + self.lr * weight * wrong

    def errors(self, state: dict[str, Any]) -> Errors:
        ids, got = state["client_ids"], state["logits"].tolist()
        pairs = [(abs(x - self.logits[name]), self.tolerance[name]) for name, x in zip(ids, got, strict=True)]
        return tuple(np.array(pairs).T)


class Clusters:
    """CFL: the number of each client's cluster, by the rules of its documentation and each round's own Gram"""

    def __init__(self, eps1: float, eps2: float) -> None:
        self.eps1, self.eps2, self.splits = eps1, eps2, 0
        self.number: dict[str, int] = {}

    def see(self, r: Round, result: Any) -> None:
        at = sorted(range(len(r.ids)), key=lambda k: r.ids[k])  # methods go by ids, not by the caller's order
        ids, shares = [r.ids[k] for k in at], r.n[at]
        cosine, G = (x.numpy()[np.ix_(at, at)] for x in (result.gram.cosine(), result.gram.updates()))
        known, first = [k for k, name in enumerate(ids) if name in self.number], min(self.number.values(), default=0)
        now = [self.number.get(name, first) for name in ids]
        for k in (k for k in range(len(now)) if known and k not in known):
            now[k] = self.number[ids[max(known, key=lambda j: cosine[k, j])]]
        fresh = max([*self.number.values(), *now]) + 1
        for c in sorted(set(now)):
            members = [k for k in range(len(now)) if now[k] == c]
            n, inner = (shares[members] / shares[members].sum()).numpy(), G[np.ix_(members, members)]
            still = np.sqrt(n @ inner @ n) < self.eps1 and np.sqrt(inner.diagonal().max()) > self.eps2
            if len(members) > 2 and still:
                self.number = {name: x for name, x in self.number.items() if x != c}  # the absent are forgotten
                for k in second_half(cosine, members):
                    now[k] = fresh
                fresh, self.splits = fresh + 1, self.splits + 1
        self.number |= dict(zip(ids, now, strict=True))

    def errors(self, state: dict[str, Any]) -> Errors:
        same = dict(zip(state["client_ids"], state["clusters"].tolist(), strict=True)) == self.number
        return [0.0 if same and self.splits else np.inf], [1.0]


def second_half(cosine: np.ndarray, members: list[int]) -> list[int]:
    """Those that complete linkage, here SciPy's, parts from the first member"""
    distance = 1 - cosine[np.ix_(members, members)]
    tree = hierarchy.linkage(distance[np.triu_indices(len(members), 1)], "complete")
    half = hierarchy.fcluster(tree, 2, "maxclust")
    return [k for k, h in zip(members, half, strict=True) if h != half[0]]


def number(name: str) -> int:
    return int(name.removeprefix("client-"))
