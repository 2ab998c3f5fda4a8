"""The update of one module, scaling * B A, and the inner products of such updates: never the update itself.

    <B_i A_i, B_j A_j> = sum of (B_i' B_j) * (A_i A_j'), elementwise

so the small matrices of all A_i A_j' and of all B_i' B_j are all that is needed. Clients that started from a global
adapter g have moved by

    d_k = B_k A_k - B_g A_g = B_k (A_k - A_g) + (B_k - B_g) A_g

of which the right-hand side is computed: its differences are taken element by element, in float64, before anything is
multiplied. The difference of the two products on the left would have no digits left for a small update.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

CHUNK = 1024  # columns that are converted to float64 at a time: with 20 clients of rank 16, 2.8 MB; 256 take 8 % longer
GROUPS = 4  # in which rows are multiplied: 5/8 of the products, for the others are these again


@dataclass(frozen=True, eq=False)
class Factors:
    """scaling * B A of one module, where the caller keeps them: A [r, in], B [out, r]"""

    A: Tensor
    B: Tensor
    scaling: float

    @property
    def rank(self) -> int:
        return self.A.shape[0]


@dataclass(frozen=True, eq=False)
class Core:
    """All products of rows of A, and of columns of B, of one module's factors: float64, on the host.

    The P rows are those of the center, if there is one, and then of each client less those of the center. Factors of
    another rank than the center's are filled up with zeros. A client that is the center has no rows.

    unit   B of every factor is taken times its scaling, and divided by this
    """

    center: Factors | None
    clients: Sequence[Factors | None]
    widths: Sequence[int]  # rows of each client
    unit: float
    A: Tensor  # [P, P]
    B: Tensor  # [P, P]

    @property
    def bytes(self) -> int:
        return self.A.nbytes + self.B.nbytes

    def gram(self) -> Tensor:
        """<g, g>, <g, d_k> and <d_i, d_j>: [K+1, K+1]"""
        r, K = _rank(self.center), len(self.widths)
        client = _index([0] * r + [k for k, width in enumerate(self.widths, 1) for _ in range(width)])
        if not r:
            return self.unit**2 * _sums(self.A * self.B, client, client, K + 1)
        # which row of the center each is less by; r: none
        less = _index([r] * r + [min(i, r) for width in self.widths for i in range(width)])
        center = torch.nn.functional.pad(self.B[:r], (0, 0, 0, 1))
        more = center[less]
        whole = self.B + more + more.T + torch.nn.functional.pad(center[:, :r], (0, 1))[less][:, less]
        gram = _sums(whole.mul_(self.A), client, client, K + 1)  # B_i (A_i - A_g) with B_j (A_j - A_g)
        some = less < r
        less, of = less[some], client[some]
        part = more.add_(self.B)[:, some].mul_(self.A[:, less])  # B_i (A_i - A_g) with (B_j - B_g) A_g
        both = _sums(part, client, of, K + 1)
        gram += both + both.T + _sums(self.B[some][:, some].mul_(self.A[less][:, less]), of, of, K + 1)
        return self.unit**2 * (gram + gram.T) / 2

    def terms(self) -> Tensor:
        """What <g, g> and <d_k, d_k> are sums of, if no term had another sign: [K+1]. They are known to 1e-16 of it"""
        r, a, b = _rank(self.center), self.A.diagonal(), self.B.diagonal()
        client = _index([0] * r + [k for k, width in enumerate(self.widths, 1) for _ in range(width)])
        of_center = _index([*range(r)] + [i if i < r else -1 for width in self.widths for i in range(width)])
        some = (of_center >= 0) & (client > 0)
        less = of_center[some]
        whole = b.clone()  # of B_k, where b has those of B_k - B_g
        whole[some] += b[less] + 2 * self.B[some, less]
        lengths = (a * whole.clamp(min=0)).sqrt()
        lengths[some] += (a[less] * b[some]).sqrt()
        sums = torch.zeros(len(self.widths) + 1, dtype=torch.float64, device="cpu").index_add_(0, client, lengths)
        return (self.unit * sums) ** 2

    def of(self, factors: Sequence[Factors]) -> Core | None:
        """The products of these factors themselves, without a center; None if they are not among those known"""
        start, r = {id(self.center): 0}, _rank(self.center)
        at = r
        for client, width in zip(self.clients, self.widths, strict=True):
            if width:
                start[id(client)] = at
            at += width
        if any(id(f) not in start for f in factors):
            return None
        rows, more = [], []
        for f in factors:
            begin = start[id(f)]
            rows += range(begin, begin + f.rank)
            more += [i if i < r and f is not self.center else -1 for i in range(f.rank)]
        A, B = (_rows_of(products, rows, more) for products in (self.A, self.B))
        return Core(None, factors, [f.rank for f in factors], self.unit, A, B)


def core_of(center: Factors | None, clients: Sequence[Factors | None]) -> Core:
    """One read of the factors of a module. None stands for no update, of rank 0."""
    reference = next((f for f in (center, *clients) if f is not None), None)
    if reference is None:
        nothing = torch.zeros(0, 0, dtype=torch.float64, device="cpu")
        return Core(center, clients, [0] * len(clients), 1.0, nothing, nothing)
    r, unit = _rank(center), reference.scaling
    widths = [0 if f is center else max(_rank(f), r) for f in clients]
    none = Factors(reference.A[:0], reference.B[:, :0], unit)
    some = [f or none for f, width in zip(clients, widths, strict=True) if width]
    wide = [width for width in widths if width]
    A = _products(None if center is None else center.A, [f.A for f in some], [1.0] * len(some), wide)
    B = _products(None if center is None else center.B.T, [f.B.T for f in some], [f.scaling / unit for f in some], wide)
    return Core(center, clients, widths, unit, A, B)


def combined(rows: Sequence[Tensor], ratios: Sequence[float], by: Tensor) -> Tensor:
    """by [r, sum of the ranks] times the rows [rank, n] of these factors, each times its ratio: [r, n] float64"""
    by = by.to(rows[0].device)
    out = torch.empty(len(by), rows[0].shape[1], dtype=torch.float64, device=by.device)
    for piece, x in chunks(None, rows, ratios, [len(x) for x in rows]):
        torch.mm(by, x, out=out[:, piece])
    return out


def chunks(
    center: Tensor | None, clients: Sequence[Tensor], ratios: Sequence[float], widths: Sequence[int]
) -> Iterator[tuple[slice, Tensor]]:
    """The rows of the center, and those of each client times its ratio less the center's, some columns at a time: a
    float64 matrix, which is overwritten by the next"""
    like = clients[0] if center is None else center
    r = 0 if center is None else len(center)
    n, P = like.shape[1], r + sum(widths)
    memory = torch.empty(P, CHUNK, dtype=torch.float64, device=like.device)
    for begin in range(0, n, CHUNK):
        piece = slice(begin, min(begin + CHUNK, n))
        x = memory[:, : piece.stop - begin]
        if center is not None:
            x[:r] = center[:, piece]
        at = r
        for rows, ratio, width in zip(clients, ratios, widths, strict=True):
            into, rank = x[at : at + width], rows.shape[0]
            if ratio == 1 and rank == r:  # as nearly always
                torch.sub(rows[:, piece], x[:r], out=into)
            else:
                into[:rank] = rows[:, piece]
                if ratio != 1:
                    into[:rank] *= ratio
                into[rank:] = 0
                into[:r] -= x[:r]
            at += width
        yield piece, x


def _products(
    center: Tensor | None, clients: Sequence[Tensor], ratios: Sequence[float], widths: Sequence[int]
) -> Tensor:
    """Of all these rows with each other: [P, P] float64, on the host"""
    P = (0 if center is None else len(center)) + sum(widths)
    found = torch.zeros(P, P, dtype=torch.float64, device=(clients[0] if center is None else center).device)
    step = -(-P // GROUPS)
    for _, x in chunks(center, clients, ratios, widths):
        for at in range(0, P, step):
            found[at : at + step, at:].addmm_(x[at : at + step], x[at:].T)
    found = found.cpu()
    return found.triu() + found.triu(1).T


def _sums(products: Tensor, rows: Tensor, columns: Tensor, n: int) -> Tensor:
    """[n, n]: of the products of rows and columns with such numbers. NaN stays where it is"""
    found = torch.zeros(n, len(columns), dtype=torch.float64, device="cpu").index_add_(0, rows, products)
    return torch.zeros(n, n, dtype=torch.float64, device="cpu").index_add_(1, columns, found)


def _rows_of(products: Tensor, rows: Sequence[int], more: Sequence[int] = ()) -> Tensor:
    """Products of rows[i] + more[i], where -1 is a row of zeros"""
    P = len(products)
    padded = torch.zeros(P + 1, P + 1, dtype=torch.float64, device="cpu")
    padded[:P, :P] = products
    first = _index(rows) % (P + 1)
    if not any(i >= 0 for i in more):
        return padded[first][:, first]
    second = _index(more) % (P + 1)
    half = padded[first] + padded[second]
    return half[:, first] + half[:, second]


def _index(rows: Sequence[int]) -> Tensor:
    return torch.tensor(rows, dtype=torch.int64, device="cpu")


def _rank(factors: Factors | None) -> int:
    return 0 if factors is None else factors.rank
