"""For rounds of few clients whose Gram is not to be formed, as if they were many."""

from __future__ import annotations

from contextlib import contextmanager

import pytest

from fastagg._engine import forming


@contextmanager
def never_formed():
    """Methods that compare no pairs of clients never form a Gram, unless told to"""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(forming, "FEW", 0)
        patch.setattr(forming, "PER_CLIENT", {"cpu": 1e9, "cuda": 1e9})
        yield
