"""Files that a crash leaves whole: written beside their place and renamed. Nothing is pickled."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from fastagg.table import InputError


def write(path: Path, content: bytes | str) -> None:
    part = path.with_name(path.name + ".part")
    with open(part, "wb") as file:
        file.write(content.encode() if isinstance(content, str) else content)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)


def write_json(path: Path, value: Any) -> None:
    write(path, json.dumps(value, indent=1) + "\n")


def save(path: str | os.PathLike, tree: Any) -> None:
    """A tree of dicts (with string keys), lists, tensors and plain values, as one safetensors file."""
    tensors: dict[str, torch.Tensor] = {}
    plain, path = _without_tensors(tree, tensors), Path(path)
    part = path.with_name(path.name + ".part")
    save_file(tensors, part, metadata={"fastagg": json.dumps(plain)})
    with open(part, "rb") as file:
        os.fsync(file.fileno())
    part.replace(path)


def load(path: str | os.PathLike) -> Any:
    """What save() was given. InputError where the file is not one of its, or damaged."""
    try:
        with safe_open(path, framework="pt") as file:
            plain = json.loads((file.metadata() or {})["fastagg"])
            return _with_tensors(plain, {name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
    except FileNotFoundError:
        raise
    except (SafetensorError, OSError, KeyError, ValueError, RecursionError) as error:
        raise InputError(f"{path} is not a file that fastagg saved, or is damaged: {error}") from error


def _without_tensors(tree: Any, tensors: dict[str, torch.Tensor]) -> Any:
    if isinstance(tree, torch.Tensor):
        name = str(len(tensors))
        tensors[name] = tree.detach().clone(memory_format=torch.contiguous_format)  # none may share memory
        return {"tensor": name}
    if isinstance(tree, Mapping):
        return {"dict": [[key, _without_tensors(value, tensors)] for key, value in tree.items()]}
    if isinstance(tree, list | tuple):
        return {"list": [_without_tensors(value, tensors) for value in tree]}
    return {"value": tree}


def _with_tensors(plain: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    match plain:
        case {"tensor": str(name)}:
            return tensors[name]
        case {"dict": list(pairs)} if all(map(_is_pair, pairs)):
            return {key: _with_tensors(value, tensors) for key, value in pairs}
        case {"list": list(values)}:
            return [_with_tensors(value, tensors) for value in values]
        case {"value": value}:
            return value
    raise ValueError(f"no part of a saved tree: {str(plain)[:60]}")


def _is_pair(pair: Any) -> bool:
    return isinstance(pair, list) and len(pair) == 2 and isinstance(pair[0], str)
