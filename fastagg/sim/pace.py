"""Simulated time: how fast each client is, and how long its training takes.

The unit is the time that a client of speed 1 with an average number of samples takes for its local epochs. Training
takes its work, samples times epochs, divided by the client's speed; sending and aggregating take none.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

EXPECTED = "lognormal:0.5, uniform:0.2,1, or a number > 0 for each client: 1,2,0.5"
Parsed = tuple[str, list[float]]  # of which kind, and its numbers


def parsed(speeds: str) -> Parsed:
    """What the text says; ValueError where it says nothing"""
    kind, _, rest = speeds.rpartition(":") if isinstance(speeds, str) else ("?", "", "")
    try:
        numbers = [float(number) for number in rest.split(",")]
    except ValueError:
        numbers = []
    good = {
        "lognormal": len(numbers) == 1 and 0 <= numbers[0] < 10,
        "uniform": len(numbers) == 2 and 0 < numbers[0] <= numbers[-1] < np.inf,
        "": bool(numbers) and all(0 < number < np.inf for number in numbers),
    }
    if not good.get(kind):
        raise ValueError(f"sim: speeds={speeds!r}; expected {EXPECTED}")
    return kind, numbers


def speeds_of(speeds: str | None, clients: int, rng: np.random.Generator) -> np.ndarray:
    """Of each client, [clients]; None: all 1"""
    if speeds is None:
        return np.ones(clients)
    kind, numbers = parsed(speeds)
    if kind == "lognormal":
        return np.exp(numbers[0] * rng.standard_normal(clients))
    if kind == "uniform":
        return rng.uniform(numbers[0], numbers[1], clients)
    if len(numbers) != clients:
        raise ValueError(f"sim: speeds has {len(numbers)} numbers for {clients} clients; expected one for each")
    return np.array(numbers)


class Pace:
    """How late it is in a run, and how long its clients take"""

    def __init__(self, speeds: np.ndarray, samples: Sequence[int], epochs: int) -> None:
        self.time = 0.0
        self._per_epoch = np.asarray(samples) / np.mean(samples) / epochs / speeds

    def duration(self, client: int, epochs: int) -> float:
        return float(self._per_epoch[client] * epochs)

    def wait_for(self, trained: Iterable[tuple[int, int]]) -> None:
        """A round lasts as long as the slowest of its (client, epochs)"""
        self.time += max(self.duration(client, epochs) for client, epochs in trained)
