"""The model, and scikit-learn's digits: 1797 images of 8 x 8 pixels, part of scikit-learn, so nothing is downloaded."""

from __future__ import annotations

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy

CLASSES = 10


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, CLASSES))


def load(partition: int | None = None, partitions: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """The images of one client, who has some digits more often than others; without a number, the test images"""
    x, y = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(y))
    test, train = order[:360], order[360:]
    if partition is None:
        chosen = test
    else:
        shares = np.random.default_rng(1).dirichlet(np.full(partitions, 0.5), CLASSES)  # of each digit, per client
        owner = [np.random.default_rng(i).choice(partitions, p=shares[y[i]]) for i in train]
        chosen = train[np.array(owner) == partition % partitions]
    return torch.tensor(x[chosen] / 16, dtype=torch.float32), torch.tensor(y[chosen])


def train(model: nn.Module, x: torch.Tensor, y: torch.Tensor, epochs: int, lr: float) -> float:
    """Plain SGD; the mean loss of the last epoch, 0 without data"""
    optimizer, loss = torch.optim.SGD(model.parameters(), lr=lr), 0.0
    for _ in range(epochs):
        total = 0.0
        for batch in torch.randperm(len(y)).split(32):
            optimizer.zero_grad()
            batch_loss = cross_entropy(model(x[batch]), y[batch])
            batch_loss.backward()
            optimizer.step()
            total += batch_loss.item() * len(batch)
        loss = total / max(len(y), 1)
    return loss


@torch.no_grad()
def accuracy(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> float:
    return (model(x).argmax(1) == y).double().mean().item() if len(y) else 0.0
