"""What a server wants to see each round, read off the Gram it has anyway: no model is looked at again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fastagg._engine.gram import Gram
from fastagg._engine.numerics import float64, ratio
from fastagg._engine.table import InputError


@dataclass(frozen=True, eq=False)
class Diagnostics:
    """One round in numbers, in float64; with a layer-wise Gram, all have a leading [L].

    update_norms              ||d_k||, how far each client moved: [K]
    cosine                    cos(d_i, d_j), the local gradient coherence of two clients (FedLAW, Def. 5.1): [K, K];
                              None if the Gram was not formed
    coherence                 of the cohort, 1/K sum_{i != j} l_i l_j cos(d_i, d_j) (FedLAW, Def. 5.1): []; None if the
                              Gram was not formed
    distance_to_global        ||gamma sum_k l_k w_k - g||, how far the global model moves: []; None, as the next one, if
                              the Gram was not formed and its product with the weights is not known
    shrink_ratio              ||gamma sum_k l_k d_k|| / ||(1 - gamma) g||, r of FedLAW (Eq. 4): what is learned relative
                              to what is shrunk; infinite if nothing is shrunk, for example with gamma = 1: []
    heterogeneity_coherence   cosine of the class distributions of the cohort and of all clients (FedLAW, Def. 5.2), 0
                              to 1: []; None without class_dist
    """

    update_norms: Tensor
    cosine: Tensor | None
    coherence: Tensor | None
    distance_to_global: Tensor | None
    shrink_ratio: Tensor | None
    heterogeneity_coherence: Tensor | None = None


def diagnostics(
    gram: Gram, weights: Any = None, *, gamma: float = 1.0, class_dist: Any = None, population: Any = None
) -> Diagnostics:
    """Computes norms, cosines and coherence of the client updates of a round, from a Gram (layer-wise or not).

    gram         the Gram of the round, for example .gram of a result
    weights      l, the weights of the clients, [K] or [L, K], such as .weights of a result; default: equal. If they do
                 not sum to 1, their sum counts as part of gamma. Dropped clients (gram.absent) have weight 0; their
                 norms and cosines are 0, and K is the number of the other clients.
    gamma        the factor that the aggregate was scaled by, FedLAW's result.gamma
    class_dist   [K, C], shares or sample counts of the classes, for the heterogeneity coherence, which depends on the
                 data distributions and does not follow from a Gram
    population   [C], the classes in the data of all clients, including those not in the round; default: the sum of
                 class_dist over the clients
    """
    lam = _weights(gram, weights)
    if not isinstance(gamma, int | float | np.number) or not np.isfinite(gamma):
        raise InputError(f"gamma={gamma!r}; expected a finite number")

    cosine = coherence = None
    if gram.formed:
        cosine = gram.cosine().cpu()
        others = cosine.numpy() * (1 - np.eye(gram.K))
        coherence = torch.as_tensor((lam * _times(others, lam)).sum(-1) / max(len(gram.took_part), 1), device="cpu")

    moved, shrink_ratio = _moved(gram.host, lam, gamma) if gram.host.knows(lam) else (None, None)
    return Diagnostics(
        update_norms=gram.norms().cpu(),
        cosine=cosine,
        coherence=coherence,
        distance_to_global=moved,
        shrink_ratio=shrink_ratio,
        heterogeneity_coherence=None if class_dist is None else _heterogeneity(gram, lam, class_dist, population),
    )


def _moved(gram: Gram, lam: np.ndarray, gamma: float) -> tuple[Tensor, Tensor]:
    """How far the global model moves, and what is learned relative to what is shrunk"""
    c, b = gram.global_square.numpy(), gram.along_global.numpy()
    shrink = 1 - gamma * lam.sum(-1)  # the aggregate is g - shrink g + gamma sum l d
    shrink = np.where(np.abs(shrink) < 1e-12, 0.0, shrink)  # weights sum to 1 up to rounding
    learned = np.maximum(gamma**2 * (lam * (gram @ lam)).sum(-1), 0)
    moved = np.maximum(shrink**2 * c - 2 * shrink * gamma * (lam * b).sum(-1) + learned, 0)
    shrunk = np.abs(shrink) * np.sqrt(np.maximum(c, 0))
    return (
        torch.as_tensor(np.sqrt(moved), device="cpu"),
        torch.as_tensor(np.where(shrunk == 0, np.inf, ratio(np.sqrt(learned), shrunk)), device="cpu"),
    )


def _weights(gram: Gram, weights: Any) -> np.ndarray:
    shape = tuple(gram.squares.shape)
    if weights is None:
        weights = np.zeros(gram.K)
        weights[gram.took_part] = 1 / max(len(gram.took_part), 1)
    lam = float64(weights)
    if lam.shape not in (shape, (gram.K,)):
        raise InputError(f"weights have shape {lam.shape}, expected {shape}")
    if not np.isfinite(lam).all():
        raise InputError("weights are not finite")
    return np.broadcast_to(lam, shape)


def _heterogeneity(gram: Gram, lam: np.ndarray, class_dist: Any, population: Any) -> Tensor:
    """cos(sum_k l_k D_k, D): the similarity of distributions, which Def. 5.2 leaves open, is the cosine"""
    D = float64(class_dist)
    if D.ndim != 2 or len(D) != lam.shape[-1] or not np.isfinite(D).all() or (D < 0).any():
        raise InputError(f"class_dist: expected [{lam.shape[-1]}, classes] finite numbers >= 0, a row per client")
    everyone = D[gram.took_part].sum(0) if population is None else float64(population)
    if everyone.shape != D.shape[1:] or not np.isfinite(everyone).all() or (everyone < 0).any():
        raise InputError(f"population: expected {D.shape[1]} finite numbers >= 0, one per class")
    cohort = lam @ ratio(D, D.sum(1, keepdims=True))  # [C] or [L, C]
    norms = np.sqrt((cohort**2).sum(-1) * (everyone**2).sum())
    return torch.as_tensor(np.clip(ratio(cohort @ everyone, norms), -1, 1), device="cpu")


def _times(A: np.ndarray, x: np.ndarray) -> np.ndarray:
    """A x: [K] or [L, K]"""
    return (A @ x[..., None])[..., 0]
