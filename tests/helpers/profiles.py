"""How many cases the property and fuzz tests generate.

    ci        the default: the same cases every time
    nightly   FASTAGG_HYPOTHESIS=nightly: other cases every time, and many more

The profiles are used by name, not loaded: the settings of other tests stay what they are.
"""

from __future__ import annotations

import functools
import os
from collections import Counter

from hypothesis import HealthCheck, given, settings

PROFILE = os.environ.get("FASTAGG_HYPOTHESIS", "ci")
_slow = [HealthCheck.too_slow, HealthCheck.data_too_large]
settings.register_profile("ci", deadline=None, derandomize=True, database=None, suppress_health_check=_slow)
settings.register_profile("nightly", deadline=None, print_blob=True, suppress_health_check=_slow)

generated: Counter[str] = Counter()  # cases that ran to their end, by module


def cases(ci: int, nightly: int, **strategies):
    """Hypothesis's given(**strategies), with so many cases in each profile, for each of pytest's parameters"""

    def decorate(test):
        @functools.wraps(test)
        def counted(*args, **kwargs):
            test(*args, **kwargs)
            generated[test.__module__] += 1

        number = {"ci": ci, "nightly": nightly}[PROFILE]
        return settings(settings.get_profile(PROFILE), max_examples=number)(given(**strategies)(counted))

    return decorate


def check_number_of_cases(request, module: str, nightly: int) -> None:
    """The last test of a module calls this: a whole nightly run says how many cases there were, and has so many"""
    if PROFILE != "nightly" or request.config.option.keyword or request.session.testsfailed:
        return
    with request.getfixturevalue("capsys").disabled():
        print(f" {module}: {generated[module]:,} cases")
    assert generated[module] >= nightly
