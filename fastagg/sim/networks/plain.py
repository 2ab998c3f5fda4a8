"""Networks whose layers follow each other; none has buffers."""

from __future__ import annotations

import torch
from torch import nn

from fastagg.sim.networks import Shape


def mlp(shape: Shape) -> nn.Module:
    pixels = shape[0] * shape[1] * shape[2]
    return nn.Sequential(nn.Flatten(), nn.Linear(pixels, 200), nn.ReLU(), nn.Linear(200, 200), nn.ReLU())


def lenet(shape: Shape) -> nn.Module:
    return nn.Sequential(*pooled(shape[0], 16, 5, padding=2), *pooled(16, 32, 5, padding=2), nn.Flatten())


def cnn(shape: Shape) -> nn.Module:
    padding = 0 if min(shape[1:]) >= 18 else 1  # the papers do not pad; below 18 pixels nothing would be left
    layers = [*pooled(shape[0], 32, 3, padding), *pooled(32, 64, 3, padding), nn.Conv2d(64, 64, 3, padding=padding)]
    body = nn.Sequential(*layers, nn.ReLU(), nn.Flatten())
    return nn.Sequential(*body, nn.Linear(features_of(body, shape), 64), nn.ReLU())


def pooled(inputs: int, outputs: int, kernel: int, padding: int) -> list[nn.Module]:
    """Pooled before the ReLU: the same in value and gradient, and a ReLU of a quarter of the numbers"""
    return [nn.Conv2d(inputs, outputs, kernel, padding=padding), nn.MaxPool2d(2), nn.ReLU()]


def cnn4(shape: Shape) -> nn.Module:
    padding = 0 if min(shape[1:]) >= 16 else 2  # as above, the paper does not pad
    layers = nn.Sequential(*pooled(shape[0], 32, 5, padding), *pooled(32, 64, 5, padding), nn.Flatten())
    return nn.Sequential(*layers, nn.Linear(features_of(layers, shape), 512), nn.ReLU())


def alexnet(shape: Shape) -> nn.Module:
    stride = 2 if min(shape[1:]) >= 16 else 1  # so that something is left to be pooled
    first = [nn.Conv2d(shape[0], 64, 3, stride, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    middle = [nn.Conv2d(192, 384, 3, padding=1), nn.ReLU(), nn.Conv2d(384, 256, 3, padding=1), nn.ReLU()]
    layers = nn.Sequential(*first, *pooled(64, 192, 3, 1), *middle, *pooled(256, 256, 3, 1), nn.Flatten())
    hidden = [nn.Linear(features_of(layers, shape), 4096), nn.ReLU(), nn.Linear(4096, 4096), nn.ReLU()]
    return nn.Sequential(*layers, *hidden)


def features_of(layers: nn.Module, shape: Shape) -> int:
    with torch.no_grad():
        return layers(torch.zeros(1, *shape)).shape[1]
