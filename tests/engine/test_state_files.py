"""What an aggregator remembers, on disk: the same after a crash, and refused where it does not fit."""

from __future__ import annotations

import copy
import fcntl
import os
import signal
import stat
import subprocess
import sys
import threading

import pytest
import torch

import fastagg
from fastagg._engine import atomic, saved
from helpers.cohort import assert_same_bits
from helpers.every_method import IDS, METHODS, OPTIONS, cohort, models, round_inputs
from helpers.states import same

REMEMBERS = OPTIONS | {"fedawa": {"variant": "released"}}


def server(name):
    return fastagg.aggregator(name, **REMEMBERS.get(name, {}))


def play(aggregator, seed):
    g, clients = cohort(seed=seed)
    return aggregator.aggregate(g, clients, client_ids=IDS, **round_inputs(aggregator.name))


@pytest.mark.parametrize("name", METHODS)
def test_a_server_goes_on_where_it_was(name, tmp_path):
    one, two = server(name), server(name)
    play(one, 0)
    one.save(tmp_path / "state.safetensors")
    two.load(str(tmp_path / "state.safetensors"))
    assert os.listdir(tmp_path) == ["state.safetensors"]
    assert same(one.state_dict(), two.state_dict())
    for a, b in zip(models(play(one, 1)), models(play(two, 1)), strict=True):
        assert_same_bits(a, b)
    assert same(one.state_dict(), two.state_dict())


@pytest.mark.parametrize("name", METHODS)
def test_what_does_not_fit_changes_nothing(name, tmp_path):
    one, path = server(name), tmp_path / "state.safetensors"
    play(one, 0)
    one.save(path)
    before = copy.deepcopy(one.state_dict())
    content = path.read_bytes()
    for length in (0, 5, 9, len(content) // 2, len(content) - 1):
        path.write_bytes(content[:length])
        with pytest.raises(fastagg.InputError, match=r"state.safetensors is not a file that fastagg saved"):
            one.load(path)
    other = server("fedavg" if name != "fedavg" else "simprox")
    other.save(path)
    with pytest.raises(fastagg.InputError, match=f"{name} state: "):
        one.load(path)
    with pytest.raises(FileNotFoundError):
        one.load(tmp_path / "none")
    path.write_bytes(content)
    assert same(one.state_dict(), before)


def test_states_of_another_model_or_form_are_refused(tmp_path):
    path = tmp_path / "state.safetensors"
    layerwise = fastagg.FedAWA(variant="released", layerwise=True)
    play(layerwise, 0)
    layerwise.save(path)
    for wrong in (fastagg.FedAWA(variant="released"), fastagg.FedAWA(variant="paper", layerwise=True)):
        with pytest.raises(fastagg.InputError, match="fedawa state"):
            wrong.load(path)
        assert not wrong.state_dict()["client_ids"]
    adam = fastagg.FedAdam()
    play(adam, 0)
    adam.save(path)
    adam.load(path)
    state = copy.deepcopy(adam.state_dict())
    other = {key: torch.zeros(3) for key in ("a", "b")}
    with pytest.raises(fastagg.InputError, match=r"was of shape|not a parameter"):
        adam.aggregate(other, [other, other])
    assert same(adam.state_dict(), state)


def test_a_failed_write_leaves_the_former_file(tmp_path, monkeypatch):
    path = tmp_path / "state.safetensors"
    one = server("fedawa")
    one.save(path)
    content = path.read_bytes()
    play(one, 0)

    def full(*_, **__):
        raise OSError("no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", full)
        with pytest.raises(OSError, match="no space left"):
            one.save(path)
    assert path.read_bytes() == content
    one.save(path)
    assert path.read_bytes() != content
    assert list(tmp_path.iterdir()) == [path]  # nothing is left of the attempt that failed


def test_a_flipped_bit_is_found(tmp_path):
    path = tmp_path / "x"
    saved.save(path, {"x": torch.arange(3.0), "text": '"fastagg.sha256": "0', "n": 5})
    content = path.read_bytes()
    for i in range(0, len(content), 3):
        path.write_bytes(content[:i] + bytes([content[i] ^ 1 << i % 8]) + content[i + 1 :])
        with pytest.raises(fastagg.InputError, match="x is not a file that fastagg saved, or is damaged"):
            saved.load(path)
    path.write_bytes(content)
    assert saved.load(path)["n"] == 5


def test_two_writers_and_a_reader(tmp_path):
    """The last one wins; a reader sees the state of one of them, whole"""
    path, failed = tmp_path / "x", []

    def save(value):
        try:
            for _ in range(30):
                saved.save(path, {"a": torch.full((5000,), value), "b": torch.full((5000,), value)})
        except BaseException as error:
            failed.append(error)

    save(0.0)
    threads = [threading.Thread(target=save, args=(value,)) for value in (1.0, 2.0)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        found = saved.load(path)
        assert torch.equal(found["a"], found["b"])
        assert len(found["a"].unique()) == 1
    for thread in threads:
        thread.join()
    assert failed == []
    assert os.listdir(tmp_path) == ["x"]


@pytest.mark.parametrize("kind", ["folder", "fifo", "device"])
def test_only_files_are_loaded(kind, tmp_path):
    path = tmp_path / "x"
    {"folder": path.mkdir, "fifo": lambda: os.mkfifo(path), "device": lambda: path.symlink_to("/dev/zero")}[kind]()
    with pytest.raises(fastagg.InputError, match="x is not a regular file"):
        saved.load(path)


def test_every_dtype_is_written_as_the_library_reads_it(tmp_path):
    gen = torch.Generator().manual_seed(0)
    for dtype in saved.DTYPES:
        bits = torch.randint(0, 2 if dtype == torch.bool else 256, (48,), generator=gen, dtype=torch.uint8)
        x = bits.view(dtype)
        saved.save(tmp_path / "x", {"bool": torch.tensor(True), "x": x, "scalar": x[0], "none": x[:0], "part": x[::2]})
        back = saved.load(tmp_path / "x")
        assert back["x"].dtype == dtype
        for name, expected in {"x": x, "scalar": x[0], "none": x[:0], "part": x[::2]}.items():
            assert back[name].shape == expected.shape
            assert back[name].contiguous().view(-1).view(torch.uint8).tolist() == (
                expected.contiguous().view(-1).view(torch.uint8).tolist()
            )


def test_a_dtype_that_does_not_fit_is_named(tmp_path):
    with pytest.raises(fastagg.InputError, match="complex128, which a safetensors file cannot hold"):
        saved.save(tmp_path / "x", {"x": torch.zeros(2, dtype=torch.complex128)})


def test_lazy_conjugates_and_negatives_keep_their_values(tmp_path):
    x = torch.tensor([1 + 2j, 3 - 4j], dtype=torch.complex64)
    saved.save(tmp_path / "x", {"conj": x.conj(), "neg": x.conj().imag})
    back = saved.load(tmp_path / "x")
    assert back["conj"].tolist() == [1 - 2j, 3 + 4j]
    assert back["neg"].tolist() == [-2.0, 4.0]


# ---- how files are written ----


def test_nothing_is_written_through_links(tmp_path):
    mine, path = tmp_path / "mine", tmp_path / "x"
    mine.write_text("mine")
    os.symlink(mine, tmp_path / "x.part")
    os.symlink(mine, path)
    atomic.write(path, "new")
    assert path.read_text() == "new"
    assert not path.is_symlink()
    assert mine.read_text() == "mine"
    path.unlink()
    os.link(mine, path)
    atomic.write(path, "new")
    assert mine.read_text() == "mine"


def test_the_mode_of_a_file_is_kept(tmp_path):
    path = tmp_path / "x"
    before = os.umask(0o027)
    try:
        atomic.write(path, "new")
        assert stat.S_IMODE(path.stat().st_mode) == 0o640
        for mode in (0o600, 0o444, 0o666):
            path.chmod(mode)
            atomic.write(path, "newer")
            assert stat.S_IMODE(path.stat().st_mode) == mode
    finally:
        os.umask(before)


KILLED = """
import os, sys
from pathlib import Path
from fastagg._engine import atomic
with atomic.whole(Path(sys.argv[1])) as file:
    file.write(b"half")
    file.flush()
    os.kill(os.getpid(), 9)
"""


def test_what_a_killed_process_left_is_removed_and_nothing_else(tmp_path):
    path = tmp_path / "x"
    assert subprocess.run([sys.executable, "-c", KILLED, path], check=False).returncode == -signal.SIGKILL
    [stale] = os.listdir(tmp_path)
    assert stale.startswith(".x.")
    (tmp_path / "mine").write_text("mine")
    others = [".x.part", ".x.1-0123456789abcdef.part.txt", ".xy.1-0123456789abcdef.part", "x.part"]
    for name in others:
        (tmp_path / name).write_text("mine")
    os.symlink(tmp_path / "mine", tmp_path / ".x.1-0123456789abcdef.part")
    os.mkfifo(tmp_path / ".x.2-0123456789abcdef.part")
    with atomic.whole(path) as file:  # the file of a living process stays
        file.write(b"first")
        atomic.write(path, "second")
        assert path.read_text() == "second"
    assert path.read_text() == "first"
    links = [".x.1-0123456789abcdef.part", ".x.2-0123456789abcdef.part"]
    assert sorted(os.listdir(tmp_path)) == sorted([*others, *links, "mine", "x"])


def test_a_new_file_that_is_taken_for_a_stale_one_gets_another_name(tmp_path, monkeypatch):
    """Another process cleans up between our creation of a file and our lock on it"""
    really, seen = fcntl.flock, []

    def flock(fd, how):
        if not seen:
            seen.append(os.listdir(tmp_path))
            atomic.remove_stale(tmp_path / "x")
        return really(fd, how)

    monkeypatch.setattr("fcntl.flock", flock)
    atomic.write(tmp_path / "x", "new")
    assert os.listdir(tmp_path) == ["x"]


@pytest.mark.parametrize("kind", ["folder", "fifo", "device"])
def test_only_files_are_replaced(kind, tmp_path):
    path = tmp_path / "x"
    {"folder": path.mkdir, "fifo": lambda: os.mkfifo(path), "device": lambda: path.symlink_to("/dev/null")}[kind]()
    with pytest.raises(fastagg.InputError, match="x is not a regular file"):
        atomic.write(path, "new")
    assert os.listdir(tmp_path) == ["x"]


def test_an_error_names_the_file(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match=r"No space left on device: .*x\.json"):
        atomic.write_json(tmp_path / "x.json", {})
    assert os.listdir(tmp_path) == []
    monkeypatch.undo()
    with pytest.raises(FileNotFoundError, match=r"none/x\.json'$"):
        atomic.write_json(tmp_path / "none" / "x.json", {})


HOLDER = """
import sys, time
from pathlib import Path
from fastagg._engine import atomic
lock = atomic.Lock(Path(sys.argv[1]), "a run")
print("held", flush=True)
time.sleep(60)
"""


def test_one_process_holds_a_lock(tmp_path):
    path = tmp_path / "lock"
    with subprocess.Popen([sys.executable, "-c", HOLDER, path], stdout=subprocess.PIPE, text=True) as holder:
        try:
            assert holder.stdout.readline() == "held\n"
            with pytest.raises(fastagg.InputError, match="lock: another process is writing this run"):
                atomic.Lock(path, "this run")
        finally:
            holder.kill()
    assert path.exists()
    with atomic.Lock(path, "this run"), pytest.raises(fastagg.InputError, match="another process"):
        atomic.Lock(path, "this run")
    assert not path.exists()


def test_a_lock_follows_no_link_and_removes_no_file_of_others(tmp_path):
    (tmp_path / "mine").write_text("mine")
    os.symlink(tmp_path / "mine", tmp_path / "link")
    os.symlink(tmp_path / "none", tmp_path / "dangling")
    os.mkfifo(tmp_path / "fifo")
    for name in ("link", "dangling", "fifo", "none/lock"):
        with pytest.raises(fastagg.InputError, match=f"{name}.* cannot "):
            atomic.Lock(tmp_path / name, "this run")
    with atomic.Lock(tmp_path / "mine", "this run"):
        pass
    assert (tmp_path / "mine").read_text() == "mine"
    assert sorted(os.listdir(tmp_path)) == ["dangling", "fifo", "link", "mine"]
