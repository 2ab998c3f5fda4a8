"""Writes fastagg/__init__.pyi: what editors and type checkers are told of names that are loaded when they are used.

python -m tools.stubs           # or: make stubs
python -m tools.stubs --check   # exit status 1 where the file is not current
"""

from __future__ import annotations

import json
import sys
import textwrap
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

import fastagg
from fastagg._engine.inputs import RoundInput
from fastagg._engine.options import Option, options_of
from fastagg._engine.registry import SHARED, documentation, own_options, registry

STUB = Path(fastagg.__file__).with_suffix(".pyi")
HEAD = """# Written by `make stubs`
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, overload

import numpy as np
import torch

from fastagg import lora as lora
from fastagg import sim as sim
"""
ALIASES = """
ClientId = str | int
StateDict = Mapping[str, Any]
Sizes = Sequence[float] | Mapping[ClientId, float] | torch.Tensor | np.ndarray | None
PerClient = Sequence[Any] | Mapping[ClientId, Any] | torch.Tensor | np.ndarray | None

__version__: str
"""


def stub() -> str:
    methods = {name: cls for name, cls in sorted(registry().items()) if cls.__module__.startswith("fastagg.methods.")}
    names = [(part, name) for part, some in fastagg._EXPORTS.items() for name in some.split() if name != "aggregator"]
    names += [(cls.__module__, cls.__name__) for cls in methods.values()]
    imports = [f"from {part} import {name} as {name}" for part, name in sorted(names)]
    functions = [_function(cls) for cls in methods.values()]
    return "\n".join([HEAD, *imports, ALIASES, *functions, *_aggregator(methods)])


def _function(cls: type) -> str:
    """The function of a method, with its real signature"""
    outs = "StateDict | None" if cls.produces == "global" else "Sequence[StateDict] | None"
    arguments = [
        "global_sd: StateDict" + ("" if cls.needs_global else " | None"),
        "client_sds: Iterable[StateDict]", "sizes: Sizes = ...", "*", *_options(cls), *map(_input, cls.round_inputs),
        "client_ids: Sequence[ClientId] | None = ...", f"out: {outs} = ...",
    ]  # fmt: skip
    returns = "Result" if cls.produces == "global" else "Results"
    text = textwrap.indent(documentation(cls).replace("\\", "\\\\"), "    ").strip()
    return f'def {cls.name}(\n{_lines(arguments)}) -> {returns}:\n    """{text}\n    """\n'


def _aggregator(methods: Mapping[str, type]) -> Iterator[str]:
    """An overload for each method: its options, and its class"""
    for name, cls in methods.items():
        arguments = [f'name: Literal["{name}"]', "*", *_options(cls)]
        yield f"@overload\ndef aggregator(\n{_lines(arguments)}) -> {cls.__name__}: ..."
    yield "@overload\ndef aggregator(name: str, **options: Any) -> Aggregator[Any]: ...\n"


def _options(cls: type) -> list[str]:
    return [_option(options_of(cls)[name]) for name in (*own_options(cls), *SHARED)]


def _option(option: Option) -> str:
    kind = _type(option.type)
    optional = " | None" if option.optional and "None" not in kind.split(" | ") else ""
    simple = isinstance(option.default, str | int | float | bool | None)
    return (
        f"{option.name}: {kind}{optional} = {_value(option.default)}"
        if simple
        else f"{option.name}: {kind}{optional} = ..."
    )


def _input(spec: RoundInput) -> str:
    default = "" if spec.required else " = ..."
    return f"{spec.name}: {'PerClient' if spec.per_client else 'Any'}{default}"


def _lines(arguments: Iterable[str]) -> str:
    return "".join(f"    {argument},\n" for argument in arguments)


def _value(value: Any) -> str:
    """A value as it is written in source, with the formatter's quotes"""
    return json.dumps(value) if isinstance(value, str) else repr(value)


def _type(kind: Any) -> str:
    """A type as it is written in source"""
    origin, args = get_origin(kind), get_args(kind)
    if origin is Literal:
        return f"Literal[{', '.join(map(_value, args))}]"
    if origin in (Union, types.UnionType):
        return " | ".join(_type(arg) for arg in args)
    if origin is Callable:
        *given, result = args
        return f"Callable[[{', '.join(map(_type, given[0]))}], {_type(result)}]"
    if origin is not None:
        return f"{origin.__name__}[{', '.join(map(_type, args))}]"
    if kind is Any:
        return "Any"
    if kind is type(None):
        return "None"
    module = kind.__module__
    if module == "builtins" or module.startswith("fastagg"):
        return kind.__name__ if not module.startswith("fastagg") else f"{kind.__name__}[Any]"
    return {"Module": "torch.nn.Module", "Tensor": "torch.Tensor"}[kind.__name__]


def main() -> int:
    text = stub()
    if "--check" in sys.argv[1:]:
        if STUB.read_text() != text:
            print(f"{STUB.name} is not current: run `make stubs`", file=sys.stderr)
            return 1
        return 0
    STUB.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
