"""What a user's editor shows: real signatures, real return types, and errors where names or values are wrong."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import fastagg

ROOT = Path(fastagg.__file__).parent.parent
CHECKER = Path(sys.executable).with_name("basedpyright")
REVEALED = {
    'fastagg.fedawa(g, clients, [1, 2], variant="released")': "Result",
    "fastagg.fedamp(g, clients)": "Results",
    "fastagg.fedawa(g, clients).weights": "Tensor",
    "fastagg.krum(g, clients, f=2).dropped": "Mapping[Any, str]",
    'fastagg.aggregator("fedawa", layerwise=True)': "FedAWA",
    'fastagg.aggregator("fedamp").aggregate(g, clients)': "Results",
    'fastagg.FedAWA(steps=3).aggregate(g, clients, client_ids=["a"])': "Result",
    "fastagg.methods.krum.Krum(f=1)": "Krum",
    "fastagg.gram(g, clients).cosine()": "Tensor",
    'fastagg.sim.simulate(method="fedawa")': "Run",
    'fastagg.sim.compare(["fedavg"]).plot()': "Figure",
}
REFUSED = {
    'fastagg.fedawa(g, clients, varant="paper")': 'No parameter named "varant"',
    'fastagg.FedAWA(variant="papr")': 'cannot be assigned to parameter "variant"',
    "fastagg.FedAvgM(state=3)": 'No parameter named "state"',
    "fastagg.fednova(g, clients)": 'Argument missing for parameter "local_steps"',
    "fastagg.fedavgg(g, clients)": '"fedavgg" is not a known attribute',
}


@pytest.mark.skipif(not CHECKER.exists(), reason="the type checker is not installed here (make lint)")
def test_a_users_file(tmp_path):
    lines = ["import fastagg", "import fastagg.methods.krum", "g: dict[str, object] = {}", "clients = [g]"]
    lines += [f"reveal_type({call})" for call in REVEALED] + list(REFUSED)
    (tmp_path / "user.py").write_text("\n".join(lines) + "\n")
    (tmp_path / "pyrightconfig.json").write_text(
        json.dumps({"extraPaths": [str(ROOT)], "typeCheckingMode": "standard"})
    )
    command = [CHECKER, "--outputjson", "--pythonpath", sys.executable]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    said = {}
    for entry in json.loads(done.stdout)["generalDiagnostics"]:
        said.setdefault(entry["range"]["start"]["line"], []).append(entry["message"])
    for at, kind in enumerate(REVEALED.values(), 4):
        assert re.search(rf' is "{re.escape(kind)}"$', said[at][0]), said[at]
    for at, words in enumerate(REFUSED.values(), 4 + len(REVEALED)):
        assert words in said[at][0]
    assert len(said) == len(REVEALED) + len(REFUSED)


def test_stubs_are_shipped():
    for name in ("py.typed", "__init__.pyi", "_cpu.pyi", "_cuda.pyi"):
        assert (ROOT / "fastagg" / name).exists()
        assert name in (ROOT / "pyproject.toml").read_text()
