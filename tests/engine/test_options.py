"""Options of methods: what their annotations allow."""

from __future__ import annotations

import math
from typing import Annotated

import numpy as np
import pytest

from fastagg.extend import GlobalAggregator, Range


class Plain(GlobalAggregator):
    name, paper = "plain", "a test"

    tau: float = 1.0
    clip: float = math.inf
    n: int = 3
    maybe: int | None = None
    most: Annotated[int, Range(high=10)] = 5
    between: Annotated[int, Range(above=0, below=4)] = 1
    free: Annotated[float, Range()] = 0.0


@pytest.mark.parametrize("option", ["tau", "n", "maybe", "most", "between", "free"])
@pytest.mark.parametrize("value", ["x", math.nan, True, np.True_, [1], 1j])
def test_what_is_no_number(option, value):
    with pytest.raises(ValueError, match=f"plain: {option}=.*; expected an? (number|integer)"):
        Plain(**{option: value})


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"n": 1.5}, "an integer"),
        ({"n": 2.0}, "an integer"),
        ({"n": None}, "an integer"),
        ({"tau": None}, "a number"),
        ({"most": 11}, "an integer <= 10"),
        ({"between": 0}, "an integer >= 1 and <= 3"),
        ({"between": 4}, "an integer >= 1 and <= 3"),
        ({"free": math.inf}, "a number"),
    ],
)
def test_what_is_out_of_range(options, expected):
    [(name, value)] = options.items()
    with pytest.raises(ValueError, match=f"^plain: {name}={value}; expected {expected}$"):
        Plain(**options)


def test_what_is_a_number():
    plain = Plain(tau=2, clip=-math.inf, n=np.int64(4), maybe=None, most=-(10**6), between=3, free=np.float32(0.5))
    assert (plain.tau, plain.n, plain.most) == (2, 4, -(10**6))
    assert Plain(tau=np.float64(0.5), maybe=7).maybe == 7
