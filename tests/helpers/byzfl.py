"""byzfl's own modules, where it is installed."""

import importlib
import sys
from importlib.util import find_spec
from types import ModuleType

import pytest


def load(name):
    """A module of byzfl without the package's __init__.py, which imports torchvision, data sets and plots; skips the
    tests of the module that calls this where there is no byzfl"""
    if "byzfl" not in sys.modules:
        if (found := find_spec("byzfl")) is None or found.submodule_search_locations is None:
            pytest.skip("byzfl is not installed", allow_module_level=True)
        sys.modules["byzfl"] = ModuleType("byzfl")
        sys.modules["byzfl"].__path__ = list(found.submodule_search_locations)
    return importlib.import_module(f"byzfl.{name}")
