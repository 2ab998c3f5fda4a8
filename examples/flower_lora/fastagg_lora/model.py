"""A small transformer that predicts the next letter, whose linear layers take low-rank updates (LoRA)."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from fastagg_lora.text import LENGTH, LETTERS

SCALING = 2.0  # alpha / r: the same for every rank


class LoRALinear(nn.Linear):
    """W x + SCALING * B A x. The tensors have the names that PEFT gives them: lora_A.weight and lora_B.weight"""

    def __init__(self, inputs: int, outputs: int, rank: int) -> None:
        super().__init__(inputs, outputs, bias=False)
        self.lora_A = nn.Linear(inputs, rank, bias=False)
        self.lora_B = nn.Linear(rank, outputs, bias=False)
        nn.init.zeros_(self.lora_B.weight)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + SCALING * self.lora_B(self.lora_A(x))


class Block(nn.Module):
    def __init__(self, width: int, heads: int, rank: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend = LoRALinear(width, 3 * width, rank)
        self.out = LoRALinear(width, width, rank)
        self.up, self.down = LoRALinear(width, 4 * width, rank), LoRALinear(4 * width, width, rank)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.attend(self.before(x)).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.between(x))))


class Transformer(nn.Module):
    def __init__(self, rank: int, width: int = 64, heads: int = 4, blocks: int = 2) -> None:
        super().__init__()
        self.letters, self.places = nn.Embedding(len(LETTERS), width), nn.Embedding(LENGTH, width)
        self.blocks = nn.ModuleList(Block(width, heads, rank) for _ in range(blocks))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, len(LETTERS))

    def forward(self, x: Tensor) -> Tensor:
        h = self.letters(x) + self.places.weight[: x.shape[1]]
        for block in self.blocks:
            h = block(h)
        return self.head(self.norm(h))


def adapter_of(model: nn.Module) -> dict[str, Tensor]:
    return {key: value for key, value in model.state_dict().items() if ".lora_" in key}


def base_of(model: nn.Module) -> dict[str, Tensor]:
    return {key: value for key, value in model.state_dict().items() if ".lora_" not in key}


def first(adapter: dict[str, Tensor], rank: int) -> dict[str, Tensor]:
    """The first components of an adapter: of one that fastagg has made, the longest"""
    return {key: value[:rank] if ".lora_A" in key else value[:, :rank] for key, value in adapter.items()}


def add(base: dict[str, Tensor], adapter: dict[str, Tensor]) -> dict[str, Tensor]:
    """The base model with an adapter merged into it"""
    new = dict(base)
    for key, B in adapter.items():
        if ".lora_B" in key:
            weight = key.replace("lora_B.", "")
            new[weight] = base[weight] + SCALING * B @ adapter[key.replace("lora_B", "lora_A")]
    return new
