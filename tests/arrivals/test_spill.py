"""What is on the disk outlives the process: no client is lost, and none counts twice."""

from __future__ import annotations

import json
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import fastagg
from fastagg import InputError
from fastagg._engine.arrivals.spill import CLIENT, Spill
from fastagg._engine.files import mapped
from fastagg._engine.files.mapped import MappedFile
from helpers.arrivals import arrive
from helpers.cohort import assert_same_bits, make
from helpers.every_method import METHODS, OPTIONS, cohort


def names(folder):
    return sorted(path.name.partition("-")[0] for path in folder.iterdir())


def test_a_round_goes_on_after_a_stop(tmp_path):
    g, clients = make(6, {"w": (40, 30), "b": (3,)}, torch.bfloat16, scale=0.1)
    spill = tmp_path / "spill"
    server = fastagg.aggregator("fednova")
    round = server.round(g, memory=1, spill=spill)
    for k in range(4):
        given = {"update": {key: v - g[key] for key, v in clients[k].items()}} if k == 2 else {"model": clients[k]}
        round.add(f"client {k}/../x", **given, size=k + 1, local_steps=k + 2)
    assert names(spill) == ["client"] * 4 + ["round.json", "round.lock", "round.safetensors"]
    with pytest.raises(InputError, match="another process is writing this round"):
        server.resume_round(spill)
    round.close()  # as at the end of the process
    with pytest.raises(InputError, match=r"holds a round that was not finished: go on with server.resume_round"):
        server.round(g, spill=spill)
    (spill / f".{Spill.path_of(spill, 9).name}.1-0123456789abcdef.part").write_bytes(b"half of it")
    round = fastagg.aggregator("fednova").resume_round(spill)
    assert sorted(round.clients) == [f"client {k}/../x" for k in range(4)]
    with round:
        round.discard("client 3/../x")
        for k in (3, 4, 5):
            round.add(f"client {k}/../x", clients[k], size=k + 1, local_steps=k + 2)
        found = round.finish()
        order = [int(name.split()[1][0]) for name in round.clients]
    with server.round(g) as round:  # none of it on the disk
        for k in order:
            given = {"update": {key: v - g[key] for key, v in clients[k].items()}} if k == 2 else {"model": clients[k]}
            round.add(f"client {k}/../x", **given, size=k + 1, local_steps=k + 2)
        expected = round.finish()
    assert_same_bits(expected, found)
    assert torch.equal(expected.weights, found.weights)
    assert list(spill.iterdir()) == []
    assert server.resume_round(spill) is None


def test_without_a_global_model(tmp_path):
    _, clients = make(2, {"b": (3,), "w": (40, 30)})
    with fastagg.aggregator("fedavg").round(None, memory=1, spill=tmp_path / "s") as round:
        round.add(0, clients[0])
    with fastagg.aggregator("fedavg").resume_round(tmp_path / "s") as round:
        round.add(1, clients[1])
        assert_same_bits(round.finish(), fastagg.fedavg(None, clients))


def test_a_result_that_was_not_saved_is_computed_again(tmp_path):
    g, clients = make(2, {"w": (40, 30)})
    server, spill = fastagg.aggregator("fedadam"), tmp_path / "spill"

    def fail(*, saved):
        with server.round(g, memory=1, spill=spill) as round:
            for k, sd in enumerate(clients):
                round.add(k, sd)
            results.append(round.finish())
            if saved:
                server.save(tmp_path / "state")
            raise KeyError

    results = []
    with pytest.raises(KeyError):
        fail(saved=False)
    server = fastagg.aggregator("fedadam")  # as it was before the round
    with server.resume_round(spill) as round:
        assert_same_bits(round.finish(), results[0])
        server.save(tmp_path / "state")
    assert list(spill.iterdir()) == []
    with pytest.raises(KeyError):
        fail(saved=True)
    server = fastagg.aggregator("fedadam")
    server.load(tmp_path / "state")
    assert server.resume_round(spill) is None
    assert list(spill.iterdir()) == []


@pytest.mark.parametrize("name", METHODS)
def test_the_state_of_every_method_says_which_round_was_the_last(name, tmp_path):
    g, clients = cohort()
    server = fastagg.aggregator(name, **OPTIONS[name])
    round = server.round(g, memory=1, spill=tmp_path / "spill")
    round.finish(**arrive(round, name, clients))
    server.save(tmp_path / "state")
    round._spill.close()  # as at the end of the process
    server = fastagg.aggregator(name, **OPTIONS[name])
    server.load(tmp_path / "state")
    assert server.resume_round(tmp_path / "spill") is None


def test_a_resumed_round_has_the_order_of_arrival(tmp_path):
    g, clients = make(7, {"w": (4, 3)})
    order = [5, 1, 6, 0, 3, 2, 4]
    with fastagg.aggregator("fedavg").round(g, memory=1, spill=tmp_path) as round:
        for k in order:
            round.add(k, clients[k])
    with fastagg.aggregator("fedavg").resume_round(tmp_path) as round:
        assert round.clients == order


def test_clients_of_a_round_that_was_being_removed_are_in_no_other(tmp_path):
    g, clients = make(2, {"w": (40, 30)})
    server = fastagg.aggregator("fedavg")
    with server.round(g, memory=1, spill=tmp_path) as round:
        round.add(0, clients[0])
    (tmp_path / "round.json").unlink()  # and the process was killed
    assert server.resume_round(tmp_path) is None
    assert list(tmp_path.iterdir()) == []
    with server.round(g, memory=1, spill=tmp_path) as round:
        round.add(1, clients[1])
    with server.resume_round(tmp_path) as round:
        assert round.clients == [1]


def test_what_is_not_a_round_of_this_server(tmp_path):
    g, clients = make(2, {"w": (40, 30)})
    with fastagg.aggregator("fedawa").round(g, memory=1, spill=tmp_path) as round:
        round.add(0, clients[0])
    with pytest.raises(InputError, match="the round is of method 'fedawa', not 'fedavg'"):
        fastagg.aggregator("fedavg").resume_round(tmp_path)
    about = json.loads((tmp_path / "round.json").read_text())
    for text, words in (
        (json.dumps(about | {"format": 2}), "reads format 1"),
        ("[1]", "cannot be read"),
        ("{", "read"),
    ):
        (tmp_path / "round.json").write_text(text)
        with pytest.raises(InputError, match=words):
            fastagg.aggregator("fedawa").resume_round(tmp_path)
    (tmp_path / "round.json").write_text(json.dumps(about))
    with fastagg.aggregator("fedawa").resume_round(tmp_path) as round:  # the lock was released each time
        assert round.clients == [0]


def test_a_damaged_client_has_to_send_again(tmp_path, caplog):
    g, clients = make(2, {"w": (40, 30)})
    with fastagg.aggregator("fedawa").round(g, memory=1, spill=tmp_path) as round:
        for k, sd in enumerate(clients):
            round.add(k, sd)
    path = Spill.path_of(tmp_path, 1)
    path.write_bytes(path.read_bytes()[:-1])
    with fastagg.aggregator("fedawa").resume_round(tmp_path) as round:
        assert round.clients == [0]
        assert "its client has to send again" in caplog.text
        round.add(1, clients[1])
        assert_same_bits(round.finish(), fastagg.fedawa(g, clients))


DAMAGE = {
    "no keys": lambda about: {what: value for what, value in about.items() if what != "keys"},
    "other keys": lambda about: about | {"keys": ["w", "nope"]},
    "fewer keys": lambda about: about | {"keys": []},
    "odd arrays": lambda about: about | {"arrays": [["w"]]},
    "no number": lambda about: about | {"size": "much"},
    "odd inputs": lambda about: about | {"inputs": [1]},
    "another client": lambda about: about | {"id": 2},
    "no client": lambda about: about | {"id": [1]},
    "no dict": lambda about: [1],
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_what_a_file_says_of_its_client_may_be_damaged(damage, tmp_path, caplog):
    g, clients = make(2, {"w": (40, 30)})
    with fastagg.aggregator("fedawa").round(g, memory=1, spill=tmp_path) as round:
        for k, sd in enumerate(clients):
            round.add(k, sd)
    path = Spill.path_of(tmp_path, 1)
    about = json.loads(MappedFile(path).metadata[CLIENT])
    save_file(clients[1], path, {CLIENT: json.dumps(DAMAGE[damage](about))})
    with fastagg.aggregator("fedawa").resume_round(tmp_path) as round:
        assert round.clients == [0]
        assert "its client has to send again" in caplog.text
        round.add(1, clients[1])
        assert_same_bits(round.finish(), fastagg.fedawa(g, clients))


def test_a_client_that_cannot_be_read_now_is_not_lost(tmp_path, monkeypatch):
    g, clients = make(2, {"w": (40, 30)})
    with fastagg.aggregator("fedawa").round(g, memory=1, spill=tmp_path) as round:
        for k, sd in enumerate(clients):
            round.add(k, sd)

    def none_left(path, opened=mapped.open_regular):
        if path.name.startswith("client-"):
            raise OSError(24, "Too many open files")
        return opened(path)

    with monkeypatch.context() as m:
        m.setattr(mapped, "open_regular", none_left)
        with pytest.raises(InputError, match="cannot be read: Too many open files"):
            fastagg.aggregator("fedawa").resume_round(tmp_path)
    with fastagg.aggregator("fedawa").resume_round(tmp_path) as round:
        assert sorted(round.clients) == [0, 1]


def test_folders_and_links_in_the_place_of_files(tmp_path):
    g, clients = make(3, {"w": (40, 30)})
    spill, mine = tmp_path / "spill", tmp_path / "mine"
    mine.write_text("kept")
    server = fastagg.aggregator("fedawa")
    with server.round(g, memory=1, spill=spill) as round:
        round.add(0, clients[0])
    for k in (1, 2):
        Spill.path_of(spill, k).symlink_to(mine)
    with server.resume_round(spill, memory=1) as round:
        assert round.clients == [0]
        Spill.path_of(spill, 2).symlink_to(mine)  # a file of its own takes the link's place
        for k in (1, 2):
            round.add(k, clients[k])
        assert_same_bits(round.finish(), fastagg.fedawa(g, clients))
    assert mine.read_text() == "kept"
    with server.round(g, memory=1, spill=spill) as round:
        Spill.path_of(spill, 1).mkdir()
        with pytest.raises(InputError, match="not a regular file"):
            round.add(1, clients[1])
    with pytest.raises(InputError, match=r"client-.*\.safetensors cannot be removed"):
        server.resume_round(spill)
    Spill.path_of(spill, 1).rmdir()
    server.resume_round(spill).cancel()  # the lock was released


def test_a_round_that_was_closed_does_not_touch_the_next(tmp_path):
    g, clients = make(2, {"w": (40, 30)})
    server = fastagg.aggregator("fedavg")
    first = server.round(g, memory=1, spill=tmp_path)
    first.cancel()
    with server.round(g, memory=1, spill=tmp_path) as round:
        round.add(0, clients[0])
        first.cancel()
        assert_same_bits(round.finish(), clients[0])


def test_a_stop_while_a_round_is_removed_leaves_no_client_to_the_next(tmp_path):
    g, clients = make(2, {"w": (40, 30)})
    server = fastagg.aggregator("fedavg")
    for k in (0, 1):
        with server.round(g, memory=1, spill=tmp_path) as round:
            round.add(k, clients[k])
        (tmp_path / "round.json").unlink()  # the first thing that clear() does
        assert server.resume_round(tmp_path) is None
    with server.round(g, memory=1, spill=tmp_path):
        pass
    with server.resume_round(tmp_path) as round:
        assert round.clients == []


def test_cancel_and_temporary_folders(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    g, clients = make(2, {"w": (40, 30)})
    round = fastagg.aggregator("fedavg").round(g, memory=1)
    round.add(0, clients[0])
    assert len(list((tmp_path / "tmp").glob("*/client-*"))) == 1
    del round  # without close()
    assert list((tmp_path / "tmp").iterdir()) == []
    round = fastagg.aggregator("fedavg").round(g, memory=1, spill=tmp_path / "s")
    round.add(0, clients[0])
    (tmp_path / "s" / "mine").write_text("kept")
    round.cancel()
    assert names(tmp_path / "s") == ["mine"]


def test_a_full_disk(tmp_path, monkeypatch):
    g, clients = make(2, {"w": (40, 30)})

    def full(*_):
        raise OSError(28, "No space left on device")

    with fastagg.aggregator("fedavg").round(g, memory=1, spill=tmp_path) as round:
        round.add(0, clients[0])
        with monkeypatch.context() as m:
            m.setattr("os.fsync", full)
            with pytest.raises(InputError, match="cannot write there: No space left on device"):
                round.add(1, clients[1])
        assert round.clients == [0]
        round.add(1, clients[1])
        assert_same_bits(round.finish(), fastagg.fedavg(g, clients))


def test_what_a_stop_left_of_a_finished_round_is_not_of_the_next(tmp_path):
    """Killed while the files of a round were removed, and again when the next had begun"""
    g, clients = make(3, {"w": (40, 30)})
    (tmp_path / "client-3.safetensors").write_text("mine")
    server = fastagg.aggregator("fedavg")
    round = server.round(g, memory=1, spill=tmp_path)
    for k in range(2):
        round.add(k, clients[k])
    round.finish()
    (tmp_path / "round.json").unlink()  # the first thing that is removed
    round._spill.close()
    with server.round(g, memory=1, spill=tmp_path) as round:
        round.add(2, clients[2])
    with server.resume_round(tmp_path) as round:
        assert round.clients == [2]
        round.finish()
    assert names(tmp_path) == ["client"]
    assert (tmp_path / "client-3.safetensors").read_text() == "mine"


def test_a_global_model_that_cannot_be_written(tmp_path):
    for value in (torch.zeros(3, dtype=torch.complex64), torch.zeros(3, device="meta"), [1.0]):
        with pytest.raises(InputError, match=r"^the global model: key 'w' "):
            fastagg.aggregator("fedavg").round({"w": value}, spill=tmp_path)
        assert not [*tmp_path.iterdir()]


def test_a_folder_stays_where_it_was(tmp_path, monkeypatch):
    """A relative path is of the folder that the process was in when the round began"""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    with fastagg.aggregator("fedavg").round(None, memory=1, spill="waiting") as round:
        round.add("a", {"w": torch.ones(3)})
        monkeypatch.chdir("elsewhere")
        round.add("b", {"w": torch.zeros(3)})
        assert round.finish()["w"].tolist() == [0.5] * 3
    assert not [*(tmp_path / "waiting").iterdir()]


def test_a_folder_that_cannot_be(tmp_path):
    g, _ = make(1, {"w": (4, 3)})
    (tmp_path / "file").write_text("mine")
    for spill in (tmp_path / "file", tmp_path / "file" / "s"):
        for begin in (lambda spill=spill: fastagg.aggregator("fedavg").round(g, spill=spill),
                      lambda spill=spill: fastagg.aggregator("fedavg").resume_round(spill)):  # fmt: skip
            with pytest.raises(InputError, match=r"file.*cannot be the folder of a round"):
                begin()


def test_numbers_of_any_kind_are_what_they_were(tmp_path):
    g, clients = make(3, {"w": (40, 30)})
    sizes = [Fraction(1, 3), np.float32(0.1), torch.tensor(7)]
    steps = [np.int64(3), Decimal("2.5"), torch.tensor([4.0])[0]]
    expected = fastagg.fednova(g, clients, [float(n) for n in sizes], local_steps=[float(n) for n in steps])
    with fastagg.aggregator("fednova").round(g, memory=1, spill=tmp_path) as round:
        for k, sd in enumerate(clients):
            round.add(k, sd, size=sizes[k], local_steps=steps[k])
    with fastagg.aggregator("fednova").resume_round(tmp_path) as round:
        assert_same_bits(expected, round.finish())


def test_a_client_that_cannot_be_removed_is_still_in_the_round(tmp_path, monkeypatch):
    g, clients = make(1, {"w": (40, 30)})

    def fail(*_):
        raise OSError(5, "Input/output error")

    with fastagg.aggregator("fedavg").round(g, memory=1, spill=tmp_path) as round:
        round.add(0, clients[0])
        with monkeypatch.context() as m:
            m.setattr(Spill, "remove", fail)
            with pytest.raises(OSError, match="Input/output"):
                round.discard(0)
        assert round.clients == [0]
