"""Minimum diameter averaging (El Mhamdi et al., PODC 2020, after Rousseeuw, 1985): the K - f clients closest together.

    S = argmin over sets of K - f clients of max_{i, j in S} ||w_i - w_j||,      new model: the mean of S

A set of diameter t is what is left when f clients are removed, at most, such that no two of the rest are further apart
than t. Which to remove is the vertex cover of a graph, whose edges are the pairs further apart than t; for a small f it
is found by a short search, however many clients there are. The smallest t is found by bisection.
"""

from __future__ import annotations

import numpy as np

from fastagg.extend import Cohort, Weights, register
from fastagg.methods.honest_majority import HonestMajority, in_the_middle, mean_of, nearest

STEPS = 20_000  # of the search in a round: a third of a second with 100 clients, about one with 300


@register
class MDA(HonestMajority):
    """The plain mean of the K - f client models that have the smallest diameter.

    f           number of clients that may be faulty or malicious; requires K >= 2 f + 1

    .weights are 1 / (K - f) for those clients and 0 for the others; sizes are not used. Of several sets with the
    smallest diameter it is the one with the first clients. .exact says whether it was found; if the search takes more
    than 20,000 steps, as with f=40 of 100 clients that are random points, the mean is of the K - f clients nearest to
    the one that these are nearest to. Their diameter is at most twice the smallest.
    Tensors that are not parameters (buffers, integers) become the coordinate-wise median over all clients.
    """

    name = "mda"
    paper = "El Mhamdi et al., PODC 2020; Rousseeuw, 1985"

    def weights_from(self, D: np.ndarray, cohort: Cohort) -> Weights:
        chosen, exact = smallest_diameter(D, self.f)
        return Weights(mean_of(chosen, cohort.K), only_used=True, about={"exact": exact})


def smallest_diameter(D: np.ndarray, f: int, steps: int = STEPS) -> tuple[np.ndarray, bool]:
    """The first of the sets of K - f clients with the smallest diameter, from squared distances [K, K]; and True. Where
    they are not found in so many steps, clients that are within twice that diameter, and False."""
    K, m = len(D), len(D) - f
    ball = nearest(D, in_the_middle(D, m), m)
    reach = np.sort(np.sort(D, axis=1)[:, m - 1])[m - 1]  # m clients have m - 1 others in it, at least
    widths = np.unique(D[(reach <= D) & (D[np.ix_(ball, ball)].max() >= D)])
    search = _Search(steps)
    try:
        low, high = 0, len(widths) - 1
        while low < high:
            middle = (low + high) // 2
            if search.can_clear(_beyond(D, widths[middle]), (1 << K) - 1, f):
                high = middle
            else:
                low = middle + 1
        return np.array(search.first_left(_beyond(D, widths[low]), K, f)), True
    except _TooLongError:
        return np.sort(ball), False


def _beyond(D: np.ndarray, width: float) -> list[int]:
    """For each client the set of those further away than this. A set is an integer, of which bit k is client k."""
    return [sum(1 << int(k) for k in np.flatnonzero(row > width)) for row in D]


class _TooLongError(Exception):
    """The search has taken all its steps"""


class _Search:
    def __init__(self, steps: int) -> None:
        self.steps = steps

    def first_left(self, far: list[int], K: int, f: int) -> list[int]:
        """The first K - f clients that can be left when f are removed and no two that are far apart remain"""
        left, kept = (1 << K) - 1, []
        for k in range(K):
            if not left >> k & 1:
                continue
            without = left & ~far[k]
            removed = K - without.bit_count()
            if removed <= f and self.can_clear(far, without, f - removed):
                left, kept = without, [*kept, k]
            else:
                left &= ~(1 << k)
        return kept[: K - f]

    def can_clear(self, far: list[int], left: int, most: int) -> bool:
        """Whether no two clients that are far apart remain of these when some are removed, at most so many"""
        while True:
            self.steps -= 1
            if self.steps < 0:
                raise _TooLongError
            degrees = {k: count for k in _members(left) if (count := (far[k] & left).bit_count())}
            if not degrees:
                return True
            k = max(degrees, key=degrees.__getitem__)
            if sum(degrees.values()) > 2 * most * degrees[k]:  # each removal clears no more than that many pairs
                return False
            if degrees[k] <= 2:
                return self._in_paths(far, left, degrees) <= most
            if degrees[k] <= most and self.can_clear(far, left & ~far[k], most - degrees[k]):
                return True  # it stays, and all that are far from it go
            left, most = left & ~(1 << k), most - 1

    def _in_paths(self, far: list[int], left: int, degrees: dict[int, int]) -> int:
        """How many have to go where nobody is far from more than two: of a path of n half, of a circle rounded up"""
        needed, seen = 0, 0
        for start in sorted(degrees, key=degrees.__getitem__):  # ends of paths first
            length, at = 0, start
            while at >= 0 and not seen >> at & 1:
                seen, length = seen | 1 << at, length + 1
                ahead = far[at] & left & ~seen
                at = ahead.bit_length() - 1
            needed += length // 2 if degrees[start] == 1 else (length + 1) // 2
        return needed


def _members(clients: int) -> list[int]:
    found = []
    while clients:
        found.append((clients & -clients).bit_length() - 1)
        clients &= clients - 1
    return found
