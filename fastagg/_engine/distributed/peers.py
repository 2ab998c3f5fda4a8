"""The ranks of a process group, and how they agree on going on, or on why not.

A round alternates between work that each rank does alone, which may fail on one of them, and collective calls, which
all ranks must make. Before every such call they meet: each says in three numbers whether it has failed, and what it is
about to do. If one has failed, or is about to do something else, all raise the same error. So nobody waits for a rank
that is not coming; one that died ends the others by torch.distributed's own error.

Functions here that raise an error delete their variable for it. An error refers to the frames it passed; a frame that
refers to the error would keep both, and the process group with them, until the garbage collector comes. A group that
is still there when the interpreter exits can abort the process, even after destroy_process_group.
"""

from __future__ import annotations

import builtins
import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn

import numpy as np
import torch
import torch.distributed as dist

from fastagg._engine.checks import BadClientError, InputError

INPUT_ERRORS = ("InputError", "BadClientError", "NonFiniteError", "OutOfRangeError")
KNOWN = "_known_to_all_ranks"  # an attribute of errors that have been told, or that all ranks raise by themselves


class Peers:
    """The ranks of a group: a torch.distributed process group, or True for the default one.

    rank, size   of this process in the group, and of the group
    device       where tensors have to be that are sent
    """

    def __init__(self, group: Any) -> None:
        if not dist.is_available() or not dist.is_initialized():
            raise ValueError("group: torch.distributed is not initialised; call init_process_group first")
        self.group = dist.group.WORLD if group is True else group
        if not isinstance(self.group, dist.ProcessGroup):
            raise ValueError(
                f"group={group!r}; expected a process group of torch.distributed that this process is in, or True for "
                "the default one"
            )
        self.rank, self.size = dist.get_rank(self.group), dist.get_world_size(self.group)
        self.ranks = dist.get_process_group_ranks(self.group)  # their numbers in the default group
        on_cpu = "cpu" in dist.get_backend_config(self.group)
        self.device = torch.device("cpu") if on_cpu else torch.device("cuda", torch.cuda.current_device())

    @contextmanager
    def together(self) -> Iterator[None]:
        """When a rank raises in here, all do: the same error, which names the rank."""
        try:
            yield
            self.agree({"step": "end"})
        except Exception as error:
            self.tell(error)

    def agree(self, facts: Mapping[str, str], number: int = 0) -> list[int]:
        """Meets the others, whose facts must be the same; returns the numbers that the ranks have brought along."""
        mine = json.dumps(facts, sort_keys=True)
        met = self._meet(digest(mine), number)
        if any(theirs != met[0][1] for _, theirs, _ in met):
            self.share(self._difference([json.loads(text) for text in self.texts(mine)]))
        return [number for _, _, number in met]

    def tell(self, error: Exception) -> NoReturn:
        """Raises it, here and on all other ranks, unless they know"""
        try:
            if getattr(error, KNOWN, False):
                raise error
            self._meet(failed=error)
            raise error  # never reached: a rank has failed, so that raises
        finally:
            del error

    def share(self, error: Exception) -> NoReturn:
        """Raises what every rank raises at this point"""
        try:
            setattr(error, KNOWN, True)
            raise error
        finally:
            del error

    def texts(self, mine: str) -> list[str]:
        """What each rank says. JSON, and never a pickle: what comes in is only ever read as text."""
        data = torch.frombuffer(bytearray(mine.encode() or b" "), dtype=torch.uint8)
        lengths = [int(n) for n in self.gather(torch.tensor([len(data)]))]
        padded = torch.zeros(max(lengths), dtype=torch.uint8)
        padded[: len(data)] = data
        said = self.gather(padded)
        return [bytes(said[r][:n].tolist()).decode().strip() for r, n in enumerate(lengths)]

    def gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """The ranks' tensors, all of one form, on the CPU"""
        tensor = tensor.to(self.device)
        out = [torch.empty_like(tensor) for _ in range(self.size)]
        self.call(dist.all_gather, out, tensor)
        return [t.cpu() for t in out]

    def add(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over the ranks, in the place of the tensor. Rings and trees finish each number on one rank and hand
        it round, so all get the same bits."""
        total = tensor.to(self.device)
        self.call(dist.all_reduce, total)
        return total.to(tensor.device)

    def of_first(self, array: np.ndarray) -> np.ndarray:
        """The first rank's array, of the form of this one"""
        tensor = torch.from_numpy(array).to(self.device, copy=True)
        self.call(dist.broadcast, tensor, src=self.ranks[0])
        return tensor.cpu().numpy()

    def call(self, collective: Any, *args: Any, **more: Any) -> None:
        try:
            collective(*args, group=self.group, **more)
        except BaseException as error:
            setattr(error, KNOWN, True)  # or there is nobody to tell any more
            raise

    def _meet(self, what: int = 0, number: int = 0, failed: Exception | None = None) -> list[list[int]]:
        met = [t.tolist() for t in self.gather(torch.tensor([int(failed is not None), what, number]))]
        if any(status for status, _, _ in met):
            try:
                said = [[r, *json.loads(text)] for r, text in enumerate(self.texts(_told(failed))) if text]
                if failed is not None and len(said) == self.size and all(rest == said[0][1:] for _, *rest in said):
                    self.share(failed)  # all of them, with the same words
                error = self._named(said)
                setattr(error, KNOWN, True)
                raise error from failed
            finally:
                error = failed = None
        return met

    def _named(self, said: list[list[Any]]) -> Exception:
        (rank, name, message, _), *more = said
        kind = InputError if name in INPUT_ERRORS else getattr(builtins, name, None)
        if kind not in (InputError, ValueError, TypeError, MemoryError, RuntimeError):
            kind, message = RuntimeError, f"{name}: {message}"
        also = f" (and so failed {len(more)} more of the {self.size} ranks)" if more else ""
        message = f"rank {rank}: {message}{also}"
        if all(wrong for *_, wrong in said):  # with clients, on each rank that failed
            found = [(k, f"on rank {r}, {reason}") for r, _, _, wrong in said for k, reason in wrong]
            return BadClientError(message, dict(reversed(found)))  # of several ranks, the first
        return kind(message)

    def _difference(self, facts: list[dict[str, str]]) -> InputError:
        for name in sorted({name for known in facts for name in known}, key=lambda name: (name != "step", name)):
            values = [known.get(name, "nothing") for known in facts]
            other = next((r for r, value in enumerate(values) if value != values[0]), None)
            if other is not None:
                return InputError(f"the ranks differ in {name}: {values[0]} on rank 0, {values[other]} on rank {other}")
        raise AssertionError("the ranks do not differ")


def _told(error: Exception | None) -> str:
    """What other ranks hear of an error: its class, its words, and what is wrong with which clients"""
    if error is None:
        return ""
    wrong = list(error.reasons.items()) if isinstance(error, BadClientError) else []
    return json.dumps([type(error).__name__, str(error), wrong])


def digest(data: str | bytes) -> int:
    """63 bits of a hash: what differs has another one"""
    data = data.encode() if isinstance(data, str) else data
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little") >> 1


def shown(value: Any) -> str:
    """An option, size or id for a comparison of the ranks: the same words for what is the same"""
    if value is None or isinstance(value, str | int | float):
        return repr(value)
    if isinstance(value, Mapping):
        return brief(repr(sorted((str(key), shown(entry)) for key, entry in value.items())))
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu().double().numpy()
    try:
        array = np.asarray(value)
    except ValueError:
        return type(value).__name__
    if array.dtype == object:
        return type(value).__name__
    return brief(repr(array.tolist()))


def brief(text: str) -> str:
    """Long texts cut short, but still different where they were"""
    return text if len(text) < 200 else f"{text[:40]} ... ({digest(text):x})"
