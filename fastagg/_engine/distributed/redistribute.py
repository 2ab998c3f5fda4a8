"""From whole clients on each rank to a part of every client on each rank, and back.

Models are cut into as many parts as there are ranks: runs of layers where these come out alike in size, so that an
aggregation of the parts gives the bits of one process; else pieces of tensors, of equal size.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from fastagg._engine import table as tables
from fastagg._engine.checks import BadClientError, InputError
from fastagg._engine.distributed.peers import Peers, brief
from fastagg._engine.inputs import bad_clients, read_client_ids, read_sizes
from fastagg._engine.outputs import to_numpy
from fastagg._engine.result import Result, Results
from fastagg._engine.table import Layout, StateDict

MOST_UNEVEN = 1.25  # the largest part, as a multiple of the mean: beyond it layers are cut too

Piece = tuple[str, int, int]  # elements [first, past the last) of a key


class Cut:
    """Who has what of a model: a list of pieces for each rank, in the order of the keys."""

    def __init__(self, layout: Layout, ranks: int, exact: bool = False) -> None:
        self.shapes = dict(zip(layout.keys, layout.shapes, strict=True))
        self.numel = dict(zip(layout.keys, layout.numel.tolist(), strict=True))
        self.width = {key: dtype.itemsize for key, dtype in zip(layout.keys, layout.dtypes, strict=True)}
        sizes = np.bincount(layout.layer, layout.bytes, len(layout.layers))
        at = split(sizes.astype(np.int64).tolist(), ranks)
        largest = max(sizes[a:b].sum() for a, b in pairwise(at))
        if exact or largest <= MOST_UNEVEN * sizes.sum() / ranks:
            owner = np.repeat(np.arange(ranks), np.diff(at))[layout.layer]
            self.pieces = [
                [(layout.keys[t], 0, int(layout.numel[t])) for t in np.flatnonzero(owner == r)] for r in range(ranks)
            ]
        else:
            self.pieces = list(_even(layout, ranks))

    def bytes(self, rank: int) -> int:
        return sum((stop - start) * self.width[key] for key, start, stop in self.pieces[rank])

    def part(self, rank: int, model: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """A rank's part of a model, or of some of its keys, where that is"""
        return {
            key: model[key] if stop - start == self.numel[key] else model[key].detach().reshape(-1)[start:stop]
            for key, start, stop in self.pieces[rank] if key in model
        }  # fmt: skip


def split(sizes: list[int], parts: int) -> list[int]:
    """Where to cut a sequence into runs so that the largest sum is the least possible: parts + 1 positions"""
    low, high = max(sizes, default=0), sum(sizes)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if len(_runs(sizes, middle)) <= parts else (middle + 1, high)
    starts = _runs(sizes, low)
    return [*starts, *[len(sizes)] * (parts + 1 - len(starts))]


def _runs(sizes: list[int], most: int) -> list[int]:
    """Where runs begin that are as long as `most` allows"""
    starts, held = [0], 0
    for i, size in enumerate(sizes):
        if held + size > most:
            starts.append(i)
            held = 0
        held += size
    return starts


def _even(layout: Layout, ranks: int) -> Iterator[list[Piece]]:
    """Equally many bytes for each rank, of tensors in the order of their layers"""
    order = np.argsort(layout.layer, kind="stable")
    ends = np.cumsum(layout.bytes[order])
    total = int(ends[-1]) if len(ends) else 0
    for r in range(ranks):
        first, last = total * r // ranks, total * (r + 1) // ranks
        pieces = []
        for t, end in zip(order.tolist(), ends.tolist(), strict=True):
            begin, width = end - int(layout.bytes[t]), layout.dtypes[t].itemsize
            start, stop = (-(-max(edge - begin, 0) // width) for edge in (first, last))
            start, stop = min(start, int(layout.numel[t])), min(stop, int(layout.numel[t]))
            empty = not layout.numel[t] and r == 0  # it has to be somewhere
            if start < stop or empty:
                pieces.append((layout.keys[t], start, stop))
        yield pieces


@dataclass(eq=False)
class Part:
    """This rank's part of all models of a round. Pass its models to an aggregator with group=, the result to gather().

    sizes, client_ids   of all clients, in the order of client_sds: the clients of rank 0 come first
    """

    global_sd: dict[str, torch.Tensor]
    client_sds: list[dict[str, torch.Tensor]]
    sizes: list[float] | None
    client_ids: list[Any] | None
    cut: Cut = field(repr=False)
    peers: Peers = field(repr=False)
    bucket_bytes: int = field(repr=False)
    as_numpy: frozenset[str] = field(repr=False)

    def gather(self, result: Result | Results | Mapping[str, Any], dst: int | None = None) -> Any:
        """The whole model, or models, of a result: on every rank, or only on rank dst of the group (None elsewhere)"""
        if isinstance(result, Results):
            whole = [None if model is None else self.gather(model, dst) for model in result]
            return None if dst not in (None, self.peers.rank) else _about(Results(whole), result)
        whole = gather(self.peers, self.cut, result, dst, self.bucket_bytes)
        if whole is None:
            return None
        whole = {key: to_numpy(value) if key in self.as_numpy else value for key, value in whole.items()}
        return _about(Result(whole), result)


def _about(whole: Result | Results, part: Any) -> Any:
    whole.__dict__.update(getattr(part, "__dict__", {}))
    return whole


def distribute(
    global_sd: StateDict, my_client_sds: Sequence[StateDict], group: Any = True, *,
    client_ids: Sequence[Any] | None = None, sizes: Sequence[float] | None = None, bucket_bytes: int = 64 << 20,
    exact: bool = False,
) -> Part:  # fmt: skip
    """Redistributes clients: each rank has received some of them whole, and gets a part of every client.

        part = fastagg.distribute(global_sd, my_client_sds, group, client_ids=my_ids, sizes=my_sizes)
        result = server.aggregate(part.global_sd, part.client_sds, part.sizes, part.client_ids)  # made with group=group
        global_sd = part.gather(result)

    global_sd       the whole model, the same on every rank (this is checked)
    my_client_sds   the clients of this rank; their number may differ by rank and may be 0
    client_ids      ids of this rank's clients; on all ranks or on none. Without ids, clients are numbered across ranks
    sizes           data sizes of this rank's clients; on all ranks or on none
    bucket_bytes    how much is sent at a time: the memory needed in addition to the parts themselves
    exact           cut only between layers, however unequal the parts become, so that the aggregate has the bits of one
                    process. Without it, this holds if the largest part is at most 1.25 times the mean.

    Parts of this rank's own clients, and of the global model, are views of the tensors given.
    """
    peers = Peers(group)
    with peers.together():
        try:
            table, ids, amounts = _checked(global_sd, my_client_sds, client_ids, sizes, bucket_bytes)
        except BadClientError as error:  # its positions are of this rank's clients, and would mislead the others
            raise InputError(str(error)) from error
        layout, center = table.layout, table.center
        assert center is not None
        form = {"keys": layout.keys, "shapes": layout.shapes, "dtypes": [str(dtype) for dtype in layout.dtypes]}
        facts = {"step": "distribute", "bucket_bytes": str(bucket_bytes), "exact": str(exact)}
        facts |= {f"the global model's {what}": brief(json.dumps(value)) for what, value in form.items()}
        sums = zip(layout.keys, _checksums(center), strict=True)
        peers.agree(facts | {f"the global model's values of {key!r}": f"checksum {n:x}" for key, n in sums})
        said = [json.loads(text) for text in peers.texts(json.dumps([len(my_client_sds), ids, amounts]))]
        counts, ids, amounts = [n for n, _, _ in said], _joined("client_ids", said, 1), _joined("sizes", said, 2)
        if not sum(counts):
            raise InputError("no clients: no rank has any")
        read_client_ids(ids, sum(counts))
        cut = Cut(layout, peers.size, exact)
        mine = [dict(zip(layout.keys, client, strict=True)) for client in table.clients[: len(my_client_sds)]]
        model = dict(zip(layout.keys, center, strict=True))
        clients = [_empty(cut, peers.rank, model) for n in counts[: peers.rank] for _ in range(n)]
        clients += [cut.part(peers.rank, client) for client in mine]
        clients += [_empty(cut, peers.rank, model) for n in counts[peers.rank + 1 :] for _ in range(n)]
        as_numpy = frozenset(key for key, wanted in zip(layout.keys, table.as_numpy, strict=True) if wanted)
        part = Part(cut.part(peers.rank, model), clients, amounts, ids, cut, peers, bucket_bytes, as_numpy)
        sent = [n * cut.bytes(s) for r, n in enumerate(counts) for s in range(peers.size) if r != s]
        longest = max(sent, default=0)
        size = max(1, min(bucket_bytes // (2 * peers.size), longest))
        buckets = [torch.empty(peers.size * size, dtype=torch.uint8, device=peers.device) for _ in range(2)]
    _exchange(part, mine, counts, buckets, -(-longest // size))
    return part


def _checked(global_sd, client_sds, client_ids, sizes, bucket_bytes) -> tuple[tables.Table, list | None, list | None]:
    """The table of this rank's clients (of the global model alone where there are none), their ids and sizes"""
    if not isinstance(bucket_bytes, int) or bucket_bytes < 1:
        raise InputError(f"bucket_bytes={bucket_bytes!r}; expected an integer >= 1")
    if not isinstance(client_sds, Sequence):
        raise InputError(f"client_sds is a {type(client_sds).__name__}; expected a sequence of state dicts")
    K = len(client_sds)
    ids = None if client_ids is None else read_client_ids(client_ids, K)
    amounts, faults = read_sizes(sizes, ids or range(K))
    if faults:
        raise bad_clients(faults, ids)
    if not isinstance(global_sd, Mapping):
        raise InputError(f"the global model is a {type(global_sd).__name__}, expected a state dict (name -> tensor)")
    return (
        tables.build(global_sd, client_sds or [global_sd], client_ids=ids or None),
        ids,
        None if sizes is None else amounts.tolist(),
    )


def _checksums(tensors: list[torch.Tensor]) -> list[int]:
    """Sums of the bits, at the speed of memory. They are no proof against forgery, but show that a rank started from
    another seed, or missed a round."""
    sums = []
    for tensor in tensors:
        raw = tensor.detach().reshape(-1).view(torch.uint8)
        if raw.numel() % 8 or raw.storage_offset() % 8:
            raw = torch.nn.functional.pad(raw, (0, -raw.numel() % 8))
        sums.append(raw.view(torch.int64).sum())
    return torch.stack(sums).tolist() if sums else []


def _joined(name: str, said: list, at: int) -> list | None:
    """What the ranks that have clients say of them, in one list; they all say something, or none does"""
    given = {rank: words[at] for rank, words in enumerate(said) if words[0]}
    without = [rank for rank, values in given.items() if values is None]
    if not without:
        return [value for values in given.values() for value in values]
    if len(without) < len(given):
        raise InputError(f"{name}: rank {without[0]} gave none, other ranks did")
    return None


def _empty(cut: Cut, rank: int, like: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    with torch.no_grad():
        parts = cut.part(rank, like).items()
        return {key: torch.empty_like(value, memory_format=torch.contiguous_format) for key, value in parts}


def _exchange(part: Part, mine: list[dict], counts: list[int], buckets: list[torch.Tensor], rounds: int) -> None:
    """Every rank sends each other one its parts of the clients, as one stream of bytes, a bucket at a time"""
    peers, cut = part.peers, part.cut
    ends = np.cumsum(counts).tolist()
    sending, receiving = [], []
    for r in range(peers.size):
        theirs = part.client_sds[ends[r] - counts[r] : ends[r]]
        own = r == peers.rank
        sending.append(Stream(v for sd in mine for v in cut.part(r, sd).values() if not own))
        receiving.append(Stream(v for sd in theirs for v in sd.values() if not own))
    out, into = buckets
    size = out.numel() // peers.size
    for _ in range(rounds):
        sent, got = ([min(size, stream.left) for stream in streams] for streams in (sending, receiving))
        for stream, piece in zip(sending, out[: sum(sent)].split(sent), strict=True):
            stream.read(piece)
        peers.call(dist.all_to_all_single, into[: sum(got)], out[: sum(sent)], got, sent)
        for stream, piece in zip(receiving, into[: sum(got)].split(got), strict=True):
            stream.write(piece)


def gather(
    peers: Peers, cut: Cut, model: Mapping[str, Any], dst: int | None, bucket_bytes: int
) -> dict[str, torch.Tensor] | None:
    """The whole of what each rank has its part of: a model, or something else by some of its keys"""
    with peers.together():
        if dst is not None and dst not in range(peers.size):
            raise InputError(f"dst={dst!r}; expected a rank of the group, 0 to {peers.size - 1}, or None for all")
        mine = {key: tables.as_tensor(value, "the result", key) for key, value in model.items()}
        pieces = [(key, a, b) for key, a, b in cut.pieces[peers.rank] if key in mine]
        for key, a, b in pieces:
            if mine[key].numel() != b - a:
                raise InputError(f"the result: key {key!r} has {mine[key].numel()} elements, expected {b - a}")
        for key in mine.keys() - {key for key, _, _ in pieces}:
            raise InputError(f"the result: key {key!r} is not in this rank's part of the model")
        peers.agree({"step": "gather", "dst": str(dst)})
        facts = [[key, a, b, str(mine[key].dtype).removeprefix("torch.")] for key, a, b in pieces]
        said = [json.loads(text) for text in peers.texts(json.dumps(facts))]
        there: dict[str, int] = {}
        for key, a, b, _ in (piece for theirs in said for piece in theirs):
            there[key] = there.get(key, 0) + b - a
        for key, n in there.items():  # the same on all ranks, and so is the error
            if n != cut.numel[key]:
                raise InputError(f"the result: key {key!r} has {n} of {cut.numel[key]} elements on all ranks together")
        wanted = dst is None or dst == peers.rank
        device = next((value.device for value in mine.values()), torch.device("cpu"))
        dtypes = {key: getattr(torch, dtype) for theirs in said for key, _, _, dtype in theirs}
        kept = [key for key in cut.numel if key in dtypes and wanted]
        whole = {key: torch.empty(cut.numel[key], dtype=dtypes[key], device=device) for key in kept}
        most = max(sum((b - a) * dtypes[key].itemsize for key, a, b, _ in theirs) for theirs in said)
        bucket = torch.empty(min(bucket_bytes, most), dtype=torch.uint8, device=peers.device)
    for r, theirs in enumerate(said):
        target = Stream(whole[key][a:b] for key, a, b, _ in theirs) if wanted else None
        source = Stream(mine[key].contiguous() for key, _, _ in pieces) if r == peers.rank else None
        left = sum((b - a) * dtypes[key].itemsize for key, a, b, _ in theirs)
        while left:
            piece = bucket[: min(left, bucket.numel())]
            left -= piece.numel()
            if source is not None:
                source.read(piece)
            if dst is None:
                peers.call(dist.broadcast, piece, src=peers.ranks[r])
            elif r != dst and peers.rank == r:
                peers.call(dist.send, piece, dst=peers.ranks[dst])
            elif r != dst and peers.rank == dst:
                peers.call(dist.recv, piece, src=peers.ranks[r])
            if target is not None:
                target.write(piece)
    return {key: value.view(cut.shapes[key]) for key, value in whole.items()} if wanted else None


class Stream:
    """The bytes of several tensors, one behind the other, read or written from the first on"""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        flat = (t.detach().reshape(-1).view(torch.uint8) for t in tensors)
        self._parts = [part for part in flat if part.numel()][::-1]
        self.left = sum(part.numel() for part in self._parts)

    def read(self, into: torch.Tensor) -> None:
        for here, there in self._next(into):
            there.copy_(here)

    def write(self, given: torch.Tensor) -> None:
        for here, there in self._next(given):
            here.copy_(there)

    def _next(self, other: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        self.left -= other.numel()
        while other.numel():
            part = self._parts.pop()
            n = min(part.numel(), other.numel())
            yield part[:n], other[:n]
            other = other[n:]
            if n < part.numel():
                self._parts.append(part[n:])
