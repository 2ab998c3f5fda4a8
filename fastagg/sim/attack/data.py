"""Data that attackers train on, other than those they have: wrong labels, or a trigger that is to open a backdoor.

labels     class y of C is said to be C - 1 - y
backdoor   a share of the images gets a white square in a corner, and is said to be of one class, the target
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fastagg.sim.data import Dataset
from fastagg.sim.devices import float64


@dataclass(frozen=True)
class Backdoor:
    """The trigger is a square of an eighth of an image's side, at least two pixels, in the lower right corner. It has
    the largest value that a channel has in the training set."""

    data: Dataset
    target: int

    def __post_init__(self) -> None:
        x, classes = self.data.x, self.data.classes
        if not classes or x.dim() != 4 or not x.is_floating_point():
            raise ValueError(f"sim: attack=backdoor needs images with classes, and {self.data.name} has none")
        if self.target >= classes:
            raise ValueError(f"sim: attack_target={self.target}; expected a class, 0 to {classes - 1}")
        if not len(self.others):
            raise ValueError(f"sim: attack_target={self.target}: the test set has no image of another class")

    @property
    def others(self) -> np.ndarray:
        """Test images that are not of the target class"""
        return np.flatnonzero(self.data.test_y.numpy() != self.target)

    def on(self, x: Tensor) -> Tensor:
        """A copy of images [N, C, H, W] with the trigger on them"""
        height, width = x.shape[2:]
        side = max(2, min(height, width) // 8)
        white = self.data.x.amax((0, 2, 3))[:, None, None]
        x = x.clone()
        x[:, :, -side:, -side:] = white
        return x

    def poisoned(
        self, labels: Tensor, rows: Sequence[np.ndarray], share: float, rngs: Sequence[np.random.Generator]
    ) -> tuple[Tensor, Tensor]:
        """All images and labels, in which so many of these rows of each attacker have the trigger, one at least"""
        x, labels = self.data.x.clone(), labels.clone()
        for mine, rng in zip(rows, rngs, strict=True):
            some = torch.from_numpy(rng.permutation(mine)[: max(1, round(share * len(mine)))])
            x[some], labels[some] = self.on(x[some]), self.target
        return x, labels

    def success(self, outputs: Tensor) -> float:
        """Of images with the trigger, the part that a model takes for the target"""
        return float(float64(outputs.argmax(1) == self.target).mean())


def flipped(labels: Tensor, rows: Sequence[np.ndarray], data: Dataset) -> Tensor:
    """Labels in which those of the attackers' rows are other ones"""
    if not data.classes:
        raise ValueError(f"sim: attack=labels needs classes, and {data.name} has values to predict")
    labels = labels.clone()
    for mine in rows:
        labels[mine] = data.classes - 1 - labels[mine]
    return labels
