"""What is recorded of a round besides accuracy: weights, lengths and similarities of updates, length of the step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

import fastagg
from fastagg.sim.config import Config
from fastagg.sim.devices import float64
from fastagg.sim.train import Update

if TYPE_CHECKING:
    from fastagg.sim.simulation import Simulation


def observed(
    sim: Simulation,
    result: Any,
    before: dict[str, torch.Tensor],
    present: list[int],
    updates: list[Update],
    here: list[int],
) -> dict[str, Any]:
    """What the round's Gram tells of the clients that were not dropped; methods that have none get one for this"""
    if result is None:  # several clusters: there is no common model to measure from
        return dict.fromkeys(("weights", "norms", "coherence", "gamma", "step", "fedavg_step"))
    gram = getattr(result, "gram", None)
    if gram is None:
        gram = fastagg.gram(before, [u.model for u in updates], params=sim.module)
    gram = gram.model().present()
    weights = getattr(result, "weights", None)
    weights = weights.mean(0) if weights is not None and weights.dim() == 2 else weights
    weights = None if weights is None else weights[here]
    gamma = getattr(result, "gamma", None)
    seen = fastagg.diagnostics(
        gram, None if weights is None or not weights.sum() > 0 else weights,
        gamma=1.0 if gamma is None else float(gamma),
    )  # fmt: skip
    assert seen.coherence is not None  # the Gram is formed
    assert seen.cosine is not None
    record = {
        "weights": None if weights is None else rounded(weights), "norms": rounded(seen.update_norms),
        "coherence": float(seen.coherence), "gamma": gamma,
        "shrink_ratio": finite(seen.shrink_ratio),
        **step_lengths(sim, gram, before, present),
    }  # fmt: skip
    if shows_clients(sim.options, sim.round):
        record |= {"cosine": rounded(seen.cosine, 4), "model_cosine": rounded(gram.cosine("models"), 6)}
        if all(u.heads is not None for u in updates):
            record["heads"] = [u.heads for u in updates]
    return record


def shows_clients(options: Config, round: int) -> bool:
    """Whether a round's record has what is large: the first, the middle and the last"""
    return round in (1, (options.rounds + 1) // 2, options.rounds)


def step_lengths(
    sim: Simulation, gram: fastagg.Gram, before: dict[str, torch.Tensor], present: list[int]
) -> dict[str, Any]:
    """How far the global model moved, and how far the mean by data size would have moved it"""
    if sim.personal:
        return {"step": None, "fedavg_step": None}
    names = [name for name, _ in sim.module.named_parameters()]
    moved = sum((float64(sim.models[0][n]) - float64(before[n])).square().sum().item() for n in names)
    sizes = np.array(sim.sizes(present), dtype=np.float64)
    shares = sizes / sizes.sum()
    return {"step": moved**0.5, "fedavg_step": float(np.sqrt(max(shares @ (gram @ shares), 0)))}


def class_norms(head: torch.Tensor) -> list[float]:
    """The classes' shares of the norms of the output layer's rows, in which cwFedAvg sees what a client has"""
    norms = torch.linalg.vector_norm(float64(head).flatten(1), dim=1)
    return rounded(norms / norms.sum().clamp(min=1e-300), 4)


def finite(value: torch.Tensor | None) -> float | None:
    return float(value) if value is not None and bool(torch.isfinite(value)) else None


def rounded(values: torch.Tensor, digits: int = 6) -> list:
    return np.round(float64(values).cpu().numpy(), digits).tolist()
