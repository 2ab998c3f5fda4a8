"""ResNets for small images (He et al., 2016), as FedLAW has them: shortcuts are 1 x 1 convolutions where sizes change.

A wide ResNet of FedLAW, after Li et al. (2018), has more channels in all layers, the first included; that of Zagoruyko
and Komodakis (2016) has 16 in the first, and normalises before it convolves.
"""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

from fastagg.sim.networks import Shape


class Block(nn.Module):
    """Two convolutions and a way around them"""

    def __init__(self, inputs: int, outputs: int, stride: int):
        super().__init__()
        self.body = nn.Sequential(*normed(inputs, outputs, 3, stride), nn.ReLU(), *normed(outputs, outputs, 3, 1))
        same = inputs == outputs and stride == 1
        self.shortcut = nn.Identity() if same else nn.Sequential(*normed(inputs, outputs, 1, stride))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.shortcut(x))


def normed(inputs: int, outputs: int, kernel: int, stride: int) -> list[nn.Module]:
    convolution = nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False)
    return [convolution, nn.BatchNorm2d(outputs)]


def resnet(widths: tuple[int, ...], blocks: int) -> Callable[[Shape], nn.Module]:
    """A stage of so many blocks for each width; every stage but the first halves the image"""

    def body(shape: Shape) -> nn.Module:
        layers = [*normed(shape[0], widths[0], 3, 1), nn.ReLU()]
        inputs = widths[0]
        for width in widths:
            for i in range(blocks):
                layers.append(Block(inputs, width, stride=2 if i == 0 and width != widths[0] else 1))
                inputs = width
        return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())

    return body
