"""Rounds on files: the same bits as in memory, whole outputs or none, and little memory."""

from __future__ import annotations

import json
import math
import os
import re
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import fastagg
from fastagg import InputError, NonFiniteError
from fastagg._engine.checks import byte_count
from fastagg._engine.files.job import Job
from fastagg._engine.inputs import RoundInput, read_inputs
from helpers.cohort import DTYPES, make
from helpers.every_method import IN_MEMORY, METHODS, OPTIONS, cohort, models, of_some, round_inputs
from helpers.model_files import assert_same_model, load_model, read_round, write_raw, write_round, write_shards

ON_FILES = [name for name in METHODS if name not in IN_MEMORY]
CUT = {"a.weight": (300, 401), "a.bias": (301,), "bn.running_mean": (70_000,), "b.x": (100_001,), "c.w": (64, 1024)}
IDS = [f"c{k}" for k in range(7)]


def names_of(result):
    return sorted(path.name for path in result.paths.values())


def same_numbers(found, expected):
    for name in ("weights", "mixing"):
        a, b = getattr(found, name), getattr(expected, name, None)
        assert (a is None) == (b is None)
        assert a is None or torch.equal(a, b)
    assert (found.gram is None) == (expected.gram is None)
    assert found.gram is None or torch.equal(found.gram.matrix, expected.gram.matrix)


@pytest.mark.parametrize("name", ON_FILES)
def test_every_method_gives_the_bits_of_memory(name, tmp_path):
    center, paths = write_round(tmp_path / "in", *cohort())
    sizes = [3, 1, 4, 1, 5, 9, 2]
    server = fastagg.aggregator(name, **OPTIONS[name])
    g, clients = read_round(center, paths)
    expected = server.aggregate(g, clients, sizes, IDS, **round_inputs(name))
    options = OPTIONS[name] | round_inputs(name)
    specs = {spec.name: spec for spec in server.round_inputs}
    job = Job(name, center, paths[::-1], tmp_path / "out", sizes=dict(zip(IDS, sizes, strict=True)), options={
        key: of_some(specs[key], value, range(len(IDS))[::-1]) if key in specs else value
        for key, value in options.items()
    })  # fmt: skip
    planned = job.plan()
    found = job.run()
    assert found.passes == planned["passes"]
    assert list(found.dropped) == []
    assert found.clients == IDS[::-1]
    if server.produces == "personalised":
        found.paths = {client: found.paths[client] for client in IDS}
    if server.produces == "clusters":
        listed = json.loads((tmp_path / "out" / "clusters.json").read_text())
        assert listed == {f"cluster-{m}": members for m, members in enumerate(expected.clusters)}
    for path, model in zip(found.paths.values(), models(expected), strict=True):
        assert_same_model(load_model(path), dict(model))
    for attribute, axes in (("weights", (-1,)), ("mixing", (-1,) if server.produces == "clusters" else (-2, -1))):
        value = getattr(found, attribute)
        if value is not None:
            assert torch.equal(value.flip(axes), getattr(expected, attribute))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bits_do_not_depend_on_where_slabs_are_cut(dtype, tmp_path):
    center, paths = write_round(tmp_path / "in", *make(5, CUT, dtype))
    g, clients = read_round(center, paths)
    rounds = [("fedawa", {}), ("fedawa", {"layerwise": True, "variant": "paper"})]
    if dtype == torch.float32:
        rounds += [("fedavg", {}), ("fedamp", {})]
    for name, options in rounds:
        expected = fastagg.aggregator(name, **options).aggregate(g, clients, client_ids=IDS[:5])
        for memory in (50_000, 5_000_000, 10**9):
            steps = []
            job = Job(name, center, paths, tmp_path / "out", memory=memory, options=options)
            found = job.run(progress=lambda *step, steps=steps: steps.append(step))
            assert len(steps) == sum(job.plan()["slabs"])
            assert len(steps) == found.passes if memory == 10**9 else len(steps) > 2 * found.passes
            assert steps[-1][1] == steps[-1][2]
            same_numbers(found, expected)
            for path, model in zip(found.paths.values(), models(expected), strict=True):
                assert_same_model(load_model(path), dict(model))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_medians_of_buffers(dtype, tmp_path):
    """In several slabs; and clients without data set no integers"""
    g, clients = make(5, CUT, dtype)
    for k, sd in enumerate((g, *clients)):
        sd["bn.num_batches_tracked"] = torch.tensor(k if k != 2 else 2**62)
    clients[1]["bn.running_mean"][:] = 6e4
    center, paths = write_round(tmp_path / "in", g, clients)
    g, clients = read_round(center, paths)
    for name, options in (("krum", {"f": 1}), ("geometric_median", {}), ("centred_clipping", {}), ("fedavg", {})):
        sizes = [1, 0, 2, 3, 4]
        expected = fastagg.aggregator(name, **options).aggregate(g, clients, sizes, IDS[:5])
        assert expected["bn.num_batches_tracked"] < 10
        for memory in (400_000, 10**9):
            found = fastagg.aggregate_files(
                name, center, paths, tmp_path / "o.safetensors", sizes=sizes, memory=memory, **options
            )
            same_numbers(found, expected)
            assert_same_model(load_model(found.paths["o"]), dict(expected))
            assert found.passes == (1 if name == "fedavg" else 2)
    clients[3]["bn.running_mean"][-1] = math.nan
    center, paths = write_round(tmp_path / "in", g, clients)
    with pytest.raises(fastagg.NonFiniteError, match=r"client 3 \(id 'c3'\): key 'bn.running_mean'"):
        fastagg.aggregate_files("krum", center, paths, tmp_path / "o.safetensors", memory=400_000)
    found = fastagg.aggregate_files("krum", center, paths, tmp_path / "o.safetensors", f=0, on_bad_client="drop")
    expected = fastagg.krum(g, clients[:3] + clients[4:], f=0)
    assert list(found.dropped) == ["c3"]
    assert_same_model(load_model(found.paths["o"]), dict(expected))


def test_clients_that_agree_with_each_other(tmp_path):
    """Their distances take one more read, of the files too."""
    g, clients = make(5, CUT, scale=1e-5)
    g = {key: value + 0.3 for key, value in g.items()}
    center, paths = write_round(tmp_path / "in", g, clients)
    g, clients = read_round(center, paths)
    for name in ("krum", "geometric_median", "simagg"):
        expected = fastagg.aggregator(name).aggregate(g, clients, client_ids=IDS[:5])
        found = fastagg.aggregate_files(name, center, paths, tmp_path / "o.safetensors", memory=5_000_000)
        same_numbers(found, expected)
        assert_same_model(load_model(found.paths["o"]), dict(expected))
        assert found.passes == 3


def test_a_previous_aggregate_is_for_models_in_memory(tmp_path):
    center, paths = write_round(tmp_path / "in", *make(3, CUT))
    with pytest.raises(fastagg.InputError, match="center='previous' keeps an update in memory"):
        fastagg.aggregate_files("centred_clipping", center, paths, tmp_path / "o.safetensors", center="previous")


def test_the_reference_backend_gives_the_same_to_rounding(tmp_path):
    center, paths = write_round(tmp_path / "in", *make(3, CUT))
    expected = fastagg.aggregate_files("fedawa", center, paths, tmp_path / "a.safetensors", variant="paper")
    fastagg.set_backend("reference")
    found = fastagg.aggregate_files(
        "fedawa", center, paths, tmp_path / "b.safetensors", variant="paper", memory=2_000_000
    )
    np.testing.assert_allclose(found.weights, expected.weights, rtol=1e-6)
    a, b = load_file(tmp_path / "a.safetensors"), load_file(tmp_path / "b.safetensors")
    for key in a:
        torch.testing.assert_close(a[key], b[key])


def test_sharded_folders_and_adapters(tmp_path):
    g, clients = make(3, {f"h.{i}.lora_A.weight": (4, 10 + i) for i in range(5)})
    center, paths = write_round(tmp_path / "in", g, clients)
    index = write_shards(tmp_path / "global", g, 3)
    folders = [write_shards(tmp_path / f"c{k}", sd, 2).parent for k, sd in enumerate(clients)]
    one = fastagg.aggregate_files("simprox", center, paths, tmp_path / "a.safetensors")
    two = fastagg.aggregate_files("simprox", index, folders, tmp_path / "b.safetensors")
    assert two.clients == ["c0", "c1", "c2"]
    assert torch.allclose(one.weights, two.weights, rtol=1e-12)  # the layers' order is that of the files
    a, b = load_model(one.paths["a"]), load_model(two.paths["b"])
    for key in a:
        torch.testing.assert_close(a[key], b[key], rtol=1e-7, atol=1e-9)


def test_metadata_says_how_a_model_came_about(tmp_path):
    g, clients = cohort()
    center, paths = write_round(tmp_path / "in", g, clients)
    save_file(g, center, {"format": "pt", "licence": "free", "fastagg.method": "old"})
    found = fastagg.aggregate_files("fedawa", center, paths, tmp_path / "new.safetensors", layerwise=True, steps=2)
    with safe_open(tmp_path / "new.safetensors", "pt") as file:
        said = file.metadata()
    assert said["licence"] == "free"
    assert said["format"] == "pt"
    assert said["fastagg.method"] == "fedawa"
    assert said["fastagg.version"] == fastagg.__version__
    assert json.loads(said["fastagg.options"]) == {"layerwise": True, "steps": 2}
    assert json.loads(said["fastagg.clients"]) == IDS
    assert json.loads(said["fastagg.weights"]) == found.weights.tolist()
    assert json.loads(said["fastagg.layers"]) == list(found.layers)


def bad_round(tmp_path):
    g, clients = make(5, CUT)
    clients[1]["b.x"][77_000] = float("nan")
    clients[3]["bn.running_mean"][3] = float("inf")
    return write_round(tmp_path / "in", g, clients)


@pytest.mark.parametrize("name", ["fedavg", "fedawa", "simprox", "fedamp"])
def test_clients_that_are_not_finite(name, tmp_path):
    center, paths = bad_round(tmp_path)
    g, clients = read_round(center, paths)
    out = tmp_path / "out"
    with pytest.raises(NonFiniteError) as said:
        fastagg.aggregate_files(name, center, paths, out, memory=2_000_000)
    with pytest.raises(NonFiniteError) as in_memory:
        fastagg.aggregator(name).aggregate(g, clients, client_ids=IDS[:5])
    files = ", ".join(str(paths[k]) for k in in_memory.value.clients)
    assert str(said.value) == f"{in_memory.value}; in {files}"
    assert said.value.reasons == in_memory.value.reasons
    assert os.listdir(out) == [] if out.exists() else True
    expected = fastagg.aggregator(name, on_bad_client="drop").aggregate(g, clients, client_ids=IDS[:5])
    found = fastagg.aggregate_files(name, center, paths, out, on_bad_client="drop", memory=2_000_000)
    assert found.dropped == expected.dropped
    assert list(found.dropped) == ["c1", "c3"]
    same_numbers(found, expected)
    good = [model for model in models(expected) if model is not None]
    for path, model in zip(found.paths.values(), good, strict=True):
        assert_same_model(load_model(path), dict(model))
    assert sorted(os.listdir(out)) == names_of(found)


def test_state_is_carried_from_round_to_round(tmp_path):
    for name, options in (("fedawa", {"layerwise": True}), ("fedadam", {})):
        server, state = fastagg.aggregator(name, **options), tmp_path / f"{name}.state"
        for seed in (0, 1, 2):
            center, paths = write_round(tmp_path / "in", *cohort(seed=seed))
            g, clients = read_round(center, paths)
            expected = server.aggregate(g, clients, client_ids=IDS)
            found = fastagg.aggregate_files(name, center, paths, tmp_path / "o.safetensors", state=state, **options)
            assert_same_model(load_model(found.paths["o"]), dict(expected))
        before = state.read_bytes()
        state.write_bytes(before[:-3])
        content = (tmp_path / "o.safetensors").read_bytes()
        with pytest.raises(InputError, match=rf"{name}\.state"):
            fastagg.aggregate_files(name, center, paths, tmp_path / "o.safetensors", state=state, **options)
        assert (tmp_path / "o.safetensors").read_bytes() == content


@pytest.mark.parametrize("options", [{"momentum": 0.0}, {"lr": 0.7}], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_mean_updates_of_sixteen_bit_models(dtype, options, tmp_path):
    in_memory, on_files = (fastagg.aggregator("fedavgm", **options) for _ in range(2))
    for seed in (0, 1):
        center, paths = write_round(tmp_path / "in", *make(3, CUT, dtype, seed=seed))
        g, clients = read_round(center, paths)
        expected = in_memory.aggregate(g, clients, client_ids=IDS[:3])
        found = fastagg.aggregate_files(on_files, center, paths, tmp_path / "o.safetensors", memory=6_000_000)
        assert found.passes == 2
        assert_same_model(load_model(found.paths["o"]), dict(expected))
    for key, moment in in_memory.state_dict()["m"].items():
        assert moment.dtype == torch.float32
        assert torch.equal(moment, on_files.state_dict()["m"][key])


@pytest.mark.parametrize("name", ON_FILES)
def test_an_aggregator_forgets_a_round_whose_model_was_not_written(name, tmp_path, monkeypatch):
    center, paths = write_round(tmp_path / "in", *cohort())
    server = fastagg.aggregator(name, **OPTIONS[name])
    before = str(server.state_dict())
    monkeypatch.setattr("os.fsync", lambda fd: (_ for _ in ()).throw(OSError(28, "no space left")))
    with pytest.raises(OSError, match="no space left"):
        fastagg.aggregate_files(server, center, paths, tmp_path / "out", **round_inputs(name))
    assert str(server.state_dict()) == before
    assert os.listdir(tmp_path / "out") == []
    monkeypatch.undo()
    fastagg.aggregate_files(server, center, paths, tmp_path / "out", **round_inputs(name))


def test_what_is_refused_before_anything_is_read(tmp_path):
    g, clients = make(3, CUT)
    center, paths = write_round(tmp_path / "in", g, clients)
    out = tmp_path / "new.safetensors"

    def refused(says, method="fedawa", clients=paths, target=out, error=InputError, start=center, **options):
        with pytest.raises(error, match=says):
            fastagg.aggregate_files(method, start, clients, target, **options)
        assert not out.exists()

    refused("no file was given", clients=[])
    refused("one path", clients=str(paths[0]))
    refused("needs the global model", start=None)
    refused("both client 'c0'", clients=[paths[0], paths[0]])
    refused("learns on proxy data", method="fedlaw")
    refused("name a folder", method="fedamp")
    refused("there is no folder", target=tmp_path / "none" / "x.safetensors")
    refused("is not a folder", target=center / "x")
    refused("no such folder", state=tmp_path / "none" / "x.state")
    refused("no option 'stepz'", error=TypeError, stepz=1)
    refused("memory='lots'", error=ValueError, memory="lots")
    refused("none for client 'c1'", sizes={"c0": 1})
    refused("'d9' is not a client", sizes={"c0": 1, "c1": 1, "c2": 1, "d9": 1})
    refused("keeps tensors of the model's size in memory", method="fedadam", memory="1MB")
    refused("allow more memory", layerwise=True, memory=100)
    refused("cannot be the name of a file", method="fedamp", target=tmp_path / "p", client_ids=["a", "../b", "c"])
    refused("has 2 entries for 3", client_ids=["a", "b"])
    save_file({**clients[1], "more": torch.ones(1)}, paths[1])
    refused(r"'c1'\): key 'more' is not in the model")
    write_raw(paths[1], {"x": 3})
    refused(r"c1\.safetensors is not a good safetensors file")
    assert os.listdir(tmp_path) == ["in"]


def test_numbers_by_client_and_sizes_in_words():
    def read(given, axis=0):
        return read_inputs("m", [RoundInput("x", client_axis=axis, entry_dims=None)], {"x": given}, ["a", "b"])

    assert read({"b": [3, 4], "a": [1, 2]}, -1)[0]["x"].tolist() == [[1, 3], [2, 4]]
    assert read([1, 2])[0]["x"].tolist() == [1, 2]
    assert read({"a": [1], "b": "no"})[1] == {1: "its entry in x is 'no', expected finite numbers"}
    for given, message in (({"a": 1}, "x: there is none for client 'b'"), ({"a": 1, "b": 2, "c": 3}, "'c' is not a")):
        with pytest.raises(InputError, match=message):
            read(given)
    words = {"500MB": 5e8, "2 GB": 2e9, "1e9": 1e9, "10k": 1e4, 12: 12, "1.5GiB": 1.5e9}
    assert {key: byte_count("m", key) for key in words} == words
    for bad in ("", "GB", "-1", "1 apple", None, 0, "1e99"):
        with pytest.raises(ValueError, match="m="):
            byte_count("m", bad)


def test_memory_stays_small_whatever_the_models_size(tmp_path):
    K, numel = 4, 16_000_000  # 64 MB each
    form = {f"layers.{i}.weight": torch.Size([numel // 8]) for i in range(8)}
    header = fastagg._engine.saved.header([(key, torch.float32, shape) for key, shape in form.items()], {})
    for k, name in enumerate(("global", *(f"c{k}" for k in range(K)))):
        values = torch.arange(numel, dtype=torch.float32).mul_(1e-7).add_(k % 3)
        (tmp_path / f"{name}.safetensors").write_bytes(header + values.numpy().tobytes())
    paths = [tmp_path / f"c{k}.safetensors" for k in range(K)]
    tiny, small = write_round(tmp_path / "small", *make(K, CUT))
    fastagg.aggregate_files("simprox", tiny, small, tmp_path / "x.safetensors")  # threads and their buffers exist now

    def resident():
        status = Path("/proc/self/status").read_text()
        return np.array([int(re.search(rf"{kind}:\s+(\d+)", status)[1]) << 10 for kind in ("RssAnon", "RssFile")])

    before, peak, stop = resident(), resident(), threading.Event()

    def watch():
        nonlocal peak
        while not stop.wait(0.002):
            peak = np.maximum(peak, resident())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        found = fastagg.aggregate_files(
            "simprox", tmp_path / "global.safetensors", paths, tmp_path / "x.safetensors", memory="100MB"
        )
    finally:
        time.sleep(0.01)
        stop.set()
        watcher.join()
    assert found.bytes_read > 500e6
    anonymous, mapped = peak - before
    assert anonymous < 20e6, anonymous  # a single model is 64 MB
    assert 20e6 < anonymous + mapped < 100e6, mapped
