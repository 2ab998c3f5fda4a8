"""The statistics of benchmarks.compare, on made-up times."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("rich")
from benchmarks.compare import compare


def pairs(ratio: float, noise: float, rounds: int = 30) -> tuple[np.ndarray, np.ndarray]:
    """Times of base and now: noise of their own on each, and slow moments that hit a whole pair"""
    rng = np.random.default_rng(1)
    machine = 0.05 * np.exp(rng.exponential(0.5, rounds))
    base, now = machine * np.exp(rng.normal(0, noise, (2, rounds)))
    return base, now * ratio


@pytest.mark.parametrize(
    ("ratio", "noise", "verdict"),
    [
        (1.2, 0.02, "slower"),
        (0.8, 0.02, "faster"),
        (1.0, 0.02, "same"),
        (1.03, 0.001, "same"),  # certain, but below the threshold
        (0.97, 0.001, "same"),
    ],
)
def test_verdict(ratio, noise, verdict):
    r = compare(*pairs(ratio, noise))
    assert r.verdict == verdict
    assert r.low <= r.ratio <= r.high
    assert r.ratio == pytest.approx(ratio, rel=4 * noise)


def test_noise_gives_no_verdict():
    """A ratio beyond the threshold is not enough when its interval holds 1."""
    rng = np.random.default_rng(2)
    base = np.full(16, 0.1)
    now = 0.1 * np.exp(np.array([0.5, -0.4] * 8) + rng.normal(0.08, 0.01, 16))
    for r in (compare(base, now), compare(now, base)):
        assert not 1 / 1.05 < r.ratio < 1.05
        assert r.low < 1 < r.high
        assert r.verdict == "same"


def test_slow_moments_cancel_in_pairs():
    """The machine's speed drifts threefold during the run, far more than the 10 % that are found."""
    machine = 0.05 * np.linspace(1, 3, 30)
    r = compare(machine, 1.1 * machine)
    assert (r.verdict, r.low, r.high) == ("slower", pytest.approx(1.1), pytest.approx(1.1))


def test_one_outlier_does_not_decide():
    base, now = pairs(1.0, 0.01)
    now[3] *= 50
    assert compare(base, now).verdict == "same"


def test_threshold_is_the_callers():
    base, now = pairs(1.08, 0.001)
    assert compare(base, now).verdict == "slower"
    assert compare(base, now, threshold=1.1).verdict == "same"
    assert compare(now, base, threshold=1.1).verdict == "same"


def test_medians_and_repeatability():
    base, now = pairs(1.2, 0.05)
    r = compare(base, now)
    assert (r.base, r.now) == (pytest.approx(np.median(base)), pytest.approx(np.median(now)))
    assert r == compare(base, now)
