"""The coordinate-wise median and means around it, of every element on its own.

With s_1 <= ... <= s_K the clients' values of an element:

    median         the middle value, or the mean of the middle two (Yin et al., ICML 2018)
    trimmed mean   the mean of s_{f+1} .. s_{K-f} (Yin et al., ICML 2018)
    MeaMed         the mean of the K - f values nearest to the median (Xie et al., 2018)
    Phocas         the mean of the K - f values nearest to the trimmed mean (Xie et al., 2018)

One read and no Gram: the kernel sorts the values in registers and rounds the mean once. Of two values equally far away,
the lower counts as the nearer. Data sizes are not used: a malicious client can report any size. Tensors that are not
parameters become the coordinate-wise median; integers its lower one.
"""

from __future__ import annotations

from typing import Annotated

import numpy as np

from fastagg.extend import Cohort, GlobalAggregator, InputError, Range, Weights, ranks, register


class _ByRank(GlobalAggregator):
    """What they share"""

    reads = "ranks"
    buffers = "median"
    needs_global = False

    def weigh(self, cohort: Cohort) -> Weights:
        K = cohort.K
        return Weights(np.full(K, 1 / K), ranked=self.mean(K))

    def mean(self, K: int) -> ranks.RankedMean:
        raise NotImplementedError


@register
class Median(_ByRank):
    """The coordinate-wise median: fewer than half of the clients cannot move an element out of the others' range.

    .weights are equal: every client is ranked. sizes are not used. Tensors that are not parameters become the
    coordinate-wise median as well, integers its lower one.
    """

    name = "median"
    paper = "Yin et al., ICML 2018"

    def mean(self, K: int) -> ranks.RankedMean:
        return ranks.median(K)


@register
class TrimmedMean(_ByRank):
    """The mean of each element without its f lowest and f highest values.

    f       number of clients that may be faulty or malicious; requires K > 2 f
    beta    or the share of the clients to leave out at each end, below 0.5: f is floor(beta K), then

    .weights are equal: every client is ranked. sizes are not used. Tensors that are not parameters (buffers, integers)
    become the coordinate-wise median.
    """

    name = "trimmed_mean"
    paper = "Yin et al., ICML 2018"

    f: Annotated[int, Range(0)] | None = None
    beta: Annotated[float, Range(0, below=0.5)] | None = None

    def check_options(self) -> None:
        if self.f is not None and self.beta is not None:
            raise ValueError(f"trimmed_mean: f={self.f} and beta={self.beta}; give one of them")
        if self.f is None and self.beta is None:
            self.f = 1

    @property
    def min_clients(self) -> int:
        return 1 if self.f is None else 2 * self.f + 1

    def mean(self, K: int) -> ranks.RankedMean:
        f = int(self.beta * K) if self.f is None and self.beta is not None else self.f or 0
        return ranks.trimmed(K, _checked(self.name, f, K))


class _Nearest(_ByRank):
    """Means of the values nearest to one that f clients cannot move far"""

    f: Annotated[int, Range(0)] = 1

    @property
    def min_clients(self) -> int:
        return 2 * self.f + 1


@register
class MeaMed(_Nearest):
    """The mean of the K - f values of each element that are nearest to its median.

    f       number of clients that may be faulty or malicious; requires K > 2 f

    .weights are equal: every client is ranked. sizes are not used. Tensors that are not parameters (buffers, integers)
    become the coordinate-wise median.
    """

    name = "meamed"
    paper = "Xie et al., 2018 (arXiv:1802.10116)"

    def mean(self, K: int) -> ranks.RankedMean:
        return ranks.median(K).around(K - _checked(self.name, self.f, K))


@register
class Phocas(_Nearest):
    """The mean of the K - f values of each element that are nearest to its trimmed mean.

    f       number of clients that may be faulty or malicious; requires K > 2 f

    .weights are equal: every client is ranked. sizes are not used. Tensors that are not parameters (buffers, integers)
    become the coordinate-wise median.
    """

    name = "phocas"
    paper = "Xie et al., 2018 (arXiv:1805.09682)"

    def mean(self, K: int) -> ranks.RankedMean:
        f = _checked(self.name, self.f, K)
        return ranks.trimmed(K, f).around(K - f)


def _checked(name: str, f: int, K: int) -> int:
    if 2 * f >= K:
        raise InputError(
            f"{name}: f={f} needs more than 2 f = {2 * f} clients, got {K}; the largest f possible is {(K - 1) // 2}"
        )
    return f
