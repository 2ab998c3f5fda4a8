"""Checks of options, and their messages. Without torch and NumPy, so that a command can print its help at once."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from numbers import Integral, Real
from typing import Any


class InputError(ValueError):
    """A model, weight or size that cannot be aggregated. The message names the client and the key."""


class BadClientError(InputError):
    """Some of the clients cannot be aggregated. The message names them; on_bad_client="drop" leaves them out instead.

    reasons   what is wrong with each, by its position among the clients given
    """

    def __init__(self, message: str, reasons: Mapping[int, str]) -> None:
        super().__init__(message)
        self.reasons = {int(k): reason for k, reason in reasons.items()}

    @property
    def clients(self) -> list[int]:
        """Positions of these clients among the clients given"""
        return list(self.reasons)

    def __reduce__(self) -> Any:
        return type(self), (str(self), self.reasons)


def suggest(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, known, 1, 0.5)
    return f"; did you mean {near[0]!r}?" if near else ""


def check_number(method: str, option: str, value: Any, low: float, high: float, *, strict: bool = False) -> None:
    """A finite number in [low, high]; strict: above low"""
    if not _is_number(value) or not abs(value) < float("inf") or not low <= value <= high or (strict and value == low):
        raise ValueError(f"{method}: {option}={value!r}; expected a number{_bounds(low, high, strict)}")


def _bounds(low: float, high: float, strict: bool) -> str:
    bounds = [f"{'>' if strict else '>='} {low}"] if low > -float("inf") else []
    bounds += [f"<= {high}"] if high < float("inf") else []
    return f" {' and '.join(bounds)}" if bounds else ""


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def check_any_number(method: str, option: str, value: Any) -> None:
    """A number, which may be infinite"""
    if not _is_number(value) or value != value:
        raise ValueError(f"{method}: {option}={value!r}; expected a number")


def check_integer(method: str, option: str, value: Any, low: float, high: float = float("inf")) -> None:
    """An integer in [low, high]"""
    if not isinstance(value, Integral) or isinstance(value, bool) or not low <= int(value) <= high:
        raise ValueError(f"{method}: {option}={value!r}; expected an integer{_bounds(low, high, strict=False)}")


def check_flag(method: str, option: str, value: Any) -> None:
    if type(value).__name__ not in ("bool", "bool_"):  # Python's, and NumPy's by either of its names
        raise ValueError(f"{method}: {option}={value!r}; expected True or False")


def check_choice(method: str, option: str, value: Any, allowed: tuple) -> None:
    if value not in allowed:
        raise ValueError(f"{method}: {option}={value!r}; expected one of {', '.join(map(repr, allowed))}")


UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


def byte_count(name: str, value: int | str) -> int:
    """Bytes, from a number or from words like 500MB, 2 GB or 1e9"""
    found = re.fullmatch(r"([0-9.e+]+) *([KMGT]?)i?B?", str(value).strip(), re.IGNORECASE)
    try:
        count = float(found[1]) * UNITS[found[2].upper()] if found else 0.0
        if count < 1 or count > 2**62:
            raise ValueError
        return int(count)
    except (TypeError, ValueError):
        raise ValueError(f"{name}={value!r}; expected a number of bytes, such as 500MB or 2GB") from None
