"""Methods by name, for frameworks that choose one from a configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fastagg.methods.common import REGISTRY, Aggregator, make, option_fields, suggest


@dataclass(frozen=True)
class Method:
    """One line about a method"""

    name: str
    description: str
    paper: str
    gives: str
    options: tuple[str, ...]
    round_info: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.name:<18} {self.description} ({self.paper})"


def methods() -> list[Method]:
    """Every method there is, by name, with a one-line description and the paper."""
    return [
        Method(
            name,
            (cls.__doc__ or "").strip().splitlines()[0],
            cls.paper,
            cls.gives,
            tuple(f.name for f in option_fields(cls)),
            cls.round_info,
        )
        for name, cls in sorted(REGISTRY.items())
    ]


def aggregator(name: str, **options: Any) -> Aggregator:
    """The method of that name with these options: an object with aggregate(), state_dict(), load_state_dict().

    >>> server = fastagg.aggregator("simprox", lam=0.7)
    >>> global_sd = server.aggregate(global_sd, client_sds, sizes)
    """
    if name not in REGISTRY:
        raise ValueError(f"no method {name!r}{suggest(name, REGISTRY)}; there are {', '.join(sorted(REGISTRY))}")
    return make(REGISTRY[name], options)
