"""New models take their place whole or not at all, whatever happens meanwhile."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import fastagg
from fastagg import InputError
from fastagg._engine import atomic
from fastagg._engine import table as tables
from fastagg._engine.files.mapped import open_model
from fastagg._engine.files.slabs import slabs_of
from fastagg._engine.files.written import PartFile
from helpers.cohort import make
from helpers.model_files import assert_same_model, load_model, read_round, write_round, write_shards

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

    before = sorted(os.listdir(out))
    really, stopped = Path.replace, []

    def stop(path, target):
        if target.name.endswith(".json"):
            stopped.append(os.listdir(out))
            raise KeyboardInterrupt
        return really(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", stop)
        with pytest.raises(KeyboardInterrupt):
            fastagg.aggregate_files("fedavg", center, paths, out, shard_size="300KB")
    assert len([name for name in stopped[0] if "-of-00005" in name]) == 10  # the shards of both
    assert sorted(os.listdir(out)) == before
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
    assert re.fullmatch(r"\.x\.safetensors\.\d+-.*\.part x\.safetensors x\.safetensors\.lock",
                        " ".join(sorted(os.listdir(out.parent))))  # fmt: skip
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


@pytest.mark.parametrize("role", ["a client", "the global model"])
def test_no_input_is_replaced_or_removed(tmp_path, role):
    center, paths = write_round(tmp_path / "in", *make(2, CUT))
    content = paths[0].read_bytes()
    out, link = tmp_path / "y.safetensors", tmp_path / "link.safetensors"

    def run(path, out):
        start, clients = (center, [path, paths[1]]) if role == "a client" else (path, paths)
        fastagg.aggregate_files("fedawa", start, clients, out, client_ids=["a", "b"])

    for name in ("y-00001-of-00002.safetensors", "y-b-00001-of-00002.safetensors",
                 ".y.safetensors.1-0123456789abcdef.part"):  # fmt: skip
        path = tmp_path / name
        path.write_bytes(content)
        with pytest.raises(InputError, match=f"is {role}"):
            run(path, out)
        link.symlink_to(path)
        with pytest.raises(InputError, match=f"is {role}"):
            run(link, out)
        link.unlink()
        path.rename(tmp_path / "kept")
    for name in ("y.safetensors.part", "y.part", ".y.safetensors.part", "kept"):  # no names of ours
        path = tmp_path / name
        path.write_bytes(content)
        run(path, out)
        assert path.read_bytes() == content
    hard = tmp_path / "z.safetensors"  # another name of the same file: this name gets a new file
    os.link(paths[0], hard)
    run(paths[0], hard)
    assert paths[0].read_bytes() == content
    assert hard.read_bytes() != content
    link.symlink_to(paths[0])
    if role == "a client":
        with pytest.raises(InputError, match="is a client"):
            run(link, link)
    else:
        run(link, link)  # the very output
        assert not link.is_symlink()
    assert paths[0].read_bytes() == content


def test_shards_that_are_not_of_the_former_model_stay(tmp_path):
    center, paths = write_round(tmp_path / "in", *make(2, CUT))
    names = ["x-00001-of-00003.safetensors", "x-00007-of-00009.safetensors", "x-b-00001-of-00002.safetensors",
             "x-00001-of-00003.safetensors.part", "x.safetensors.part"]  # fmt: skip
    for name in names:
        (tmp_path / name).write_text("mine")
    for _ in range(3):
        found = fastagg.aggregate_files("fedavg", center, paths, tmp_path / "x.safetensors", shard_size="300KB")
    fastagg.aggregate_files("fedavg", center, paths, tmp_path / "x.safetensors", shard_size="500KB")
    fastagg.aggregate_files("fedavg", center, paths, tmp_path / "x.safetensors")
    assert found.paths["x"].name == "x.safetensors.index.json"
    assert sorted(os.listdir(tmp_path)) == sorted(["in", "x.safetensors", *names])
    assert all((tmp_path / name).read_text() == "mine" for name in names)


KILLED_AT_INDEX = """
import os, sys, fastagg
from pathlib import Path
really = Path.replace
def replace(path, target):
    if target.name.endswith(".json"): os.kill(os.getpid(), 9)
    return really(path, target)
Path.replace = replace
fastagg.aggregate_files("fedavg", sys.argv[1], sys.argv[3:], sys.argv[2], shard_size="300KB")
"""


def test_shards_of_a_run_that_was_killed_are_removed(tmp_path):
    center, paths = write_round(tmp_path / "in", *make(2, CUT))
    out = tmp_path / "m"
    out.mkdir()
    (out / "model-00001-of-00005.safetensors").write_text("mine")
    done = subprocess.run([sys.executable, "-c", KILLED_AT_INDEX, center, out, *paths], check=False)
    assert done.returncode == -signal.SIGKILL
    assert len([name for name in os.listdir(out) if name.startswith("model-b-")]) == 5
    shutil.copytree(out, tmp_path / "n")
    fastagg.aggregate_files("fedavg", center, paths, out, shard_size="300KB")
    new = [*(f"model-b-{i:05}-of-00005.safetensors" for i in range(1, 6)), "model.safetensors.index.json"]
    assert sorted(os.listdir(out)) == ["model-00001-of-00005.safetensors", *new]
    fastagg.aggregate_files("fedavg", center, paths, tmp_path / "n")
    assert sorted(os.listdir(tmp_path / "n")) == ["model-00001-of-00005.safetensors", "model.safetensors"]


@pytest.mark.parametrize("shard_size", ["300KB", "5GB"])
def test_permissions_of_the_former_model_are_kept(tmp_path, shard_size):
    center, paths = write_round(tmp_path / "in", *make(2, CUT))
    center.chmod(0o666)  # a new model gets no more than this
    out = tmp_path / "out"
    seen = set()

    def modes():
        return {stat.S_IMODE(path.stat().st_mode) for path in out.iterdir()}

    fastagg.aggregate_files("fedavg", center, paths, out)
    before = os.umask(0)
    os.umask(before)
    assert modes() == {0o666 & ~before}
    (out / "model.safetensors").chmod(0o640)
    for size in (shard_size, shard_size, "5GB"):
        fastagg.aggregate_files(
            "fedavg", center, paths, out, shard_size=size,
            progress=lambda *_: seen.update(stat.S_IMODE(path.stat().st_mode) for path in out.glob("*.part")),
        )  # fmt: skip
        assert modes() == {0o640}
    assert seen == {0o600}
    fastagg.aggregate_files("fedamp", center, paths, tmp_path / "p", client_ids=["a", "b"])
    (tmp_path / "p" / "a.safetensors").chmod(0o600)
    fastagg.aggregate_files("fedamp", center, paths, tmp_path / "p", client_ids=["a", "b"])
    found = [stat.S_IMODE((tmp_path / "p" / f"{name}.safetensors").stat().st_mode) for name in "ab"]
    assert found == [0o600, 0o666 & ~before]


def test_temporary_files_are_not_opened_through_links(tmp_path):
    center, paths = write_round(tmp_path / "in", *make(2, CUT))
    content = paths[0].read_bytes()
    for name in ("x.safetensors.part", "x.safetensors.index.json.part", "s.state.part", "x-00001-of-00005.safetensors"):
        (tmp_path / name).symlink_to(paths[0])
    for size in ("300KB", "5GB"):
        fastagg.aggregate_files("fedawa", center, paths, tmp_path / "x.safetensors", state=tmp_path / "s.state",
                                shard_size=size)  # fmt: skip
    assert paths[0].read_bytes() == content
    (tmp_path / "x.safetensors.lock").symlink_to(paths[0])
    with pytest.raises(InputError, match="cannot lock"):
        fastagg.aggregate_files("fedawa", center, paths, tmp_path / "x.safetensors")


def test_a_mapped_temporary_file_is_locked(tmp_path):
    """Its descriptor is closed early, for there may be more files than descriptors"""
    part = PartFile(tmp_path / "x", [("a", torch.float32, torch.Size([3]))], 100)
    assert part.new.fd < 0
    assert atomic.stale(tmp_path / "x") == []
    part.tensors = part.memory = None
    assert atomic.stale(tmp_path / "x") == [part.new.path]


def test_names_of_clients_and_parts(tmp_path):
    center, paths = write_round(tmp_path / "in", *make(2, CUT))
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
    slabs = slabs_of(table, np.ones(table.T, bool), 51, 10 * matrix, table.K + 1)
    assert max(len(slab.t) for slab in slabs) < 10
    assert sum(len(slab.t) for slab in slabs) == 200
