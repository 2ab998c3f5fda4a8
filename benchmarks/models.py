"""State dicts of well-known models' shapes with random values, and rounds of clients around them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import nn

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


class Block(nn.Module):
    """Two convolutions and a shortcut that drops pixels and pads channels"""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(inputs, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width)
        self.stride, self.more = stride, width - inputs

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.bn2(self.conv2(torch.relu(self.bn1(self.conv1(x)))))
        shortcut = x[:, :, :: self.stride, :: self.stride]
        return torch.relu(y + nn.functional.pad(shortcut, (0, 0, 0, 0, 0, self.more)))


class ResNet20(nn.Module):
    """The model whose state dict resnet20() is like"""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16)
        inputs = 16
        for stage, width in enumerate((16, 32, 64), 1):
            blocks = [Block(inputs if b == 0 else width, width, 2 if stage > 1 and b == 0 else 1) for b in range(3)]
            setattr(self, f"layer{stage}", nn.Sequential(*blocks))
            inputs = width
        self.fc = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.bn1(self.conv1(x)))
        return self.fc(self.layer3(self.layer2(self.layer1(x))).mean((2, 3)))


def vit_b() -> StateDict:
    """ViT-B/16: 86.6 million parameters, 152 tensors"""
    width = 768

    def norm(name: str) -> StateDict:
        return {f"{name}.weight": torch.rand(width) + 0.5, f"{name}.bias": 0.1 * torch.randn(width)}

    sd = {"cls_token": 0.02 * torch.randn(1, 1, width), "pos_embed": 0.02 * torch.randn(1, 197, width)}
    sd |= _conv("patch_embed", 3, width, 16) | {"patch_embed.bias": torch.zeros(width)}
    for block in range(12):
        at = f"blocks.{block}"
        sd |= norm(f"{at}.norm1") | _linear(f"{at}.qkv", width, 3 * width) | _linear(f"{at}.proj", width, width)
        sd |= norm(f"{at}.norm2") | _linear(f"{at}.fc1", width, 4 * width) | _linear(f"{at}.fc2", 4 * width, width)
    return sd | norm("norm") | _linear("head", width, 1000)


def lora() -> StateDict:
    """A LoRA adapter: 6.6 million parameters in 400 small tensors"""
    rank, width = 16, 1024
    sd = {}
    for block in range(50):
        for name in ("q", "k", "v", "o"):
            sd[f"layers.{block}.{name}.lora_A"] = torch.randn(rank, width) * width**-0.5
            sd[f"layers.{block}.{name}.lora_B"] = torch.randn(width, rank) * 0.01
    return sd


def in_cache() -> StateDict:
    """One layer, of which 100 clients (13 MB) stay in the last cache"""
    return _linear("fc", 256, 128)


def mlp(width: int, layers: int) -> StateDict:
    """Layers of width x width"""
    sd: StateDict = {}
    for layer in range(layers):
        sd |= _linear(f"fc{layer}", width, width)
    return sd


MODELS: dict[str, Callable[[], StateDict]] = {
    "in_cache": in_cache, "resnet20": resnet20, "lora": lora, "resnet18": resnet18, "vit_b": vit_b,
    "mlp_half": lambda: mlp(250, 8), "mlp_1m": lambda: mlp(500, 4), "mlp_6m": lambda: mlp(1000, 6),
}  # fmt: skip


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
