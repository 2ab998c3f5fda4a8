"""Differences of two methods on the same seeds, with a confidence interval.

A seed fixes the split, the initial model and the batches. Splits differ more than methods do, so the difference within
each seed says more than two means over seeds.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Difference:
    """By how much one exceeds the other.

    seeds       the difference of every seed that both have
    mean        of the seeds; None where there is none
    low, high   confidence interval of the mean, by Student's t; None where there are fewer than two seeds
    """

    seeds: dict[int, float]
    mean: float | None
    low: float | None
    high: float | None

    @property
    def is_clear(self) -> bool:
        """There is an interval, and 0 is not in it"""
        return self.low is not None and self.high is not None and not self.low <= 0 <= self.high


def paired(
    of: Mapping[int, float | None], to: Mapping[int, float | None], confidence: float = CONFIDENCE
) -> Difference:
    """What `of` has more than `to`, both by seed. Seeds that only one has, or where a value is missing or not finite,
    do not count."""
    if not 0 < confidence < 1:
        raise ValueError(f"confidence={confidence!r}; expected a number between 0 and 1, such as 0.95")
    seeds = {}
    for seed in of:
        a, b = of[seed], to.get(seed)
        if a is not None and b is not None and math.isfinite(a - b):
            seeds[seed] = a - b
    values, n = list(seeds.values()), len(seeds)
    mean = statistics.mean(values) if values else None
    if mean is None or n < 2:
        return Difference(seeds, mean, None, None)
    half = t_quantile((1 + confidence) / 2, n - 1) * statistics.stdev(values) / math.sqrt(n)
    return Difference(seeds, mean, mean - half, mean + half)


def t_quantile(share: float, freedom: int) -> float:
    """The value that a variable with Student's t distribution does not exceed with probability `share`"""
    try:
        from scipy.special import stdtrit
    except ImportError as error:
        raise ImportError(
            f"a confidence interval needs scipy, which cannot be imported ({error}): pip install '.[sim]' in a clone "
            "of fastagg"
        ) from error
    return float(stdtrit(freedom, share))
