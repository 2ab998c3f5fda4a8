"""Saved trees: the state files of aggregators and the checkpoints of simulations. Nothing is pickled.

Tensors are stored as safetensors: eight bytes with the length of a JSON header, the header, the tensors' bytes. The
safetensors library reads them. We write them ourselves because its writer does not let us choose where it writes.

Every file says the number of its format. CONTRIBUTING.md says when that number grows, and what is promised.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError

from fastagg._engine.atomic import Temporary, prepared, put
from fastagg._engine.regular import open_regular
from fastagg._engine.table import InputError

DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8",
    torch.bool: "BOOL", torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip
# The entry of the metadata with the checksum, and what stands there while it is computed
CHECKSUM, BLANK = "fastagg.sha256", "0" * 64
# The number of the format, of the tree and of what methods and runs put into it. How the number and the checksum are
# stored stays the same in all formats, so that any version can tell a newer file from a damaged one.
FORMAT_KEY, FORMAT = "fastagg.format", 1


class NewerFormat(InputError):
    """A file that is whole, and that a newer version wrote"""


def save(path: str | os.PathLike, tree: Any) -> None:
    """A tree of dicts (with string keys), lists, tensors and plain values, as one safetensors file."""
    put(prepare(path, tree)[0])


def prepare(path: str | os.PathLike, tree: Any, more: Mapping[str, str] | None = None) -> tuple[Temporary, str]:
    """save() up to the last step, which put() does: the file, and its checksum. more: metadata"""
    tensors: dict[str, torch.Tensor] = {}
    plain = _without_tensors(tree, tensors)
    order = sorted(tensors, key=lambda name: -tensors[name].itemsize)  # each begins at a multiple of its item
    parts = [(name, tensors[name].dtype, tensors[name].shape) for name in order]
    start = header(parts, {**(more or {}), FORMAT_KEY: str(FORMAT), "fastagg": json.dumps(plain), CHECKSUM: BLANK})
    content = [bytes_of(tensors[name]) for name in order]
    checksum = _checksum(start, content)
    with prepared(Path(path)) as (new, file):
        file.write(start.replace(_entry(BLANK), _entry(checksum)))
        file.writelines(content)
    return new, checksum


def bytes_of(x: torch.Tensor) -> memoryview:
    x = x.contiguous()  # which leaves the odd strides of a single number, or none, as they are
    return x.as_strided((x.numel(),), (1,)).view(torch.uint8).numpy().data


def _entry(checksum: str) -> bytes:
    """How the checksum stands in the header. Quotes inside a JSON string are escaped, so it is nowhere else."""
    return f'"{CHECKSUM}": "{checksum}"'.encode()


def _checksum(start: bytes, content: Iterable[memoryview]) -> str:
    """Of all bytes of a file, its checksum in the header left blank"""
    digest = hashlib.sha256(start)
    for part in content:
        digest.update(part)
    return digest.hexdigest()


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
    """What save() was given, by this version or an older one. InputError where the file is not one of its, or damaged,
    or of a newer format."""
    return read_saved(path)[0]


def read_saved(path: str | os.PathLike) -> tuple[Any, dict[str, str]]:
    """The tree, and the metadata with the checksum"""
    try:
        with open_regular(path) as file:
            raw = file.read()
        end = 8 + int.from_bytes(raw[:8], "little")
        metadata = json.loads(raw[8:end])["__metadata__"]
        entry = _entry(metadata[CHECKSUM])
        start = raw[:end].replace(entry, _entry(BLANK))
        if entry not in raw[:end] or _checksum(start, [memoryview(raw)[end:]]) != metadata[CHECKSUM]:
            raise ValueError("its checksum does not match")
        _check_format(path, int(metadata[FORMAT_KEY]))
        return _with_tensors(json.loads(metadata["fastagg"]), safetensors.torch.load(raw)), metadata
    except (FileNotFoundError, InputError):
        raise
    except (SafetensorError, OSError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise InputError(f"{path} is not a file that fastagg saved, or is damaged: {error}") from error


def _check_format(path: str | os.PathLike, number: int) -> None:
    if number > FORMAT:
        raise NewerFormat(
            f"{path} has format {number}, and fastagg {version('fastagg')} reads formats up to {FORMAT}: a newer "
            "fastagg wrote it. Install that version or a later one; the file is as it was"
        )
    if number < 1:
        raise ValueError(f"it says that its format is {number}")


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
