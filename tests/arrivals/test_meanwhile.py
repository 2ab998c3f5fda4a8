"""What other threads do with a client, or with the round, while a client is being added."""

from __future__ import annotations

import threading

import pytest
import torch

import fastagg
from fastagg import BadClientError, InputError
from fastagg._engine.arrivals.round import Round
from helpers.cohort import assert_same_bits, make

SECONDS = 60


class Slow:
    """The next client is being checked until go_on() is called"""

    def __init__(self, monkeypatch):
        self.begun, self.may = threading.Event(), threading.Event()
        checked = Round._checked

        def slow(round, *given):
            if not self.begun.is_set():
                self.begun.set()
                assert self.may.wait(SECONDS)
            return checked(round, *given)

        monkeypatch.setattr(Round, "_checked", slow)

    def add(self, round, *given):
        self.said = []

        def run():
            try:
                self.said.append(round.add(*given))
            except BadClientError as error:
                self.said.append(str(error))

        self.thread = threading.Thread(target=run)
        self.thread.start()
        assert self.begun.wait(SECONDS)

    def go_on(self):
        self.may.set()
        self.thread.join()
        return self.said[0]


def meanwhile(job):
    """A job that has to wait for the client that is being added; its result is in the list"""
    found = []
    thread = threading.Thread(target=lambda: found.append(job()))
    thread.start()
    thread.join(0.1)
    assert thread.is_alive()
    return thread, found


@pytest.fixture
def slow(monkeypatch):
    return Slow(monkeypatch)


@pytest.mark.parametrize("good", [False, True])
def test_a_second_model_counts_where_the_first_is_refused(slow, good, caplog):
    g, clients = make(2, {"w": (4, 3)})
    first = clients[0] if good else {"w": torch.full((4, 3), torch.nan)}
    with fastagg.aggregator("fedavg", on_bad_client="drop").round(g) as round:
        slow.add(round, "a", first)
        thread, found = meanwhile(lambda: round.add("a", clients[1]))
        assert slow.go_on() == good
        thread.join()
        assert found == [not good]
        result = round.finish()
    assert_same_bits(result, clients[0 if good else 1])
    assert result.dropped == {}


def test_a_client_can_be_discarded_while_it_is_added(slow):
    g, clients = make(2, {"w": (4, 3)})
    with fastagg.aggregator("fedavg").round(g, memory=1) as round:
        slow.add(round, "a", clients[0])
        thread, found = meanwhile(lambda: round.discard("a"))
        assert slow.go_on() is True
        thread.join()
        assert found == [True]
        round.add("b", clients[1])
        assert_same_bits(round.finish(), clients[1])


@pytest.mark.parametrize("where", ["_checked", "_keep", "_wait_for", "_refuse", "_order", "_aggregate"])
def test_nobody_waits_for_what_was_interrupted(where, monkeypatch, tmp_path):
    """Ctrl-C in add() or in finish(): both may be called again, and others go on"""
    g, clients = make(2, {"w": (4, 3)})
    with fastagg.aggregator("fedavg").round(g, memory=1, spill=tmp_path) as round:
        round.add(0, clients[0])

        def interrupted(*given, **_):
            raise KeyboardInterrupt

        who = 0 if where == "_refuse" else 1  # 0 is there already
        with monkeypatch.context() as m:
            m.setattr(Round, where, interrupted)
            with pytest.raises(KeyboardInterrupt):
                round.finish(client_ids=[0]) if where in ("_order", "_aggregate") else round.add(who, clients[1])
        thread = threading.Thread(target=round.add, args=[1, clients[1]])
        thread.start()
        thread.join(SECONDS)
        assert round.clients == [0, 1]
        results = []
        finishing = threading.Thread(target=lambda: results.append(round.finish()), daemon=True)
        finishing.start()
        finishing.join(SECONDS)
        assert_same_bits(results[0], fastagg.fedavg(g, clients))


def test_a_round_that_was_interrupted_when_it_was_remembered_does_not_count_twice(monkeypatch, tmp_path):
    """Its result is lost, but what its server remembers is of it, and says so"""
    g, clients = make(2, {"w": (4, 3)})
    server = fastagg.aggregator("fedadam")
    commit = type(server).commit

    def interrupted(*given):
        commit(*given)
        raise KeyboardInterrupt

    with server.round(g, memory=1, spill=tmp_path) as round:
        round.add(0, clients[0])
        monkeypatch.setattr(type(server), "commit", interrupted)
        with pytest.raises(KeyboardInterrupt):
            round.finish()
        with pytest.raises(InputError, match="the round is finished"):
            round.finish()
        assert server.turn == 1
        assert server.finished_round is not None


@pytest.mark.parametrize("end", ["cancel", "close"])
def test_a_client_that_is_being_added_is_in_no_later_round(slow, end, tmp_path):
    g, clients = make(2, {"w": (4, 3)})
    server = fastagg.aggregator("fedavg")
    round = server.round(g, memory=1, spill=tmp_path)
    slow.add(round, "a", clients[0])
    thread, _ = meanwhile(getattr(round, end))
    slow.go_on()
    thread.join()
    if end == "close":
        with server.resume_round(tmp_path) as round:  # all of it is there
            assert round.clients == ["a"]
            round.cancel()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("how", ["close", "error"])
def test_a_round_that_is_being_finished_is_closed_afterwards(how, monkeypatch, tmp_path):
    """By a block that ends with an error, it is not removed: nobody knows what became of the result"""
    g, clients = make(2, {"w": (4, 3)})
    server = fastagg.aggregator("fedavg")
    round = server.round(g, memory=1, spill=tmp_path)
    round.add("a", clients[0])
    begun, may = threading.Event(), threading.Event()
    aggregate = Round._aggregate

    def slow(self, *given):
        begun.set()
        assert may.wait(SECONDS)
        return aggregate(self, *given)

    monkeypatch.setattr(Round, "_aggregate", slow)
    results = []
    finishing = threading.Thread(target=lambda: results.append(round.finish()))
    finishing.start()
    assert begun.wait(SECONDS)
    closing, _ = meanwhile(round.close if how == "close" else lambda: round.__exit__(KeyError, KeyError(), None))
    may.set()
    finishing.join()
    closing.join()
    assert_same_bits(results[0], clients[0])
    if how == "error":
        round = fastagg.aggregator("fedavg").resume_round(tmp_path)  # of which the state was not saved, either
        assert round.clients == ["a"]
        round.cancel()
    assert list(tmp_path.iterdir()) == []
