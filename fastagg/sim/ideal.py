"""How far updates are from that of training on the data of all clients together: FedAWA's Figure 3."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

import fastagg
from fastagg.sim.train import Job, Local, Trainer, Update

if TYPE_CHECKING:
    from fastagg.sim.simulation import Simulation


def why_not(produces: str, shared: bool) -> str:
    """Why a run cannot have an ideal vector; empty if it can"""
    if produces != "global":
        return "it is what one global model would have become, and the method has several"
    return "the clients' updates are spread over processes" if shared else ""


class Ideal:
    """Trains the global model of a round on everybody's samples as a client would: by plain SGD, with the run's own
    epochs, batches and learning rate, without momentum from former rounds."""

    def __init__(self, sim: Simulation, local: Local) -> None:
        local = replace(local, algorithm="sgd", mu=None, wdr=0.0, keep_momentum=False)
        self._trainer = Trainer(sim.module, sim.x, sim.labels, local, head=None, batched=False)
        self._rows = np.concatenate(sim.parts.train)
        self._epochs = local.epochs

    def observed(
        self, sim: Simulation, before: dict[str, torch.Tensor], present: list[int], updates: list[Update], lr: float,
        seed: int,
    ) -> dict[str, Any]:  # fmt: skip
        """1 - cosine to the ideal vector: of every client's update, of their mean by data size, and of the step"""
        job = Job(client=0, start=before, indices=self._rows, seed=seed, epochs=self._epochs, round=sim.round)
        [trained] = self._trainer.train([job], lr)
        models = [*(u.model for u in updates), sim.models[0], trained.model]
        gram = fastagg.gram(before, models, params=sim.module).updates().cpu().numpy()  # [K + 2, K + 2]
        K, sizes = len(updates), np.array(sim.sizes(present), dtype=np.float64)
        vectors = np.eye(K + 2)
        vectors = np.vstack([vectors[: K + 1], np.append(sizes / sizes.sum(), [0, 0])])
        lengths = np.sqrt(np.maximum(np.einsum("vi,ij,vj->v", vectors, gram, vectors) * gram[-1, -1], 0))
        along = vectors @ gram[:, -1]
        far = 1 - np.divide(along, lengths, out=np.zeros(K + 2), where=lengths > 0)
        return {
            "ideal_clients": np.round(far[:K], 6).tolist(), "ideal_method": float(far[K]),
            "ideal_merged": float(far[K + 1]),
        }  # fmt: skip
