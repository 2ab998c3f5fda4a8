"""Simulated time: clients with speeds that wait for each other, and clients that do not."""

from __future__ import annotations

import heapq
import itertools
import json

import numpy as np
import pytest
import torch

import fastagg
from fastagg.sim import data, page, report
from fastagg.sim.config import from_dict
from fastagg.sim.pace import Pace, speeds_of
from fastagg.sim.plots import over_time
from fastagg.sim.report.simulated import common_end, value_at
from fastagg.sim.run import simulate
from fastagg.sim.simulation import SPEEDS, Simulation
from helpers.cohort import assert_same_bits

SMALL = {"clients": 6, "rounds": 4, "epochs": 1, "alpha": 0.5, "samples": 300, "speeds": "lognormal:0.7"}
FEDBUFF = {"method": "fedbuff", "options": {"buffer_size": 4}}


@pytest.fixture(scope="module")
def digits():
    return data.load("digits")


def started(digits, **options):
    return Simulation(from_dict(SMALL | options), digits)


def curve(folder):
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in record.items() if key != "seconds"} for record in records]


def test_speeds():
    rng = lambda: np.random.default_rng(0)  # noqa: E731
    assert speeds_of(None, 3, rng()).tolist() == [1, 1, 1]
    assert speeds_of("1,2,0.5", 3, rng()).tolist() == [1, 2, 0.5]
    drawn = np.log(speeds_of("lognormal:0.5", 10**4, rng()))
    assert abs(drawn.mean()) < 0.02  # four standard errors
    assert abs(drawn.std() - 0.5) < 0.015
    uniform = speeds_of("uniform:0.2,1", 10**4, rng())
    assert 0.2 <= uniform.min() < 0.21
    assert 0.99 < uniform.max() <= 1
    with pytest.raises(ValueError, match="speeds has 2 numbers for 3 clients"):
        speeds_of("1,2", 3, rng())
    for wrong in ("fast", "lognormal:-1", "lognormal:1,2", "uniform:2,1", "uniform:0,1", "1,-2", "nan", 5, "", "x:1"):
        with pytest.raises(ValueError, match=r"expected lognormal:0\.5, uniform"):
            from_dict({"speeds": wrong})


def test_a_round_lasts_as_long_as_its_slowest_client():
    pace = Pace(np.array([1.0, 2, 0.5]), [100, 300, 200], 2)
    assert [pace.duration(k, 2) for k in range(3)] == [0.5, 0.75, 2]
    assert pace.duration(2, 1) == 1  # a straggler does less
    pace.wait_for([(0, 2), (1, 2)])
    pace.wait_for([(2, 2), (1, 2)])
    assert pace.time == 2.75


def test_synchronous_time_changes_nothing_else(digits, tmp_path):
    options = {"method": "fedawa", "participation": 0.5, "dropout": 0.2, "stragglers": 0.3, "epochs": 2}
    simulate(from_dict(SMALL | options), tmp_path / "a", dataset=digits)
    simulate(from_dict(SMALL | options | {"speeds": None}), tmp_path / "b", dataset=digits)
    with_clock, without = curve(tmp_path / "a"), curve(tmp_path / "b")
    times = [record.pop("time") for record in with_clock]
    assert times[0] == 0
    assert all(a < b for a, b in itertools.pairwise(times))
    assert with_clock == without
    sim = started(digits, **options)
    speeds = speeds_of("lognormal:0.7", 6, sim.draw(SPEEDS))
    sizes = np.array(sim.sizes(range(6)))
    assert any(record["lost"] for record in with_clock[1:])  # for whom the others wait, too
    for r in (1, 2, 3, 4):
        jobs = [sim.job(r, k) for k in with_clock[r]["clients"] + with_clock[r]["lost"]]
        slowest = max(sizes[j.client] / sizes.mean() * j.epochs / 2 / speeds[j.client] for j in jobs)
        assert times[r] - times[r - 1] == pytest.approx(slowest, rel=1e-12)


def naive(sim, rounds, buffer_size, server_lr=1.0):
    """FedBuff with a queue of events, every client trained alone when it arrives, with the momentum that it has then:
    (models by version, arrivals)"""
    o, count = sim.options, 6
    speeds, sizes = speeds_of(o.speeds, 6, sim.draw(SPEEDS)), np.array(sim.sizes(range(6)))
    versions = [dict(sim.models[0])]
    queue = [(sizes[k] / sizes.mean() / speeds[k], k, k, 0, 1) for k in range(count)]
    heapq.heapify(queue)
    begun, buffer, arrivals, momentum = count, [], [], {}
    for r in range(1, rounds + 1):
        for _ in range(count):
            now, number, k, v, began = heapq.heappop(queue)
            lr = o.lr * o.lr_decay ** (began - 1)
            job = sim.job(number, k)
            own = {"start": versions[v], "round": began, "momentum": momentum.get(k)}
            [update] = sim.trainer.train([type(job)(**vars(job) | own)], lr)
            momentum[k] = update.momentum
            arrivals.append((r, k, len(versions) - 1 - v, now))
            buffer.append((v, update.model, sizes[k]))
            if len(buffer) == buffer_size:
                t, new, total = len(versions) - 1, {}, sum(n for *_, n in buffer)
                for key, g in versions[-1].items():
                    step = sum(
                        n / total * (1 + t - u) ** -0.5 * (w[key].double() - versions[u][key].double())
                        for u, w, n in buffer
                    )
                    new[key] = (g.double() + server_lr * step).float()
                versions.append(new)
                buffer = []
            heapq.heappush(queue, (now + sizes[k] / sizes.mean() / speeds[k], begun, k, len(versions) - 1, r))
            begun += 1
    return versions, arrivals


@pytest.mark.parametrize("keep_momentum", [False, True])
def test_fedbuff_event_by_event(keep_momentum, digits):
    options = FEDBUFF | {"batched": False, "keep_momentum": keep_momentum}
    sim = started(digits, **options)
    versions, arrivals = naive(started(digits, **options), 4, 4)
    records = [sim.next_round() for _ in range(4)]
    for r, record in enumerate(records, 1):
        mine = [(k, t) for q, k, t, _ in arrivals if q == r]
        assert list(zip(record["clients"], record["staleness"], strict=True)) == mine
        assert record["time"] == pytest.approx([now for q, *_, now in arrivals if q == r][-1], rel=1e-12)
    assert records[-1]["version"] == len(versions) - 1 == 6
    assert max(t for _, _, t, _ in arrivals) > 1
    for key, value in sim.models[0].items():  # rounding of updates grows a little as training goes on from it
        torch.testing.assert_close(value, versions[-1][key], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("method", [FEDBUFF, {"method": "fedasync"}], ids=str)
def test_a_client_that_cannot_be_used(method, digits):
    """It is left out, and goes on without what it remembers: that may be why"""
    options = method.get("options", {}) | {"on_bad_client": "drop"}
    sim = started(digits, **method | {"options": options}, keep_momentum=True)
    sim.next_round()
    version, bad = sim.server.version, next(t.client for t in sim.events.training if t.update is None)
    for value in sim.momentum[bad].values():
        value.fill_(torch.nan)
    record = sim.next_round()
    assert bad in record["clients"]
    assert sim.server.version == record["version"] == version + (5 if method["method"] == "fedasync" else 2)
    assert all(value.isfinite().all() for value in sim.models[0].values())
    sim.next_round()
    assert all(value.isfinite().all() for m in sim.momentum.values() for value in m.values())


def test_fedasync_mixes_every_arrival(digits):
    sim = started(digits, method="fedasync")
    record = sim.next_round()
    assert record["version"] == 6
    assert record["staleness"][0] == 0
    assert all(0 <= t < 6 for t in record["staleness"])
    assert set(sim.events.starts) == {t.version for t in sim.events.training} | {6}  # no more models than needed


@pytest.mark.parametrize("method", [FEDBUFF, {"method": "fedasync"}], ids=str)
def test_a_run_goes_on_where_it_stopped(method, digits, tmp_path):
    """With a buffer that is half full, and trained clients that have not arrived"""
    options = SMALL | method | {"dropout": 0.2, "participation": 0.7, "stragglers": 0.3, "epochs": 2}
    simulate(from_dict(options), tmp_path / "whole", dataset=digits)
    for rounds in (1, 2, 3, 4):
        simulate(from_dict(options | {"rounds": rounds}), tmp_path / "parts", dataset=digits, resume=True)
    assert curve(tmp_path / "parts") == curve(tmp_path / "whole")
    a, b = (Simulation(from_dict(options), digits) for _ in range(2))
    for _ in range(3):
        a.next_round()
    saved = fastagg._engine.saved
    saved.save(tmp_path / "state", a.state_dict())
    b.load_state_dict(saved.load(tmp_path / "state"))
    assert a.next_round().keys() == b.next_round().keys()
    assert_same_bits(a.models[0], b.models[0])


def test_batch_norm_keeps_its_variances_positive(digits):
    sim = started(digits, **FEDBUFF, model="resnet8", samples=120, min_size=5)
    for _ in range(2):
        sim.next_round()
    variances = [value for key, value in sim.models[0].items() if key.endswith("running_var")]
    assert variances
    assert all((value > 0).all() for value in variances)


def test_a_run_may_end_in_time(digits, tmp_path):
    options = SMALL | {"until": 3.0, "rounds": 1000}
    for name, method in (("fedavg", {}), ("fedbuff", FEDBUFF)):
        summary = simulate(from_dict(options | method), tmp_path / name, dataset=digits)
        assert summary["finished"]
        times = [record["time"] for record in curve(tmp_path / name)]
        assert times[-2] < 3 <= times[-1] == summary["time"]
    groups = report.group([report.read_run(tmp_path / name) for name in ("fedavg", "fedbuff")])
    end = common_end(groups)
    assert end == min(run.metrics[-1]["time"] for runs in groups.values() for run in runs)
    [difference] = report.differences(groups)
    assert difference.difference.mean is not None  # though their rounds are not as many
    text = report.markdown(groups)
    assert f"at time {end:.3g}, %" in text
    assert "Time is simulated" in text
    assert "Over simulated time" in page.write(groups, tmp_path / "report").read_text()
    [fedavg, fedbuff] = over_time(groups).axes[0].get_lines()
    assert len(fedavg.get_xdata()) == len(fedbuff.get_xdata()) == 200


def test_time_in_python(digits):
    given = {"data": (digits.x, digits.y, digits.test_x, digits.test_y), "progress": False, "jobs": 1}
    runs = fastagg.sim.compare(["fedavg", ("fedbuff", {"buffer_size": 4})], **given, **SMALL)
    assert [run.time.tolist() for run in runs] == [[record["time"] for record in run.records] for run in runs]
    rows, end = runs.table(), min(run.time[-1] for run in runs)
    for row, run in zip(rows, runs, strict=True):
        assert row["at_time"] == run.accuracy[run.time <= end][-1]
        assert row["time"] == run.time[-1]
    [without] = fastagg.sim.compare(["fedavg"], **given, **SMALL | {"speeds": None}).table()
    assert "time" not in without


def test_what_was_reached_at_a_time():
    metrics = [{"round": r, "time": t, "accuracy": a} for r, t, a in ((0, 0, 0.1), (1, 2.5, 0.4), (2, 4.0, 0.7))]
    run = report.Run(None, {}, {"label": "x"}, {}, metrics)
    found = [value_at(run, report.metric_of({"x": [run]}), t) for t in (0, 2.4, 2.5, 3.9, 9)]
    assert found == [0.1, 0.1, 0.4, 0.4, 0.7]
    assert common_end({"x": [run]}) == 4.0
    assert common_end({"x": [run], "y": [report.Run(None, {}, {"label": "y"}, {}, [{"round": 0}])]}) is None


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"method": "fedavg", "clock": "async"}, "clock=async: fedavg is not made for clients that start"),
        (FEDBUFF | {"algorithm": "scaffold", "momentum": 0.0}, "clock=async: algorithm=scaffold corrects the model"),
        (FEDBUFF | {"attack": "flip", "attackers": 0.3}, "clock=async: attack=flip is of the clients of a round"),
        (FEDBUFF | {"selection": "window"}, "clock=async: selection=window is of rounds"),
        (FEDBUFF | {"ideal": True}, "clock=async: ideal=true compares the updates of a round"),
        ({"clock": "later"}, "clock='later'"), ({"until": 3, "speeds": None}, "until=3 without a clock"),
        ({"until": 0}, "until=0"), ({"speeds": "1,2"}, "speeds has 2 numbers for 6 clients"),
    ],
)  # fmt: skip
def test_what_cannot_be_combined(options, words, digits):
    with pytest.raises(ValueError, match=words):
        started(digits, **options)
    if "clock=async" in words and options["method"] == "fedbuff" and "ideal" not in options:
        assert started(digits, **options, clock="sync").events is None  # as it advises


def test_a_server_optimiser_of_a_buffer(digits):
    """Its step is 0.5 of FedBuff's, in the first version"""
    options = {"weights": {"method": "fedbuff", "buffer_size": 6}, "lr": 0.5, "momentum": 0.0}
    sim = started(digits, method="fedavgm", options=options)
    plain = started(digits, method="fedbuff", options={"buffer_size": 6})
    before = dict(sim.models[0])
    for each in (sim, plain):
        assert each.next_round()["version"] == 1
    for key, value in before.items():
        torch.testing.assert_close(sim.models[0][key], (value + plain.models[0][key]) / 2, rtol=1e-5, atol=1e-6)
