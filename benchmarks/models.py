"""State dicts of well-known models' shapes with random values, and rounds of clients around them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

StateDict = dict[str, torch.Tensor]


def _batch_norm(name: str, channels: int) -> StateDict:
    return {
        f"{name}.weight": torch.rand(channels) + 0.5,
        f"{name}.bias": 0.1 * torch.randn(channels),
        f"{name}.running_mean": 0.1 * torch.randn(channels),
        f"{name}.running_var": torch.rand(channels) + 0.5,
        f"{name}.num_batches_tracked": torch.tensor(100),
    }


def _conv(name: str, inputs: int, outputs: int, size: int) -> StateDict:
    return {f"{name}.weight": torch.randn(outputs, inputs, size, size) * (2 / (inputs * size * size)) ** 0.5}


def _linear(name: str, inputs: int, outputs: int) -> StateDict:
    return {f"{name}.weight": torch.randn(outputs, inputs) * inputs**-0.5, f"{name}.bias": torch.zeros(outputs)}


def _resnet(widths: tuple[int, ...], blocks: int, first: int, classes: int, project: bool) -> StateDict:
    sd = _conv("conv1", 3, widths[0], first) | _batch_norm("bn1", widths[0])
    inputs = widths[0]
    for stage, width in enumerate(widths, 1):
        for block in range(blocks):
            at = f"layer{stage}.{block}"
            for i in (1, 2):
                sd |= _conv(f"{at}.conv{i}", inputs if i == 1 else width, width, 3) | _batch_norm(f"{at}.bn{i}", width)
            if project and inputs != width:
                sd |= _conv(f"{at}.downsample.0", inputs, width, 1) | _batch_norm(f"{at}.downsample.1", width)
            inputs = width
    return sd | _linear("fc", widths[-1], classes)


def resnet18() -> StateDict:
    """The CIFAR ResNet-18: 11.2 million parameters, 122 tensors"""
    return _resnet((64, 128, 256, 512), 2, 3, 10, project=True)


def resnet20() -> StateDict:
    """The CIFAR ResNet-20: 0.27 million parameters, 116 tensors"""
    return _resnet((16, 32, 64), 3, 3, 10, project=False)


MODELS: dict[str, Callable[[], StateDict]] = {"resnet18": resnet18, "resnet20": resnet20}


def clients(global_sd: StateDict, K: int, *, seed: int = 0) -> Iterator[StateDict]:
    """K clients, one at a time: updates of different length, partly in common directions, as unlike data gives."""
    generator = torch.Generator().manual_seed(seed)
    groups = 3  # clients of one group saw like data
    common = [
        {key: torch.randn(g.shape, generator=generator) for key, g in global_sd.items() if g.is_floating_point()}
        for _ in range(groups)
    ]
    for k in range(K):
        length = 0.01 * (1 + k % 5)
        sd = {}
        for key, g in global_sd.items():
            if not g.is_floating_point():
                sd[key] = g + k
            else:
                update = torch.randn(g.shape, generator=generator).add_(common[k % groups][key], alpha=0.7)
                spread = g.std().item() if g.numel() > 1 else 1.0
                sd[key] = g + update.mul_(length * (spread or 1.0))
                if key.endswith("running_var"):
                    sd[key].abs_()
        yield sd
