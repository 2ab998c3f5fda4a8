"""Mistakes that are easy to make with state dicts, and what to say about them."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

WRAPPERS = {"module.": "DistributedDataParallel", "_orig_mod.": "torch.compile"}


def prefix_hint(found: Iterable[str], expected: Iterable[str]) -> str:
    """The end of a message about keys that do not match: what to do if they differ only by the prefix of a wrapper"""
    found, expected = set(found), set(expected)
    if {_unwrapped(key) for key in found} != {_unwrapped(key) for key in expected}:
        return ""
    for keys, others, whose in ((found, expected, "its"), (expected, found, "the other model's")):
        for prefix, wrapper in WRAPPERS.items():
            if any(prefix in _prefixes(key) for key in keys) and not any(prefix in _prefixes(key) for key in others):
                return (
                    f"; {whose} keys have the prefix {prefix!r}, which {wrapper} adds. Remove it: "
                    f"{{key.replace({prefix!r}, '', 1): value for key, value in state_dict.items()}}"
                )
    return ""


def _unwrapped(key: Any) -> Any:
    return key[len("".join(_prefixes(key))) :] if isinstance(key, str) else key


def _prefixes(key: Any) -> list[str]:
    """Those of WRAPPERS that a key begins with, one after the other"""
    found: list[str] = []
    while isinstance(key, str) and (prefix := next((p for p in WRAPPERS if key.startswith(p)), None)):
        found.append(prefix)
        key = key[len(prefix) :]
    return found


def warn_of_same_tensors(address: np.ndarray, real: np.ndarray, name: Callable[[int], str]) -> None:
    """[model.state_dict()] * 3 is one live model three times. That clients share some tensors, such as a frozen part of
    the model, is fine. address is [T, K]; real [T] says which tensors have elements."""
    first = address[real.argmax()].tolist() if real.any() else []
    if len(set(first)) == len(first):
        return  # as in nearly every call: it costs a microsecond
    same: dict[bytes, list[int]] = {}
    for k in range(len(first)):
        same.setdefault(address[real, k].tobytes(), []).append(k)
    group = max(same.values(), key=len)
    if len(group) > 1:
        names = ", ".join(map(name, group[:5])) + ", ..." * (len(group) > 5)
        warnings.warn(
            f"{names} are the same tensors. state_dict() returns references to the live model: keep a copy of each "
            "client, {key: value.clone() for key, value in model.state_dict().items()}",
            stacklevel=_stack_level(),
        )


def _stack_level() -> int:
    """For warnings.warn in the function that calls this: that of the first caller outside of fastagg"""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "fastagg":
        level, frame = level + 1, frame.f_back
    return level
