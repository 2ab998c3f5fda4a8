"""A small network for 8 x 8 digits. Its dtype is an argument so that job export keeps it."""

import torch
from torch import nn


class DigitsNet(nn.Module):
    def __init__(self, dtype: str = "float32"):
        super().__init__()
        self.dtype = dtype
        self.body = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 10))
        self.to(getattr(torch, dtype))

    def forward(self, x):
        return self.body(x.to(getattr(torch, self.dtype)))
