"""A small vision transformer; it has no buffers."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fastagg.sim.networks import Shape


class Attention(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)  # [batch, heads, patches, :]
        near = (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).softmax(-1)
        return self.out((near @ v).transpose(1, 2).flatten(2))


class Encoder(nn.Module):
    """Attention and a hidden layer, each normalised before and added to what went in"""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.attention = nn.Sequential(nn.LayerNorm(width), Attention(width, heads))
        hidden = [nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)]
        self.hidden = nn.Sequential(nn.LayerNorm(width), *hidden)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x)
        return x + self.hidden(x)


class ViT(nn.Module):
    def __init__(self, shape: Shape, patch: int = 4, width: int = 64, blocks: int = 4, heads: int = 4):
        super().__init__()
        if shape[1] % patch or shape[2] % patch:
            raise ValueError(f"model 'vit' cannot take images of shape {shape}: sides must be multiples of {patch}")
        self.patches = nn.Conv2d(shape[0], width, patch, stride=patch)
        self.position = nn.Parameter(0.02 * torch.randn(shape[1] * shape[2] // patch**2, width))
        self.blocks = nn.Sequential(*(Encoder(width, heads) for _ in range(blocks)), nn.LayerNorm(width))

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2) + self.position  # [batch, patches, width]
        return self.blocks(x).mean(1)
