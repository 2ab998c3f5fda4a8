"""What attackers know in a round."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor

State = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Known:
    """An update is what a client has trained minus what it started from: floating-point parameters, by name.

    own         the updates of the attackers of this round, who train as if they were honest
    honest      those of the other clients of the round; empty for attacks that do not look at them
    knows       "honest": attackers know all honest updates; "own": only their own, all of them
    strength    of the attack; None: what the attack itself finds
    direction   of min-max and min-sum: "unit", "std" or "sign"
    rngs        a random generator for each attacker
    """

    own: list[State]
    honest: list[State]
    knows: str
    strength: float | None
    direction: str
    rngs: list[np.random.Generator]

    @property
    def seen(self) -> list[State]:
        """The updates that attackers hide among: their own, too, where no honest client takes part"""
        return self.honest if self.honest and self.knows == "honest" else self.own
