"""Rounds in a forked child, whose parent used torch's threads: in the child these are gone."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from helpers import environment

SCRIPT = """
import os, signal, sys, torch, fastagg

torch.set_num_threads(2)
torch.manual_seed(0)
g = {"fc.weight": torch.randn(4, 50_000), "fc.running_mean": torch.randn(100_000)}  # torch asks its threads for help
clients = [{k: v + 0.01 * torch.randn_like(v) for k, v in g.items()} for _ in range(4)]
narrow = lambda sd: {k: v.bfloat16() for k, v in sd.items()}
update = lambda sd: {k: v - g[k] for k, v in sd.items()}
sent = {
    "models": [{"model": sd} for sd in clients],
    "narrow": [{"model": narrow(sd)} for sd in clients],
    "updates": [{"update": update(sd)} for sd in clients],
    "both": [{"update": narrow(update(sd))} if k % 2 else {"model": sd} for k, sd in enumerate(clients)],
}
clipping = {"center": "previous"}  # which wants whole models
methods = {"fedawa": {}, "median": {}, "centred_clipping": clipping, "fedavg": {}, "fedadam": {}}
ways = [(name, what, {"memory": memory}) for name in list(methods)[:3] for what in sent for memory in (None, 1)]
ways += [(name, what, {"running": True}) for name in ("fedavg", "fedadam") for what in sent]
(torch.randn(1_000_000) + 1).exp().sum()  # the threads are there now
for name, what, options in ways:
    child = os.fork()
    if not child:
        signal.alarm(60)
        with fastagg.aggregator(name, **methods[name]).round(g, **options) as round:
            for k, client in enumerate(sent[what]):
                round.add(k, **client)
            round.finish()
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        sys.exit(f"{name}, {what}, {options} hangs or fails in a forked child")
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_rounds_do_not_hang_after_a_fork():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, env=environment())
    assert done.returncode == 0, done.stderr
