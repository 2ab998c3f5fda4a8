"""Every file we write, and the state files of aggregators. Nothing is pickled.

A new file is written under a random name beside its target, synced and renamed, so a crash leaves the former file as it
was. No existing file is opened for writing and no link is followed, so nothing that was put there can be damaged. A
process that is killed leaves its temporary file; the next write of the same target removes it.

Tensors are stored as safetensors: eight bytes with the length of a JSON header, the header, the tensors' bytes. The
safetensors library reads them. We write them ourselves because its writer does not let us choose where it writes.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import re
import secrets
import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

import safetensors.torch
import torch
from safetensors import SafetensorError

from fastagg._engine.regular import open_regular
from fastagg._engine.table import InputError

DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8",
    torch.bool: "BOOL", torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip


class Lock:
    """Held by one process at a time, from its creation to release() or the end of the `with` block.

    InputError where another process holds it. The kernel releases it when its owner is killed: the file that is left
    behind protects nothing, and the next owner removes it.
    """

    def __init__(self, path: Path, what: str) -> None:
        self.path = path
        while True:
            self.fd = self._open(what)
            if _is_at(self.fd, path):
                return
            os.close(self.fd)  # its owner removed it between our two calls: it protects nothing any more

    def _open(self, what: str) -> int:
        fd = -1
        try:
            fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise InputError(f"{self.path} is not a regular file: it cannot be the lock of {what}")
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return fd
        except BaseException as error:
            if fd >= 0:
                os.close(fd)
            if isinstance(error, BlockingIOError):
                raise InputError(f"{self.path}: another process is writing {what}") from error
            if isinstance(error, OSError):
                raise InputError(f"{self.path}: cannot lock {what}: {error.strerror or error}") from error
            raise

    def release(self) -> None:
        if self.fd >= 0:
            if os.fstat(self.fd).st_size == 0 and _is_at(self.fd, self.path):  # else it is not a file of ours
                self.path.unlink(missing_ok=True)
            os.close(self.fd)
        self.fd = -1

    def __enter__(self) -> Lock:
        return self

    def __exit__(self, *_: Any) -> None:
        self.release()


class Temporary:
    """A new file beside its target: write to .fd, then complete() and place(), or discard().

    It is locked as long as the descriptor or a mapping of the file is open, so one that can be locked belongs to a
    process that is gone. Until complete() nobody but its owner can read it.
    """

    def __init__(self, target: Path) -> None:
        self.target, self.mode = target, mode_of(target)
        while True:
            self.path = target.with_name(f".{target.name}.{os.getpid()}-{secrets.token_hex(8)}.part")
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
            self.fd = os.open(self.path, flags, 0o666 if self.mode is None else 0o600)
            self.ours = True
            try:
                fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                good = _is_at(self.fd, self.path)
            except OSError as error:  # without locks in this file system, nobody can tell that a file is stale, either
                good = not isinstance(error, BlockingIOError)
            if good:
                break
            self.discard()  # somebody who cleaned up locked it before us
        if self.mode is None:
            self.mode = stat.S_IMODE(os.fstat(self.fd).st_mode)  # what the umask allows
            os.fchmod(self.fd, 0o600)

    def reopen(self) -> None:
        """.fd again, which may be closed while the file is mapped: there may be too few descriptors for all files"""
        self.fd = os.open(self.path, os.O_RDWR | os.O_NOFOLLOW)

    def complete(self, mode: int | None = None) -> None:
        """Gives it its permissions, and waits until all is on the disk"""
        os.fchmod(self.fd, self.mode if mode is None else mode)
        os.fsync(self.fd)

    def place(self, target: Path | None = None) -> None:
        """Takes its place, or another one in the same folder. sync_folder() makes that permanent."""
        self.path.replace(target or self.target)
        self.ours = False
        self.close()

    def discard(self) -> None:
        self.close()
        if self.ours:
            self.path.unlink(missing_ok=True)
        self.ours = False

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
        self.fd = -1


def target_of(name: str) -> str | None:
    """The target of a Temporary, from its name; None where it is not like that of one"""
    found = re.fullmatch(r"\.(.+)\.\d+-[0-9a-f]{16}\.part", name, re.DOTALL)
    return found and found[1]


def stale(target: Path) -> list[Path]:
    """Temporary files of this target whose process is gone"""
    found = []
    with suppress(OSError), os.scandir(target.parent) as entries:
        for entry in entries:
            if target_of(entry.name) == target.name and entry.is_file(follow_symlinks=False):
                with suppress(OSError), _locked(Path(entry.path)):
                    found.append(Path(entry.path))
    return found


def remove_stale(target: Path) -> None:
    for path in stale(target):
        with suppress(OSError), _locked(path):
            path.unlink()


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """OSError where somebody else has locked the file, or it is none"""
    fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not stat.S_ISREG(os.fstat(fd).st_mode) or not _is_at(fd, path):
            raise FileNotFoundError(path)
        yield
    finally:
        os.close(fd)


def _is_at(fd: int, path: Path) -> bool:
    """Whether the open file is still the one of this name"""
    try:
        return os.path.samestat(os.fstat(fd), os.lstat(path))
    except FileNotFoundError:
        return False


def mode_of(path: Path) -> int | None:
    """Permissions of the file that is to be replaced, None where there is none; an error where it is not a file"""
    try:
        mode = os.stat(path).st_mode
    except OSError:
        return None
    if not stat.S_ISREG(mode):
        raise InputError(f"{path} is not a regular file: it cannot be replaced by one")
    return stat.S_IMODE(mode) & 0o777


def sync_folder(folder: Path) -> None:
    """Renames before this are on the disk before those after it"""
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except PermissionError:  # a folder that may be written to and not be read
        return
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some file systems cannot sync a folder
            raise
    finally:
        os.close(fd)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """An OSError that names no file, or a temporary one, gets this name"""
    try:
        yield
    except OSError as error:
        named = os.path.basename(str(error.filename or ""))
        if error.errno is not None and (not named or target_of(named) == path.name):
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise


@contextmanager
def prepared(path: Path, mode: int | None = None) -> Iterator[tuple[Temporary, BinaryIO]]:
    """A file to write into, which is complete and on the disk at the end of the block, but not in its place yet.

    mode: its permissions; default: those of the file it will replace, or what the umask allows
    """
    with naming(path):
        remove_stale(path)
        new = Temporary(path)
        try:
            with open(new.fd, "wb", closefd=False) as file:
                yield new, file
            new.complete(mode)
        except BaseException:
            new.discard()
            raise


@contextmanager
def whole(path: Path) -> Iterator[BinaryIO]:
    """A file to write into, which takes its place when all is written and on the disk"""
    with prepared(path) as (new, file):
        yield file
    put(new)


def put(new: Temporary) -> None:
    """Moves a prepared file to its place"""
    with naming(new.target):
        try:
            new.place()
        finally:
            new.discard()
        sync_folder(new.target.parent)


def write(path: Path, content: bytes | str) -> None:
    with whole(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


def write_json(path: Path, value: Any) -> None:
    write(path, json.dumps(value, indent=1) + "\n")


def save(path: str | os.PathLike, tree: Any) -> None:
    """A tree of dicts (with string keys), lists, tensors and plain values, as one safetensors file."""
    put(prepare(path, tree)[0])


def prepare(path: str | os.PathLike, tree: Any, more: Mapping[str, str] | None = None) -> tuple[Temporary, str]:
    """save() up to the last step, which put() does: the file, and its checksum. more: metadata"""
    tensors: dict[str, torch.Tensor] = {}
    plain = _without_tensors(tree, tensors)
    order = sorted(tensors, key=lambda name: -tensors[name].itemsize)  # each begins at a multiple of its item
    parts = [(name, tensors[name].dtype, tensors[name].shape) for name in order]
    start = header(parts, {**(more or {}), "fastagg": json.dumps(plain), CHECKSUM: BLANK})
    content = [_bytes(tensors[name]) for name in order]
    checksum = _checksum(start, content)
    with prepared(Path(path)) as (new, file):
        file.write(start.replace(_entry(BLANK), _entry(checksum)))
        file.writelines(content)
    return new, checksum


CHECKSUM, BLANK = "fastagg.sha256", "0" * 64


def _bytes(x: torch.Tensor) -> memoryview:
    x = x.contiguous()  # which leaves the odd strides of a single number, or none, as they are
    return memoryview(x.as_strided((x.numel(),), (1,)).view(torch.uint8).numpy())


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
    """What save() was given. InputError where the file is not one of its, or damaged."""
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
        return _with_tensors(json.loads(metadata["fastagg"]), safetensors.torch.load(raw)), metadata
    except (FileNotFoundError, InputError):
        raise
    except (SafetensorError, OSError, KeyError, TypeError, ValueError, RecursionError) as error:
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
