"""Files that a crash leaves whole: written beside their place and renamed. Nothing is pickled.

Tensors are stored as safetensors: eight bytes with the length of a JSON header, the header, the tensors' bytes. The
library reads them; the few lines that write them are here, for its own writer names its temporary files at random, and
a process that is killed leaves them behind. Ours is always `<name>.part`: the next attempt writes over it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open

from fastagg.table import InputError

DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8",
    torch.bool: "BOOL", torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip


@contextmanager
def whole(path: Path) -> Iterator[BinaryIO]:
    """A file to write into, which takes its place when all is written and on the disk"""
    part = path.with_name(path.name + ".part")
    with open(part, "wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)


def write(path: Path, content: bytes | str) -> None:
    with whole(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


def write_json(path: Path, value: Any) -> None:
    write(path, json.dumps(value, indent=1) + "\n")


def save(path: str | os.PathLike, tree: Any) -> None:
    """A tree of dicts (with string keys), lists, tensors and plain values, as one safetensors file."""
    tensors: dict[str, torch.Tensor] = {}
    plain = _without_tensors(tree, tensors)
    order = sorted(tensors, key=lambda name: -tensors[name].itemsize)  # each begins at a multiple of its item
    parts = [(name, tensors[name].dtype, tensors[name].shape) for name in order]
    with whole(Path(path)) as file:
        file.write(header(parts, {"fastagg": json.dumps(plain)}))
        for name in order:
            x = tensors[name].contiguous()  # which leaves the odd strides of a single number, or none, as they are
            file.write(x.as_strided((x.numel(),), (1,)).view(torch.uint8).numpy())


def header(
    parts: Iterable[tuple[str, torch.dtype, torch.Size]], metadata: Mapping[str, str], length: int | None = None
) -> bytes:
    """What a safetensors file begins with, when the bytes of these tensors follow in this order; filled up with spaces
    to `length` bytes if that is given, and a ValueError where it does not fit"""
    entries: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for name, dtype, shape in parts:
        if dtype not in DTYPES:
            raise InputError(f"{name!r} has dtype {dtype}, which a safetensors file cannot hold")
        begin, end = end, end + shape.numel() * dtype.itemsize
        entries[name] = {"dtype": DTYPES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(entries).encode()
    spaces = -len(text) % 8 if length is None else length - 8 - len(text)
    if spaces < 0:
        raise ValueError(f"a header of {len(text) + 8} bytes does not fit into {length}")
    return (len(text) + spaces).to_bytes(8, "little") + text + b" " * spaces


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
        tensors[name] = tree.detach().cpu().resolve_conj().resolve_neg()
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
