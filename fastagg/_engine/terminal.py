"""What every command shares: printing that survives a closed pipe, and options from the command line. Without torch."""

from __future__ import annotations

import json
import os
import sys
from contextlib import suppress
from typing import Any


def say(text: str) -> None:
    """Prints what comes after the work is done: a log on a full disk, or a closed pipe, is no failure of that work"""
    try:
        print(text, flush=True)
    except (OSError, ValueError):
        give_up_printing()


def give_up_printing() -> None:
    """What is left in the buffer goes nowhere, or the interpreter would fail at its end"""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def key_value(text: str) -> dict[str, Any]:
    """An option of a method, key=value"""
    key, found, value = text.partition("=")
    if not found or not key:
        raise ValueError(f"option {text!r}: expected key=value")
    return {key: parse(value)}


def parse(text: str) -> Any:
    """A value from the command line: a number, true, false, null, JSON, or a word"""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return {"True": True, "False": False, "None": None}.get(text, text)
