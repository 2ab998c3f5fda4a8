"""What a round on files says: which clients' files are at fault, and what its result says besides."""

from __future__ import annotations

import numpy as np
import pytest
from safetensors.torch import save_file

import fastagg
from fastagg import InputError
from fastagg._engine.files.job import Job
from fastagg.extend import ClientValue, GlobalAggregator, Weights
from helpers.every_method import cohort
from helpers.model_files import assert_same_model, load_model, read_round, write_raw, write_round


def test_bad_files_are_named(tmp_path):
    """With client and path, whether the file is damaged or the model of another form"""
    g, clients = cohort()
    center, paths = write_round(tmp_path / "in", g, clients)
    save_file({key: value for key, value in clients[3].items() if key != "fc.bias"}, paths[3])
    out = tmp_path / "new.safetensors"
    for call in (
        lambda: fastagg.aggregate_files("fedawa", center, paths, out),
        lambda: Job("fedawa", center, paths, out).plan(),
    ):
        with pytest.raises(fastagg.BadClientError) as caught:
            call()
        assert str(caught.value) == f"client 3 (id 'c3'): key 'fc.bias' is missing; in {paths[3]}"
        assert caught.value.reasons == {3: "key 'fc.bias' is missing"}
    write_raw(paths[1], {"x": 3})
    write_raw(paths[2], {"x": 3})
    with pytest.raises(fastagg.BadClientError) as caught:
        fastagg.aggregate_files("fedawa", center, paths, out)
    assert str(caught.value).startswith(f"client 1 (id 'c1'): {paths[1]} is not a good safetensors file")
    assert caught.value.clients == [1, 2]
    assert caught.value.reasons[2].startswith(f"{paths[2]} is not a good safetensors file")
    with pytest.raises(InputError, match="typo") as other:
        fastagg.aggregate_files("fedavg", center, [*paths, tmp_path / "typo.safetensors"], out)
    assert not isinstance(other.value, fastagg.BadClientError)
    assert not out.exists()


def test_what_a_result_says_is_said_of_files_too(tmp_path):
    class Mine(GlobalAggregator):
        name, paper = "mine", "a test"
        client_values = (ClientValue("score"),)

        def weigh(self, cohort):
            about = {"step": 0.5, "score": np.arange(cohort.K), "seconds": -1, "start": fastagg.Result()}
            return Weights(cohort.shares, about=about)

    center, paths = write_round(tmp_path / "in", *cohort())
    found = fastagg.aggregate_files(Mine(), center, paths, tmp_path / "o.safetensors")
    assert found.step == 0.5
    assert found.score.tolist() == list(range(len(paths)))
    assert found.seconds > 0
    assert not hasattr(found, "start")
    found = fastagg.aggregate_files("centred_clipping", center, paths, tmp_path / "o.safetensors")
    assert found.previous_weight == fastagg.centred_clipping(*read_round(center, paths)).previous_weight


def test_bad_files_are_left_out(tmp_path):
    """A file that is damaged, and a model of another form; neither is ever written to"""
    g, clients = cohort()
    center, paths = write_round(tmp_path / "in", g, clients)
    write_raw(paths[1], {"x": 3})
    save_file({key: value for key, value in clients[3].items() if key != "fc.bias"}, paths[3])
    keep = [0, 2, 4, 5, 6]
    expected = fastagg.fedawa(g, [clients[k] for k in keep], client_ids=[f"c{k}" for k in keep])
    out = tmp_path / "new.safetensors"
    found = fastagg.aggregate_files("fedawa", center, paths, out, on_bad_client="drop")
    assert sorted(found.dropped) == ["c1", "c3"]
    assert "is not a good safetensors file" in found.dropped["c1"]
    assert found.dropped["c3"] == "key 'fc.bias' is missing"
    assert_same_model(load_model(out), dict(expected))
    assert found.logits.shape == (7,)
    plan = Job("fedawa", center, paths, out, options={"on_bad_client": "drop"}).plan()
    assert plan["clients"] == [f"c{k}" for k in keep]
    for target, report in ((paths[1], None), (tmp_path / "x.safetensors", paths[1])):
        before = paths[1].read_bytes()
        with pytest.raises(InputError, match=r"is a client|which is used here"):
            Job("fedavg", center, paths, target, options={"on_bad_client": "drop"})._check_free(report, "the report")
        assert paths[1].read_bytes() == before
    with pytest.raises(InputError, match="typo"):
        fastagg.aggregate_files("fedavg", center, [*paths, tmp_path / "typo.safetensors"], out, on_bad_client="drop")
    for path in paths:
        write_raw(path, {"x": 3})
    with pytest.raises(InputError, match="no client is left: none of 7 files can be used"):
        fastagg.aggregate_files("fedavg", center, paths, out, on_bad_client="drop")
