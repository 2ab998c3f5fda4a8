"""New models take their place whole or not at all, whatever happens meanwhile."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest
import torch
from cohort import make
from model_files import assert_same_model, load_model, read_round, write_round, write_shards
from safetensors.torch import load_file

import fastagg
from fastagg import InputError
from fastagg import table as tables
from fastagg.disk.mapped import open_model
from fastagg.disk.slabs import slabs_of

CUT = {"a.weight": (300, 401), "a.bias": (301,), "bn.running_mean": (70_000,), "b.x": (100_001,), "c.w": (64, 1024)}


def test_shards_replace_shards_and_single_files(tmp_path):
    center, paths = write_round(tmp_path / "in", *make(3, CUT))
    expected = dict(fastagg.fedavg(*read_round(center, paths)))
    out = tmp_path / "m"
    seen = []
    for shard_size in ("5GB", "300KB", "300KB", "300KB", "500KB", "5GB"):
        found = fastagg.aggregate_files("fedavg", center, paths, out, shard_size=shard_size)
        assert_same_model(load_model(found.paths["model"]), expected)
        seen.append(sorted(os.listdir(out)))
        assert_same_model(open_model(out).tensors, expected)
    shards = [f"model-{i:05}-of-00005.safetensors" for i in range(1, 6)]
    assert seen[0] == seen[5] == ["model.safetensors"]
    assert seen[1] == seen[3] == [*shards, "model.safetensors.index.json"]
    assert seen[2] == [*(name.replace("model-", "model-b-") for name in shards), "model.safetensors.index.json"]
    assert len(seen[4]) == 5
    index = fastagg.aggregate_files("fedavg", center, paths, tmp_path / "x.safetensors", shard_size=1).paths["x"]
    assert index.name == "x.safetensors.index.json"
    assert json.loads(index.read_text())["metadata"]["total_size"] == sum(t.nbytes for t in expected.values())


def test_a_crash_between_the_renames_leaves_the_former_model(tmp_path, monkeypatch):
    center, paths = write_round(tmp_path / "in", *make(3, CUT))
    out = tmp_path / "m"
    fastagg.aggregate_files("fedavg", center, paths[:2], out, shard_size="300KB")
    former = load_model(out / "model.safetensors.index.json")

    def stop(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("fastagg.files.write_json", stop)
        with pytest.raises(KeyboardInterrupt):
            fastagg.aggregate_files("fedavg", center, paths, out, shard_size="300KB")
    assert len(os.listdir(out)) == 11  # the shards of both
    assert_same_model(load_model(out / "model.safetensors.index.json"), former)
    fastagg.aggregate_files("fedavg", center, paths, out, shard_size="300KB")
    assert len(os.listdir(out)) == 6
    assert_same_model(
        load_model(out / "model.safetensors.index.json"), dict(fastagg.fedavg(*read_round(center, paths)))
    )


KILLED = """
import os, sys, fastagg
def die(*_): os.kill(os.getpid(), 9)
fastagg.aggregate_files("fedavg", sys.argv[1], sys.argv[3:], sys.argv[2], memory=2_000_000, progress=die)
"""


def test_a_process_that_is_killed_leaves_the_former_model(tmp_path):
    center, paths = write_round(tmp_path / "in", *make(3, CUT))
    out = tmp_path / "out" / "x.safetensors"
    out.parent.mkdir()
    fastagg.aggregate_files("fedavg", center, paths[:2], out)
    former = out.read_bytes()
    done = subprocess.run([sys.executable, "-c", KILLED, center, out, *paths], check=False)
    assert done.returncode == -signal.SIGKILL
    assert out.read_bytes() == former
    assert sorted(os.listdir(out.parent)) == ["x.safetensors", "x.safetensors.lock", "x.safetensors.part"]
    fastagg.aggregate_files("fedavg", center, paths, out)
    assert os.listdir(out.parent) == ["x.safetensors"]
    assert_same_model(load_file(out), dict(fastagg.fedavg(*read_round(center, paths))))


def test_interrupts_and_changed_files_leave_nothing(tmp_path):
    center, paths = write_round(tmp_path / "in", *make(3, CUT))
    out = tmp_path / "out"
    out.mkdir()

    def stop(*_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fastagg.aggregate_files("fedavg", center, paths, out, memory=2_000_000, progress=stop)
    with pytest.raises(InputError, match=r"c2\.safetensors was changed"):
        fastagg.aggregate_files("fedavg", center, paths, out, progress=lambda *_: os.utime(paths[2]))
    assert os.listdir(out) == []
    assert not [t for t in threading.enumerate() if "read-ahead" in t.name]


def test_two_processes_do_not_write_the_same_file(tmp_path):
    center, paths = write_round(tmp_path / "in", *make(2, CUT))

    def again(*_):
        with pytest.raises(InputError, match=r"x\.safetensors\.lock: another process is writing"):
            fastagg.aggregate_files("fedavg", center, paths, tmp_path / "x.safetensors")

    fastagg.aggregate_files("fedavg", center, paths, tmp_path / "x.safetensors", progress=again)
    assert_same_model(load_file(tmp_path / "x.safetensors"), dict(fastagg.fedavg(*read_round(center, paths))))


def test_the_global_model_may_be_replaced_and_clients_not(tmp_path):
    center, paths = write_round(tmp_path / "in", *make(3, CUT))
    g, clients = read_round(center, paths)
    os.symlink(tmp_path / "in", tmp_path / "other")
    for out in (paths[1], tmp_path / "other" / "c1.safetensors"):
        with pytest.raises(InputError, match=r"c1\.safetensors is a client"):
            fastagg.aggregate_files("fedavg", center, paths, out)
    with pytest.raises(InputError, match=r"c0\.safetensors is a client"):
        fastagg.aggregate_files("fedamp", center, paths, tmp_path / "in")
    out = tmp_path / "n.safetensors"
    with pytest.raises(InputError, match="is the state"):
        fastagg.aggregate_files("fedawa", center, paths, out, state=out)
    fastagg.aggregate_files("fedawa", center, paths, center)
    assert_same_model(load_file(center), dict(fastagg.fedawa(g, clients)))
    index = write_shards(tmp_path / "g", g, 2)
    fastagg.aggregate_files("fedavg", index, paths, tmp_path / "g", shard_size=1)
    assert_same_model(load_model(index), dict(fastagg.fedavg(g, clients)))


def test_a_full_disk_is_said(tmp_path, monkeypatch):
    center, paths = write_round(tmp_path / "in", *make(2, CUT))

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full)
    with pytest.raises(InputError, match="No space left on device"):
        fastagg.aggregate_files("fedavg", center, paths, tmp_path / "x.safetensors")
    assert os.listdir(tmp_path) == ["in"]


def test_a_lock_that_was_removed_meanwhile_protects_nothing(tmp_path, monkeypatch):
    """Another run ends between our opening of the lock and our taking of it: its model stays whole"""
    center, paths = write_round(tmp_path / "in", *make(2, CUT))
    out, really, once = tmp_path / "x.safetensors", fcntl.flock, []

    def flock(fd, how):
        if not once:
            once.append(True)
            fastagg.aggregate_files("fedavg", center, paths, out)
        return really(fd, how)

    monkeypatch.setattr("fcntl.flock", flock)
    fastagg.aggregate_files("fedavg", center, paths, out)
    assert_same_model(load_file(out), dict(fastagg.fedavg(*read_round(center, paths))))
    assert sorted(os.listdir(tmp_path)) == ["in", "x.safetensors"]


def test_one_file_and_several_are_one_output(tmp_path):
    center, paths = write_round(tmp_path / "in", *make(2, CUT))

    def again(*_):
        with pytest.raises(InputError, match="another process is writing"):
            fastagg.aggregate_files("fedavg", center, paths, tmp_path / "x.safetensors", shard_size=1000)

    fastagg.aggregate_files("fedavg", center, paths, tmp_path / "x.safetensors", progress=again)


def test_only_shards_of_the_former_model_are_removed(tmp_path):
    center, paths = write_round(tmp_path / "in", *make(2, CUT))
    out = tmp_path / "out"
    out.mkdir()
    (out / "notes.txt").write_text("mine")
    (out / "model.safetensors.index.json").write_text('{"weight_map": {"a": "notes.txt"}}')
    fastagg.aggregate_files("fedavg", center, paths, out)
    assert sorted(os.listdir(out)) == ["model.safetensors", "notes.txt"]
    (out / "model.safetensors.index.json").write_text("no JSON")
    with pytest.raises(InputError, match=r"model\.safetensors\.index\.json has no good JSON"):
        fastagg.aggregate_files("fedavg", center, paths, out)


def test_links_and_parts_are_clients_too(tmp_path):
    center, paths = write_round(tmp_path / "in", *make(2, CUT))
    link, part = tmp_path / "x.safetensors", tmp_path / "y.safetensors.part"
    link.symlink_to(paths[0])
    part.write_bytes(paths[0].read_bytes())
    for client, out in ((link, link), (part, tmp_path / "y.safetensors")):
        with pytest.raises(InputError, match="is a client"):
            fastagg.aggregate_files("fedavg", center, [client, paths[1]], out)
    with pytest.raises(InputError, match="is like the name of a part of client 'a'"):
        fastagg.aggregate_files("fedamp", center, paths, tmp_path / "out", client_ids=["a-00001-of-00002", "a"])


def test_a_global_model_that_became_several_files_is_found_again(tmp_path):
    center, paths = write_round(tmp_path / "in", *make(2, CUT))
    before = dict(fastagg.fedavg(*read_round(center, paths)))
    for _ in range(2):
        fastagg.aggregate_files("fedavg", center, paths, center, shard_size=1000, client_ids=np.arange(2))
    assert not center.exists()
    model = open_model(center)
    assert model.name == center.stem
    assert_same_model(model.tensors, before)


def test_nothing_to_read(tmp_path):
    """A model of buffers alone has no Gram; the same as in memory"""
    models = [{"bn.running_mean": torch.full((3,), float(k))} for k in range(4)]
    center, paths = write_round(tmp_path / "in", models[0], models[1:])
    fastagg.aggregate_files("krum", center, paths, tmp_path / "x.safetensors", f=0)
    assert_same_model(load_file(tmp_path / "x.safetensors"), dict(fastagg.krum(*read_round(center, paths), f=0)))


def test_many_small_layers_take_no_more_memory_than_allowed(tmp_path):
    form = {f"l{i}.weight": torch.zeros(1) for i in range(200)}
    table = tables.build(form, [form] * 50)
    matrix = 51 * 51 * 8
    slabs = slabs_of(table, np.ones(table.T, bool), 51, 10 * matrix, with_gram=True)
    assert max(len(slab.t) for slab in slabs) < 10
    assert sum(len(slab.t) for slab in slabs) == 200
