"""Networks for text: words are numbers, and 0 fills up what is short. None has buffers."""

from __future__ import annotations

from torch import Tensor, nn


class Embedding(nn.Module):
    """The mean of a text's words, as vectors; zeros if there is none"""

    def __init__(self, vocabulary: int, width: int = 32):
        super().__init__()
        self.words = nn.Embedding(vocabulary, width)

    def forward(self, x: Tensor) -> Tensor:
        there = (x != 0).unsqueeze(-1).to(self.words.weight.dtype)  # [batch, length, 1]
        return (self.words(x) * there).sum(1) / there.sum(1).clamp(min=1)
