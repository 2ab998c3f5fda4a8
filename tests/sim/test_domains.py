"""Splits of several domains: each client has samples of one, and each domain is split as partition.make splits it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fastagg.sim.config import from_dict
from fastagg.sim.data import Dataset
from fastagg.sim.domains import split
from fastagg.sim.simulation import Simulation

SIZES, TEST = (600, 300, 90), (60, 30, 20)


def made(sizes=SIZES):
    rng = np.random.default_rng(1)
    domain, test_domain = (torch.from_numpy(rng.permutation(np.repeat(np.arange(3), n))) for n in (sizes, TEST))
    y, test_y = (torch.from_numpy(rng.integers(0, 3, len(d))) for d in (domain, test_domain))
    x, test_x = (torch.from_numpy(rng.random((len(d), 1, 8, 8), np.float32)) for d in (domain, test_domain))
    return Dataset("own", x, y, test_x, test_y, 3, domains=("a", "b", "c"), domain=domain, test_domain=test_domain)


DATA = made()


def domains_of(part):
    """Of each client, and all its samples are of it"""
    found = []
    for rows, test in zip(part.train, part.test, strict=True):
        (only,) = {*DATA.domain[rows].tolist(), *DATA.test_domain[test].tolist()}
        found.append(only)
    return found


@pytest.mark.parametrize("kind", ["iid", "dirichlet", "pathological"])
def test_each_client_has_one_domain(kind):
    part = split(DATA, 8, kind=kind, proxy=10, corrupted=0.3, seed=3)
    assert domains_of(part) == [0, 0, 0, 1, 1, 1, 2, 2]
    everything = np.concatenate([*part.train, part.proxy])
    assert np.array_equal(np.sort(everything), np.arange(sum(SIZES)))
    assert len(part.proxy) == 10
    assert np.bincount(DATA.domain[part.proxy], minlength=3).tolist() == [4, 3, 3]
    for rows, counts in zip(part.train, part.counts, strict=True):
        assert np.bincount(DATA.y[rows], minlength=3).tolist() == counts.tolist()
    wrong = part.labels != DATA.y.numpy()
    assert wrong.any()
    assert not wrong[part.proxy].any()
    again, other = (split(DATA, 8, kind=kind, proxy=10, seed=seed) for seed in (3, 4))
    assert all(np.array_equal(a, b) for a, b in zip(part.train, again.train, strict=True))
    assert not all(np.array_equal(a, b) for a, b in zip(part.train, other.train, strict=True))


def test_clients_have_the_same_part_of_their_domains():
    """FPL: so many clients of each domain, each with 5 % of it"""
    total = sum(n * k // 20 for n, k in zip(SIZES, (2, 1, 4), strict=True))
    part = split(DATA, 7, kind="iid", domain_clients=(2, 1, 4), samples=total, min_size=3)
    assert domains_of(part) == [0, 0, 1, 2, 2, 2, 2]
    assert [len(rows) for rows in part.train] == [30, 30, 15, 5, 5, 4, 4]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"clients": 2}, "clients=2; expected an integer >= 3"),
        ({"clients": 6, "domain_clients": (3, 3)}, r"domain_clients=\[3, 3\]; expected 3 numbers, of a, b, c"),
        ({"clients": 6, "domain_clients": (3, 3, 0)}, "from 1"),
        ({"clients": 6, "domain_clients": (3, 3, 3)}, "that sum to clients=6"),
        ({"clients": 30}, r"clients=10 with min_size=10 need 100 samples.*\(in the domain 'c', which has 10 clients\)"),
    ],
)
def test_errors(options, message):
    with pytest.raises(ValueError, match=message):
        split(DATA, **options)


def test_a_run_splits_by_domain():
    options = {"method": "fedavg", "clients": 5, "partition": "iid", "rounds": 1, "epochs": 1, "proxy": 0}
    sim = Simulation(from_dict(options), DATA)
    assert domains_of(sim.parts) == [0, 0, 1, 1, 2]
    assert 0 <= sim.next_round()["accuracy"] <= 1


def test_the_option_says_how_many_clients_each_domain_has():
    options = {"data": "domain-digits", "clients": 6, "domain_clients": "1,3,2", "partition": "iid", "proxy": 0}
    sim = Simulation(from_dict(options), DATA)
    assert domains_of(sim.parts) == [0, 1, 1, 1, 2, 2]
    with pytest.raises(ValueError, match=r"domain_clients=\[1, 3, 3\]; expected 3 numbers"):
        Simulation(from_dict(options | {"domain_clients": "1,3,3"}), DATA)
    with pytest.raises(ValueError, match="domain_clients='1;3'; expected a number for each domain"):
        from_dict(options | {"domain_clients": "1;3"})
    with pytest.raises(ValueError, match="own, which has no domains"):
        Simulation(from_dict(options), Dataset("own", DATA.x, DATA.y, DATA.test_x, DATA.test_y, 3))
