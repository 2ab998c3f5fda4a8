"""Whether the program that calls can be loaded again by processes it starts, as multiprocessing does it."""

from __future__ import annotations

import ast
import sys
import tokenize
from types import FrameType, ModuleType


def calls_unguarded() -> bool:
    """Whether this is called by a script outside `if __name__ == "__main__":`. The processes that it starts would load
    the script, and so call this again."""
    main = sys.modules["__main__"]
    path, module = getattr(main, "__file__", None), getattr(main, "__spec__", None)
    if path is None or (module is not None and module.name.endswith("__main__")):  # multiprocessing loads neither
        return False
    frame = _frame_of(main)
    if frame is None:
        return False
    try:
        with tokenize.open(path) as file:
            statements = ast.parse(file.read()).body
    except (OSError, SyntaxError, ValueError):  # a program that is not a text
        return False
    here = [each for each in statements if each.lineno <= frame.f_lineno <= (each.end_lineno or each.lineno)]
    return bool(here) and not any(isinstance(each, ast.If) and _asks_its_name(each.test) for each in here)


def _frame_of(main: ModuleType) -> FrameType | None:
    """Where the script itself is now, if it runs in this thread"""
    frame: FrameType | None = sys._getframe()
    while frame is not None and not (frame.f_code.co_name == "<module>" and frame.f_globals is vars(main)):
        frame = frame.f_back
    return frame


def _asks_its_name(test: ast.expr) -> bool:
    return any(isinstance(node, ast.Name) and node.id == "__name__" for node in ast.walk(test))
