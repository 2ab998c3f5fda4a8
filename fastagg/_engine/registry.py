"""Methods by name, for frameworks that choose one from a configuration."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from fastagg._engine.aggregator import REGISTRY, Aggregator, documentation, make, option_fields, suggest

SHARED = tuple(f.name for f in fields(Aggregator) if f.init)  # options that all methods have


@dataclass(frozen=True)
class Method:
    """What there is to know of a method

    gives        "global": one model; "personalised": a model per client; "clusters": a model per cluster
    options      by name, with their defaults
    round_info   what aggregate() takes about a round besides models and sizes
    """

    name: str
    description: str
    paper: str
    gives: str
    options: dict[str, Any]
    round_info: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.name:<18} {self.description} ({self.paper})"

    def summary(self) -> str:
        """Two or three lines: what it does, its own options, what it needs of a round"""
        own = ", ".join(f"{name}={value!r}" for name, value in self.options.items() if name not in SHARED)
        rows = [str(self)]
        rows += [f"    options: {own}"] if own else []
        rows += [f"    of a round: {', '.join(self.round_info)}"] if self.round_info else []
        return "\n".join(rows)

    @property
    def help(self) -> str:
        """All that is to be said of it, and of every option"""
        return documentation(REGISTRY[self.name])

    def text(self) -> str:
        """A page: help, and the defaults"""
        defaults = ", ".join(f"{name}={value!r}" for name, value in self.options.items() if name not in SHARED)
        head = f"{self.name} ({self.paper}), gives: {self.gives}"
        return "\n\n".join([head, self.help, f"Defaults: {defaults or 'no options of its own'}"])


def methods() -> list[Method]:
    """Every method there is, by name, with a one-line description, the paper, and its options with their defaults."""
    return [
        Method(
            name,
            (cls.__doc__ or "").strip().splitlines()[0],
            cls.paper,
            cls.gives,
            {f.name: f.default for f in option_fields(cls)},
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
