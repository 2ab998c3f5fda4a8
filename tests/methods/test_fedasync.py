"""FedAsync against Algorithm 1 of its paper, over many versions, with random arrivals of random staleness."""

from __future__ import annotations

import random

import pytest
import torch

import fastagg
from fastagg import BadClientError
from helpers.asynchronous import PARAMS, arrivals, assert_near, discount, model_of, vector
from helpers.cohort import assert_same_bits
from helpers.states import same


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("decay", ["polynomial", "hinge", "constant"])
def test_the_algorithm(decay, dtype):
    """x_t = (1 - alpha_t) x_(t-1) + alpha_t x_new, alpha_t = alpha s(t - tau), one client at a time"""
    server = fastagg.FedAsync(alpha=0.7, decay=decay, b=2)
    s = discount(decay, {"polynomial": 0.5, "hinge": 10.0, "constant": 0}[decay], 2)
    rng, models = random.Random(1), {0: model_of(dtype, 0)}
    for now in range(25):
        g = models[now]
        [(v, w)], _ = arrivals(rng, models, 1, 99)
        alpha = 0.7 * s(now - v)
        with server.round(g) as round:
            assert not round.is_ready
            round.add("a", w, version=v)
            assert round.is_ready
            new = round.finish()
        assert_near(new, (1 - alpha) * vector(g) + alpha * vector(w), dtype, [g, w])
        assert new.staleness.tolist() == [now - v]
        assert (new["bn.running_var"] >= 0).all()
        assert new["bn.num_batches_tracked"] == max(g["bn.num_batches_tracked"], w["bn.num_batches_tracked"])
        models[now + 1] = {key: value.clone() for key, value in new.items()}
    assert server.version == 25


def test_several_at_a_time_are_the_mean_of_what_each_would_make():
    g, clients, found = model_of(torch.float64, 0), [model_of(torch.float64, k) for k in range(1, 5)], []
    sizes, versions = [3.0, 1, 4, 2], [2, 0, 1, 2]
    alone = []
    for order in ([0, 1, 2, 3], [3, 1, 0, 2]):
        server = fastagg.FedAsync(alpha=0.9)
        for v in range(2):
            server.aggregate(g, [g], version=[v])
        alone = [
            server.with_state(server.state).aggregate(g, [w], version=[v])
            for w, v in zip(clients, versions, strict=True)
        ]
        with server.round(g) as round:
            for k in order:
                round.add(k, clients[k], size=sizes[k], version=versions[k])
            found.append(round.finish())
    assert_same_bits(*found)
    mean = sum(n / 10 * vector(sd) for n, sd in zip(sizes, alone, strict=True))
    assert_near(found[0], mean, torch.float64, [g, *clients])


def test_updates_of_the_current_version_only():
    server, g, w = fastagg.FedAsync(), model_of(torch.float64, 0), model_of(torch.float64, 1)
    server.aggregate(g, [g], version=[0])
    update = {key: value - g[key] for key, value in w.items()}
    with server.round(g) as round:
        with pytest.raises(BadClientError, match=r"client 0: it sent an update of version 0 .* send the model itself"):
            round.add(0, update=update, version=0)
        with pytest.raises(BadClientError, match=r"client 0: it started from version 2 .* the current one is 1"):
            round.add(0, w, version=2)
        round.add(0, update=update, version=1)
        round.add(1, w, version=0)  # beside a model of an older one
        found = round.finish()
    alpha = 0.6 * (1 + 2**-0.5) / 2
    assert_near(found, (1 - alpha) * vector(g) + alpha * vector(w), torch.float64, [g, w])


def test_it_remembers_a_number(tmp_path):
    server, g = fastagg.FedAsync(), model_of(torch.float32, 0)
    for v in (0, 0, 1):
        server.aggregate(g, [g], version=[v])
    server.save(tmp_path / "state")
    other = fastagg.FedAsync()
    other.load(tmp_path / "state")
    assert other.version == 3
    assert same(other.state_dict(), {"method": "fedasync", "version": 3, "former": {}})
    with pytest.raises(ValueError, match=r"alpha=1\.5"):
        fastagg.FedAsync(alpha=1.5)
    assert set(PARAMS) <= g.keys()
