"""Text that comes with Python: its manual, which the model has learned before, and source code, which clients have."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch

CLIENTS = ("asyncio", "email", "unittest", "multiprocessing", "xml", "http")  # packages of the standard library
LETTERS = [chr(c) for c in range(32, 127)] + ["\n"]  # everything else is "?"
LENGTH = 64  # letters that the model sees at once

_NUMBER = {letter: number for number, letter in enumerate(LETTERS)}


def numbers(text: str) -> torch.Tensor:
    return torch.tensor([_NUMBER.get(letter, _NUMBER["?"]) for letter in text])


def manual() -> torch.Tensor:
    from pydoc_data.topics import topics

    return numbers("\n".join(topics[name] for name in sorted(topics)))


@cache
def source(client: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A client's text: what it trains on, and the last tenth, which it does not"""
    package = __import__(CLIENTS[client])
    files = sorted(Path(package.__file__ or "").parent.rglob("*.py"))
    text = numbers("\n".join(file.read_text(encoding="utf-8") for file in files))
    cut = len(text) * 9 // 10
    return text[:cut], text[cut:]


def batch(text: torch.Tensor, size: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Pieces of the text, and for each letter the one that follows"""
    starts = torch.randint(len(text) - LENGTH - 1, (size,), generator=generator)
    pieces = text[starts[:, None] + torch.arange(LENGTH + 1)]
    return pieces[:, :-1], pieces[:, 1:]
