"""Objects of the user's own code, by name: "package.module:attribute". Without torch, as choices.py is."""

from __future__ import annotations

import importlib
import os
import re
import sys
from typing import Any

NAME = r"[^\W\d]\w*(?:\.[^\W\d]\w*)*"
REFERENCE = re.compile(rf"{NAME}:{NAME}")


def is_reference(text: Any) -> bool:
    """Whether this is written like "package.module:attribute" """
    return isinstance(text, str) and REFERENCE.fullmatch(text) is not None


def resolve(text: str, what: str = "sim", *, call: bool = True) -> Any:
    """The object that "package.module:attribute" names; modules in the current folder are found too.

    what   whose value this is, for messages
    call   it must be callable
    """
    if not is_reference(text):
        raise ValueError(f"{what}: {text!r} is not of the form package.module:attribute")
    module_name, _, path = text.partition(":")
    found = imported(module_name, text, what)
    for i, name in enumerate(names := path.split(".")):
        if not hasattr(found, name):
            owner = ":".join([module_name, ".".join(names[:i])]).rstrip(":")
            near = [n for n in dir(found) if n.lower() == name.lower()]
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"{what}: {text!r}: {owner} has no attribute {name!r}{hint}")
        found = getattr(found, name)
    if call and not callable(found):
        raise ValueError(
            f"{what}: {text!r} is a {type(found).__name__}, which cannot be called; name a function or class"
        )
    return found


def imported(name: str, text: str, what: str) -> Any:
    """The module; one that only the current folder has puts that folder on the path, last"""
    here = os.getcwd()
    top = os.path.join(here, name.partition(".")[0])
    for attempt in (1, 2):
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{name}.".startswith(f"{error.name}."):  # a module that it imports
                raise ValueError(f"{what}: {text!r}: importing {name} failed: {error}") from error
            if attempt == 1 and here not in sys.path and (os.path.isdir(top) or os.path.isfile(f"{top}.py")):
                sys.path.append(here)
                importlib.invalidate_caches()
                continue
            raise ValueError(
                f"{what}: {text!r}: there is no module {error.name!r}; install it, or run in the folder that has it"
            ) from error
        except Exception as error:  # whatever the user's code raises
            raise ValueError(f"{what}: {text!r}: importing {name} failed: {type(error).__name__}: {error}") from error
    raise AssertionError  # the second attempt returns or raises
