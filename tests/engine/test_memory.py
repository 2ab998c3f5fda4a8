"""What an aggregator remembers belongs to clients with names."""

from __future__ import annotations

import pytest

import fastagg
from helpers.every_method import cohort

REMEMBER_CLIENTS = {"fedawa": {"variant": "released"}, "fedadp": {}, "cfl": {}}


@pytest.mark.parametrize("name", REMEMBER_CLIENTS)
@pytest.mark.parametrize("other", [2, 4])
def test_unnamed_clients_whose_number_changes_are_refused(name, other):
    """Two others after three rounds of three: they would have got the memory of the first two."""
    server = fastagg.aggregator(name, **REMEMBER_CLIENTS[name])
    for seed in range(3):
        server.aggregate(*cohort(3, seed))
    before = server.state
    with pytest.raises(fastagg.InputError, match=rf"{other} clients where there were 3 before: pass client_ids"):
        server.aggregate(*cohort(other, 5))
    assert server.state is before
    server.aggregate(*cohort(3, 6))
    server.aggregate(*cohort(other, 7), client_ids=list("abcd")[:other])


@pytest.mark.parametrize("name", REMEMBER_CLIENTS)
def test_names_are_not_left_out_later(name, tmp_path):
    server = fastagg.aggregator(name, **REMEMBER_CLIENTS[name])
    server.aggregate(*cohort(3), client_ids=["a", "b", "c"])
    with pytest.raises(fastagg.InputError, match="pass client_ids"):
        server.aggregate(*cohort(3))
    server.save(tmp_path / "state")
    loaded = fastagg.aggregator(name, **REMEMBER_CLIENTS[name])
    loaded.load(tmp_path / "state")
    with pytest.raises(fastagg.InputError, match="pass client_ids"):
        loaded.aggregate(*cohort(3))


def test_a_dropped_client_does_not_change_the_number():
    server = fastagg.aggregator("fedadp", on_bad_client="drop")
    g, clients = cohort(3)
    clients[1]["fc.weight"].fill_(float("nan"))
    assert list(server.aggregate(g, clients).dropped) == [1]
    server.aggregate(*cohort(3, 1))


@pytest.mark.parametrize("name", ["fedavg", "fedawa", "fedadam", "simprox"])
def test_methods_without_a_memory_of_clients_need_no_names(name):
    server = fastagg.aggregator(name)
    for clients in (3, 2, 4):
        server.aggregate(*cohort(clients))


@pytest.mark.parametrize("name", REMEMBER_CLIENTS)
def test_a_loaded_state_knows_how_many_unnamed_clients_there_were(name):
    server, loaded = (fastagg.aggregator(name, **REMEMBER_CLIENTS[name]) for _ in range(2))
    server.aggregate(*cohort(3))
    loaded.load_state_dict(server.state_dict())
    with pytest.raises(fastagg.InputError, match="5 clients where there were 3 before"):
        loaded.aggregate(*cohort(5))
    loaded.aggregate(*cohort(3, 1))
