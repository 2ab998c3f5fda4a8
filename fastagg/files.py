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
import json
import os
import re
import secrets
import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
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

    It is locked as long as the descriptor or a mapping of the file is open. One that can be locked belongs to a process
    that is gone. Until complete() it can be read by its owner alone, where the target has restricted permissions.
    """

    def __init__(self, target: Path, mode: int | None = None) -> None:
        """mode: permissions of the file; default: those of the present target, or what the umask allows"""
        self.target, self.mode = target, mode_of(target) if mode is None else mode
        remove_stale(target)
        while True:
            self.path = target.with_name(f".{target.name}.{os.getpid()}-{secrets.token_hex(8)}.part")
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
            self.fd = os.open(self.path, flags, 0o666 if self.mode is None else 0o600)
            self.ours = True
            try:
                fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if _is_at(self.fd, self.path):
                    return
            except BlockingIOError:
                pass
            except OSError:
                return  # a file system without locks: there nobody can tell that a file is stale, either
            self.discard()  # somebody who cleaned up locked it before us

    def complete(self) -> None:
        """Waits until all is on the disk, and closes the descriptor"""
        if self.fd < 0:
            self.fd = os.open(self.path, os.O_RDWR | os.O_NOFOLLOW)
        if self.mode is not None:
            os.fchmod(self.fd, self.mode)
        os.fsync(self.fd)
        self.close()

    def place(self, target: Path | None = None) -> None:
        """Takes its place, or another one in the same folder. sync_folder() makes that permanent."""
        self.path.replace(target or self.target)
        self.ours = False

    def discard(self) -> None:
        self.close()
        if self.ours:
            self.path.unlink(missing_ok=True)
        self.ours = False

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
        self.fd = -1


def remove_stale(target: Path) -> None:
    """Removes temporary files of this target whose process was killed"""
    ours = re.compile(re.escape(f".{target.name}.") + r"\d+-[0-9a-f]{16}\.part")
    with suppress(OSError), os.scandir(target.parent) as entries:
        for entry in entries:
            if ours.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
                with suppress(OSError):
                    _remove_if_unlocked(Path(entry.path))


def _remove_if_unlocked(path: Path) -> None:
    fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if stat.S_ISREG(os.fstat(fd).st_mode) and _is_at(fd, path):
            path.unlink()
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
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some file systems cannot sync a folder
            raise
    finally:
        os.close(fd)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """An OSError that names no file gets this one"""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            error.filename = str(path)
        raise


@contextmanager
def whole(path: Path, mode: int | None = None) -> Iterator[BinaryIO]:
    """A file to write into, which takes its place when all is written and on the disk"""
    with naming(path):
        new = Temporary(path, mode)
        try:
            with open(new.fd, "wb", closefd=False) as file:
                yield file
            new.complete()
            new.place()
        finally:
            new.discard()
        sync_folder(path.parent)


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
