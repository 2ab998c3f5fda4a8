"""Every method in a forked child, whose parent used torch's threads: in the child these are gone."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from helpers import environment

SCRIPT = """
import os, signal, sys, torch, fastagg
from helpers.every_method import METHODS, OF_EXAMPLE_NET, OPTIONS, round_inputs

torch.set_num_threads(2)
torch.manual_seed(0)
# more than 32,768 elements in a tensor, in the buffers, and in the Grams of all layers: torch asks its threads for help
g = {"fc.weight": torch.randn(4, 20_000), "fc.running_mean": torch.randn(40_000)}
g |= {f"layer{i}.weight": torch.randn(20) for i in range(100)}
clients = [{k: v + 0.01 * torch.randn_like(v) for k, v in g.items()} for _ in range(20)]
halves = [{k: v.bfloat16() for k, v in sd.items()} for sd in (g, *clients)]
(torch.randn(1_000_000) + 1).exp().sum()  # the threads are there now

rounds = [(name, OPTIONS[name], g, clients) for name in METHODS if name not in OF_EXAMPLE_NET]
rounds += [("fedawa", {"layerwise": True}, g, clients), ("fedadam", {}, halves[0], halves[1:])]
work = {
    f"{name} {options}": lambda name=name, options=options, start=start, models=models: fastagg.aggregator(
        name, **options
    ).aggregate(start, models, **round_inputs(name, 20))
    for name, options, start, models in rounds
}
A = torch.randn(10, 4_000)
adapters = [{"m.lora_A.weight": A.clone(), "m.lora_B.weight": torch.randn(4_000, 10)} for _ in range(4)]
for form in ("rank", "exact", "frozen_a", "separate"):
    work[f"adapters {form}"] = lambda form=form: fastagg.lora.aggregate(adapters[0], adapters[1:], form=form)
for name, job in work.items():
    child = os.fork()
    if not child:
        signal.alarm(600)
        job()
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        sys.exit(f"{name} hangs or fails in a forked child")
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_methods_do_not_hang_after_a_fork():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, env=environment())
    assert done.returncode == 0, done.stderr
