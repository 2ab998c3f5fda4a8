"""A method's options: the fields of its class. Their annotations say what is allowed, and are checked here.

    variant: Literal["paper", "released"] = "paper"     one of these
    layerwise: bool = False                             True or False
    f: Annotated[int, Range(0)] = 1                     an integer >= 0
    lr: Annotated[float, Range(above=0)] | None = None  a number > 0, or None
    clip: float = math.inf                              a number, which may be infinite, but not NaN
    steps: int = 5                                      an integer
    head: Annotated[str, SetBy("head")] = "fc.weight"   a program that knows the model sets it, as the simulator does

What an annotation cannot say, a method checks in check_options().
"""

from __future__ import annotations

import dataclasses
import math
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from fastagg._engine.checks import check_any_number, check_choice, check_flag, check_integer, check_number

INFINITY = float("inf")


@dataclass(frozen=True)
class Range:
    """The numbers that an option may have: low to high, or above or below a bound that is excluded"""

    low: float = -INFINITY
    high: float = INFINITY
    above: float | None = None
    below: float | None = None

    def check(self, method: str, option: str, value: Any) -> None:
        low, high = (self.low if self.above is None else self.above), (self.high if self.below is None else self.below)
        check_number(method, option, value, low, high, strict=self.above is not None)
        if self.below is not None and value == self.below:
            raise ValueError(f"{method}: {option}={value!r}; expected a number below {self.below:g}")

    def integers(self) -> tuple[float, float]:
        """The smallest and the largest integer that it allows"""
        low = self.low if self.above is None else math.floor(self.above) + 1
        high = self.high if self.below is None else math.ceil(self.below) - 1
        return _whole(low, math.ceil), _whole(high, math.floor)


def _whole(bound: float, rounded: Callable[[float], int]) -> float:
    return rounded(bound) if math.isfinite(bound) else bound


@dataclass(frozen=True)
class SetBy:
    """The option describes the model or its training, so a program that has them sets it.

    role   "module": the nn.Module; "head": the key of the output layer's weight; "lr": the clients' learning rate;
           "loss": what clients minimise, a function of outputs and targets; "progress": whether to show a bar
    """

    role: str


@dataclass(frozen=True)
class Option:
    """One option of a method, as its class declares it"""

    name: str
    default: Any
    type: Any  # without None and extras
    optional: bool
    extras: tuple[Any, ...]

    @property
    def role(self) -> str | None:
        return next((extra.role for extra in self.extras if isinstance(extra, SetBy)), None)

    def check(self, method: str, value: Any) -> None:
        if value is self.default or (value is None and self.optional):
            return
        if get_origin(self.type) is Literal:
            check_choice(method, self.name, value, (*get_args(self.type), *([None] if self.optional else [])))
        elif self.type is bool:
            check_flag(method, self.name, value)
        ranges = [extra for extra in self.extras if isinstance(extra, Range)]
        if self.type is int:
            for some in ranges or [Range()]:
                check_integer(method, self.name, value, *some.integers())
        elif self.type is float and not ranges:
            check_any_number(method, self.name, value)
        else:
            for some in ranges:
                some.check(method, self.name, value)


@cache
def options_of(cls: type) -> dict[str, Option]:
    """The options that a class declares, by name, in the order of their declaration"""
    hints = get_type_hints(cls, include_extras=True)
    return {f.name: _option(f, hints[f.name]) for f in dataclasses.fields(cls) if f.init}


def check_options(cls: type, method: str, values: Mapping[str, Any]) -> None:
    for name, option in options_of(cls).items():
        option.check(method, values[name])


def _option(field: dataclasses.Field, hint: Any) -> Option:
    extras: list[Any] = []
    kind, optional = _unwrap(hint, extras)
    default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
    return Option(field.name, default, kind, optional, tuple(extras))


def _unwrap(hint: Any, extras: list[Any]) -> tuple[Any, bool]:
    """The type without None and without what Annotated adds to it"""
    if get_origin(hint) is Annotated:
        inner, *more = get_args(hint)
        extras += more
        return _unwrap(inner, extras)
    if get_origin(hint) in (Union, types.UnionType):
        some = [part for part in get_args(hint) if part is not type(None)]
        if len(some) == 1:
            return _unwrap(some[0], extras)[0], True
        return hint, type(None) in get_args(hint)
    return hint, False
