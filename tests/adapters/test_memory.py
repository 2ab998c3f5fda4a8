"""B A is never formed: not of a client, not of the sum."""

from __future__ import annotations

import re
import threading
import time
from pathlib import Path

import pytest
import torch

import fastagg
from helpers.adapters import adapter, cohort

SHAPES = {"m": (20_000, 20_000)}  # 1.6 GB in float32
FORMS = ("rank", "exact", "separate")


def resident():
    return int(re.search(r"RssAnon:\s+(\d+)", Path("/proc/self/status").read_text())[1]) << 10


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_memory_stays_that_of_the_factors(form, dtype):
    fastagg.lora.aggregate(*cohort(3), form=form)  # threads and their buffers exist now
    g, *clients = (adapter(8, SHAPES, dtype, seed=k) for k in range(5))
    before = peak = resident()
    stop = threading.Event()

    def watch():
        nonlocal peak
        while not stop.wait(0.001):
            peak = max(peak, resident())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        result = fastagg.lora.aggregate(g, clients, form=form)
    finally:
        time.sleep(0.01)
        stop.set()
        watcher.join()
    assert peak - before < 100e6, peak - before  # in float64, all five adapters have 13 MB
    assert len(result) == 2
