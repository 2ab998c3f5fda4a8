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


class _Trimming(_ByRank):
    """Of which f clients may be bad"""

    f: Annotated[int, Range(0)] = 1

    @property
    def min_clients(self) -> int:
        return 2 * self.f + 1

    def check_clients(self, K: int) -> None:
        if self.min_clients > K:
            raise InputError(
                f"{self.name}: f={self.f} needs more than 2 f = {2 * self.f} clients, got {K}; the largest f possible "
                f"is {(K - 1) // 2}"
            )


@register
class TrimmedMean(_Trimming):
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
        if self.beta is not None:
            return ranks.trimmed(K, int(np.floor(self.beta * K)))
        assert self.f is not None
        self.check_clients(K)
        return ranks.trimmed(K, self.f)


@register
class MeaMed(_Trimming):
    """The mean of the K - f values of each element that are nearest to its median.

    f       number of clients that may be faulty or malicious; requires K > 2 f

    .weights are equal: every client is ranked. sizes are not used. Tensors that are not parameters (buffers, integers)
    become the coordinate-wise median.
    """

    name = "meamed"
    paper = "Xie et al., 2018 (arXiv:1802.10116)"

    def mean(self, K: int) -> ranks.RankedMean:
        self.check_clients(K)
        return ranks.median(K).around(K - self.f)


@register
class Phocas(_Trimming):
    """The mean of the K - f values of each element that are nearest to its trimmed mean.

    f       number of clients that may be faulty or malicious; requires K > 2 f

    .weights are equal: every client is ranked. sizes are not used. Tensors that are not parameters (buffers, integers)
    become the coordinate-wise median.
    """

    name = "phocas"
    paper = "Xie et al., 2018 (arXiv:1805.09682)"

    def mean(self, K: int) -> ranks.RankedMean:
        self.check_clients(K)
        return ranks.trimmed(K, self.f).around(K - self.f)
