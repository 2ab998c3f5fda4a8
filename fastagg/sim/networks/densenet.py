"""DenseNets (Huang et al., 2017) for small images, as FedLAW has them: a 3 x 3 first convolution, and no pooling before
the first block."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from fastagg.sim.networks import Shape


class Dense(nn.Module):
    """Adds `growth` channels to those it is given, by way of four times as many"""

    def __init__(self, inputs: int, growth: int):
        super().__init__()
        self.body = nn.Sequential(*convolved(inputs, 4 * growth, 1), *convolved(4 * growth, growth, 3))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.body(x), x], 1)


def convolved(inputs: int, outputs: int, kernel: int) -> list[nn.Module]:
    convolution = nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2, bias=False)
    return [nn.BatchNorm2d(inputs), nn.ReLU(), convolution]


def densenet(blocks: tuple[int, ...], growth: int) -> Callable[[Shape], nn.Module]:
    """Blocks of so many dense layers; between two of them, both the channels and the sides are halved"""

    def body(shape: Shape) -> nn.Module:
        channels = 2 * growth
        layers: list[nn.Module] = [nn.Conv2d(shape[0], channels, 3, padding=1, bias=False)]
        for i, number in enumerate(blocks):
            if i > 0:
                layers += [*convolved(channels, channels // 2, 1), nn.AvgPool2d(2)]
                channels //= 2
            for _ in range(number):
                layers.append(Dense(channels, growth))
                channels += growth
        return nn.Sequential(*layers, nn.BatchNorm2d(channels), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())

    return body
