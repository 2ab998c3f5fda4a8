"""partial=True on models in files: as in memory, bit for bit."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

import fastagg
from fastagg.cli import main
from helpers.model_files import assert_same_model, read_round, write_round
from helpers.partial import partial_cohort

SIZES = [3.0, 1.0, 4.0, 1.5, 9.0, 2.0, 6.0]


@pytest.fixture
def files(tmp_path):
    return write_round(tmp_path / "round", *partial_cohort(dtype=torch.float32))


@pytest.mark.parametrize(("name", "memory"), [
    *((name, "1GB") for name in ("fedavg", "fedawa", "ldawa", "krum", "fedadam", "fedamp")),
    *((name, 8000) for name in ("fedavg", "fedawa", "krum", "fedamp")),
])  # fmt: skip
def test_as_in_memory(files, tmp_path, name, memory):
    center, paths = files
    out = tmp_path / "out" if name == "fedamp" else tmp_path / "new.safetensors"
    found = fastagg.aggregate_files(name, center, paths, out, sizes=SIZES, memory=memory, partial=True)
    ids = [path.stem for path in paths]
    expected = getattr(fastagg, name)(*read_round(center, paths), SIZES, client_ids=ids, partial=True)
    for path, model in zip(found.paths.values(), expected if name == "fedamp" else [expected], strict=True):
        assert_same_model(load_file(path), dict(model))
    if name == "fedavg":  # one read of what clients have, the global model, and counters again
        size = sum(t.nbytes for path in (center, *paths) for t in load_file(path).values())
        assert size <= found.bytes_read <= size + 8 * len(paths)
    if name != "fedamp":
        assert torch.equal(found.weights, expected.weights)
        assert torch.equal(found.contributions, expected.contributions)


def test_the_command(files, tmp_path, capsys):
    center, paths = files
    out, report = tmp_path / "new.safetensors", tmp_path / "report"
    given = ["aggregate", "--method", "fedavg", "--opt", "partial=true", "--global", center, *paths, "-o", out]
    given = [*map(str, given)]
    assert main([*given, "--dry-run"]) == 0
    assert main([*given, "--report", str(report)]) == 0
    expected = fastagg.fedavg(*read_round(center, paths), partial=True)
    assert_same_model(load_file(out), dict(expected))
    said = json.loads((report / "report.json").read_text())
    gram = fastagg.gram(*read_round(center, paths), partial=True)
    torch.testing.assert_close(torch.tensor(said["norms"], dtype=torch.float64), gram.norms())
    assert main(given[:3] + given[5:]) == 1
    assert "is missing" in capsys.readouterr().err
