"""Every file we write: all of it or nothing.

A new file is written under a random name beside its target, synced and renamed, so a crash leaves the former file as it
was. No existing file is opened for writing and no link is followed, so nothing that was put there can be damaged. A
process that is killed leaves its temporary file; the next write of the same target removes it.
"""

from __future__ import annotations

import errno
import json
import os
import re
import secrets
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from fastagg._engine.checks import InputError
from fastagg._engine.regular import check_system

if sys.platform != "win32":
    import fcntl


class Lock:
    """Held by one process at a time, from its creation to release() or the end of the `with` block.

    InputError where another process holds it. The kernel releases it when its owner is killed: the file that is left
    behind protects nothing, and the next owner removes it.
    """

    def __init__(self, path: Path, what: str) -> None:
        check_system(path)
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
        check_system(target)
        self.target, mode = target, mode_of(target)
        while True:
            self.path = target.with_name(f".{target.name}.{os.getpid()}-{secrets.token_hex(8)}.part")
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
            self.fd = os.open(self.path, flags, 0o666 if mode is None else 0o600)
            self.ours = True
            try:
                fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                good = _is_at(self.fd, self.path)
            except OSError as error:  # without locks in this file system, nobody can tell that a file is stale, either
                good = not isinstance(error, BlockingIOError)
            if good:
                break
            self.discard()  # somebody who cleaned up locked it before us
        if mode is None:
            mode = stat.S_IMODE(os.fstat(self.fd).st_mode)  # what the umask allows
            os.fchmod(self.fd, 0o600)
        self.mode = mode

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
