"""Stages before a method (pre): against mixed models that are really stored, made naively in float64."""

from __future__ import annotations

import hashlib
import json
import math

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import fastagg
from fastagg import InputError
from fastagg._engine import stages
from fastagg._engine.files import command
from fastagg._engine.files.job import Job
from fastagg._engine.registry import registry
from helpers.cohort import assert_same_bits, assert_unchanged, clone, degenerate, flat, make, snapshot
from helpers.every_method import METHODS, OPTIONS, TRAINERS, cohort, round_inputs
from helpers.model_files import read_round, write_round

SHAPES = {"a.weight": (20, 7), "a.bias": (20,), "bn.running_mean": (20,), "b.weight": (9, 20)}
BUFFERS = ("bn.running_mean",)
K = 15
SIZES = [3.0, 1.0, 4.0, 1.0, 5.0, 9.0, 2.0, 6.0, 5.0, 3.0, 5.0, 8.0, 9.0, 7.0, 9.0]
PRE = {
    "nnm": ["nnm f=1"],
    "more neighbours": [{"stage": "nnm", "f": 5}],
    "buckets": ["bucketing"],
    "clipping": "clipping c=0.19",
    "arc": {"stage": "arc", "f": 3},
    "two": "nnm f=3 + clipping c=0.1",
    "all": ["bucketing s=2 seed=4", {"stage": "clipping", "c": 0.14}, "nnm f=1", {"stage": "arc", "f": 2}],
}
CASES = [
    ("krum", {"f": 1}), ("multi_krum", {"f": 1, "m": 3}), ("bulyan", {"f": 1}),
    ("trimmed_mean", {"f": 1}), ("median", {}), ("phocas", {"f": 1}), ("geometric_median", {}),
    ("centred_clipping", {"tau": 0.05, "center": "previous", "iterations": 2}),
    ("fedavg", {}), ("fedavg", {"server_lr": 0.7, "gamma": 0.9}), ("fedawa", {}),
    ("fedawa", {"layerwise": True, "gamma": 0.8}), ("fedawa", {"variant": "cos"}), ("ldawa", {}), ("simagg", {}),
    ("simprox", {}), ("weiavg", {}), ("fedavgm", {}), ("fedadam", {"weights": {"method": "krum", "f": 1}}),
    ("fedavgm", {"weights": "median"}),
]  # fmt: skip


def models(clients=K, seed=0, dtype=torch.float64):
    """Some clients go further than others"""
    g, sds = make(clients, SHAPES, dtype, seed=seed)
    for k, sd in enumerate(sds):
        for key in sd:
            sd[key] = g[key] + (sd[key] - g[key]) * (0.5 + k % 4)
    return g, sds


def parameters(sd):
    return torch.cat([value.double().reshape(-1) for key, value in sd.items() if key not in BUFFERS])


def stored(g, clients, pre, turn=0):
    """The models that stages make of the clients, one by one, and what each has of every client: [R, K]"""
    g64 = {key: value.double() for key, value in g.items()}
    rows = [{key: value.double() for key, value in sd.items()} for sd in clients]
    shares = np.eye(len(clients))

    def combined(coefficients):
        """Models g + sum_k c_k (w_k - g), one for each row of coefficients"""
        return [
            {key: g64[key] + sum(c * (sd[key] - g64[key]) for c, sd in zip(row, rows, strict=True)) for key in g64}
            for row in coefficients.tolist()
        ]

    for stage in stages.read("test", pre, None):
        R = len(rows)
        vectors = [parameters(sd) - parameters(g64) for sd in rows]
        lengths = [v.norm().item() for v in vectors]
        c = np.zeros((R, R))
        if stage.name == "nnm":
            for i in range(R):
                distances = [(vectors[i] - v).norm().item() for v in vectors]
                for j in sorted(range(R), key=lambda j, d=distances: d[j])[: R - stage.f]:
                    c[i, j] = 1 / (R - stage.f)
        elif stage.name == "bucketing":
            drawn = stage.buckets(R, turn).tolist()
            c = np.zeros((math.ceil(R / stage.s), R))
            for i in range(len(c)):
                members = [j for j in range(R) if drawn[j] == i]
                c[i, members] = 1 / len(members)
        else:
            longest = sorted(lengths, reverse=True)
            most = stage.c if stage.name == "clipping" else longest[math.floor(2 * stage.f / R * (R - stage.f))]
            for i in range(R):
                c[i, i] = min(1, most / lengths[i]) if lengths[i] else 1
        rows = combined(c)
        shares = c @ shares
    return rows, shares


def sizes_of(pre, turn=0):
    """Of the rows: a client's own, or those of a bucket together"""
    return np.bincount(stages.rows_of(stages.read("test", pre, None), K, turn), SIZES).tolist()


@pytest.mark.parametrize("pre", PRE)
@pytest.mark.parametrize(("name", "options"), CASES, ids=str)
def test_as_if_mixed_models_were_stored(name, options, pre):
    server, plain = fastagg.aggregator(name, **options, pre=PRE[pre]), fastagg.aggregator(name, **options)
    robust = "median" in (server.buffers, getattr(getattr(server, "_method", None), "buffers", ""))
    for turn in range(2):
        g, clients = models(seed=turn)
        before = snapshot(g, *clients)
        found = server.aggregate(g, clients, SIZES)
        assert_unchanged([g, *clients], before)
        rows, shares = stored(g, clients, PRE[pre], turn)
        assert shares.shape[0] < K or np.abs(shares - np.eye(K)).max() > 0.1  # there is something to see
        expected = plain.aggregate(g, rows, sizes_of(PRE[pre], turn))
        if robust:
            expected["bn.running_mean"] = torch.stack([sd["bn.running_mean"] for sd in clients]).median(0).values
        for key in g:
            torch.testing.assert_close(found[key], expected[key], rtol=1e-8, atol=1e-10)
        torch.testing.assert_close(found.weights, expected.weights @ torch.from_numpy(shares), rtol=1e-7, atol=1e-10)
        for value in server.client_values:
            said = getattr(found, value.name)
            assert said is None or said.shape[-1] == K


def test_equations_of_nnm_and_trimmed_mean():
    """Nothing of the engine on the other side"""
    g, clients = models()
    x = torch.stack([flat(sd) for sd in clients])
    near = torch.cdist(x[:, parameter_mask(g)], x[:, parameter_mask(g)]).argsort(1)[:, : K - 4]
    mixed = torch.stack([x[row].mean(0) for row in near]).sort(0).values[4 : K - 4].mean(0)
    found = fastagg.trimmed_mean(g, clients, f=4, pre="nnm")
    mask = parameter_mask(g)
    torch.testing.assert_close(flat(found)[mask], mixed[mask], rtol=1e-12, atol=1e-13)


def test_equations_of_arc_and_krum():
    g, clients = models()
    x = torch.stack([parameters(sd) - parameters(g) for sd in clients])
    lengths = x.norm(dim=1)
    least = lengths.sort(descending=True).values[2 * 3 * (K - 3) // K]
    x = x * (least / lengths).clamp(max=1)[:, None]
    scores = (torch.cdist(x, x) ** 2).sort(1).values[:, 1 : K - 3 - 2 + 1].sum(1)
    found = fastagg.krum(g, clients, f=3, pre="arc")
    torch.testing.assert_close(parameters(found), parameters(g) + x[scores.argmin()], rtol=1e-12, atol=1e-13)


def parameter_mask(sd):
    return torch.cat([torch.full((value.numel(),), key not in BUFFERS) for key, value in sd.items()])


@pytest.mark.parametrize("pre", PRE)
@pytest.mark.parametrize("name", ["fedavg", "trimmed_mean", "multi_krum"])
def test_float32(name, pre):
    g, clients = models(dtype=torch.float32)
    found = fastagg.aggregator(name, pre=PRE[pre]).aggregate(g, clients, SIZES)
    rows, _ = stored(g, clients, PRE[pre])
    wide = {key: value.double() for key, value in g.items()}
    expected = fastagg.aggregator(name).aggregate(wide, rows, sizes_of(PRE[pre]))
    torch.testing.assert_close(parameters(found), parameters(expected).float().double(), rtol=1.3e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["krum", "multi_krum", "bulyan", "trimmed_mean", "meamed", "phocas"])
def test_f_is_the_methods(name):
    g, clients = models()
    for stage in ("nnm", "arc"):
        given = fastagg.aggregator(name, f=2, pre={"stage": stage, "f": 2}).aggregate(g, clients)
        assert_same_bits(fastagg.aggregator(name, f=2, pre=stage).aggregate(g, clients), given)
    server = fastagg.aggregator("fedavgm", weights={"method": name, "f": 2}, pre="nnm")
    assert server.stages == (stages.NNM(2),)


def test_where_clients_are_far_from_the_global_model_and_near_each_other():
    """float32 products centred on the global model have no digits of these distances"""
    generator = torch.Generator().manual_seed(0)
    g = {"w": torch.zeros(3000)}
    far = 100 * torch.randn(3000, generator=generator)
    clients = [{"w": far + 1e-2 * torch.randn(3000, generator=generator) * (1 + k / 20)} for k in range(9)]
    x = torch.stack([flat(sd) for sd in clients])
    mixed = torch.stack([x[row].mean(0) for row in torch.cdist(x, x).argsort(1)[:, :6]])
    for name in ("trimmed_mean", "krum"):
        expected = fastagg.aggregator(name).aggregate({"w": g["w"].double()}, [{"w": row} for row in mixed])
        found = fastagg.aggregator(name, pre="nnm f=3").aggregate(g, clients)
        torch.testing.assert_close(flat(found), flat(expected), rtol=2e-7, atol=0)


def squares(g, clients):
    return torch.stack([(parameters(sd) - parameters(g)).square().sum() for sd in clients])


@pytest.mark.parametrize("pre", PRE)
@pytest.mark.parametrize("name", ["krum", "trimmed_mean", "fedawa"])
def test_order_does_not_matter(name, pre):
    g, clients = models(dtype=torch.float32)
    clients[3], clients[7] = clone(clients[1]), clone(clients[1])  # ties
    ids = [f"client {7 * k % K}" for k in range(K)]
    found = fastagg.aggregator(name, pre=PRE[pre]).aggregate(g, clients, SIZES, ids)
    order = [int(k) for k in np.random.default_rng(0).permutation(K)]
    other = fastagg.aggregator(name, pre=PRE[pre]).aggregate(
        g, [clients[k] for k in order], [SIZES[k] for k in order], [ids[k] for k in order]
    )
    assert_same_bits(found, other)
    assert torch.equal(found.weights[order], other.weights)
    if found.gram is not None:  # of the clients, as they are
        assert torch.equal(found.gram.matrix[1:, 1:][order][:, order], other.gram.matrix[1:, 1:])
        torch.testing.assert_close(found.gram.squares.double(), squares(g, clients), rtol=1e-5, atol=0)


@pytest.mark.parametrize(
    "name", ["fedavg", "median", "geometric_median", "fedawa", "centred_clipping", "ldawa", "fedadam"]
)
@pytest.mark.parametrize("pre", ["nnm f=0", "arc f=0", "clipping c=1e-3", "bucketing", "bucketing + nnm f=0 + arc f=0"])
def test_degenerate_cohorts(name, pre):
    for what, g, clients in [*degenerate(SHAPES), ("one client", *models(1))]:
        found = fastagg.aggregator(name, pre=pre).aggregate(g, clients)
        assert all(torch.isfinite(value).all() for value in found.values()), what
        assert torch.isfinite(found.weights).all(), what


@pytest.mark.parametrize("name", ["krum", "trimmed_mean", "median", "geometric_median", "fedavg"])
@pytest.mark.parametrize("pre", ["nnm f=2", "arc f=2", "clipping c=0.2", "clipping c=0.2 + nnm f=2"])
def test_a_client_at_1e20(name, pre):
    g, clients = models()
    honest = max((parameters(sd) - parameters(g)).norm().item() for sd in clients)
    clients[4] = {key: value + 1e20 for key, value in clients[4].items()}
    found = fastagg.aggregator(name, pre=pre).aggregate(g, clients)
    moved = (parameters(found) - parameters(g)).norm().item()
    if name == "fedavg" and pre == "nnm f=2":
        assert moved > 1e18  # one row in K has it: mixing alone makes no mean robust
    else:
        assert moved <= 1.001 * honest


def test_buckets_are_random_and_the_same_everywhere():
    stage = stages.Bucketing(3)
    drawn = stage.buckets(10, 0)
    assert np.bincount(drawn).tolist() == [3, 3, 3, 1]
    order = sorted(range(10), key=lambda r: hashlib.sha256(f"0 0 {r}".encode()).hexdigest())
    assert drawn[order].tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3]  # on every machine, in every version
    assert np.array_equal(drawn, stages.Bucketing(3).buckets(10, 0))
    assert not np.array_equal(drawn, stage.buckets(10, 1))
    assert not np.array_equal(drawn, stages.Bucketing(3, seed=1).buckets(10, 0))
    together = np.zeros((6, 6))
    for turn in range(2000):
        bucket = stages.Bucketing(2).buckets(6, turn)
        together += bucket == bucket[:, None]
    np.fill_diagonal(together, 400)
    assert np.abs(together / 2000 - 0.2).max() < 0.05  # each pair in one of five rounds; 5.6 standard deviations


def test_a_server_that_resumes_draws_the_buckets_of_its_round(tmp_path):
    for name, options in (("median", {}), ("fedadam", {}), ("centred_clipping", {}), ("fedawa", {})):
        g, clients = models()
        server = fastagg.aggregator(name, **options, pre="bucketing")
        server.aggregate(g, clients)
        server.save(tmp_path / "state")
        again = fastagg.aggregator(name, **options, pre="bucketing")
        again.load(tmp_path / "state")
        expected, other = server.aggregate(g, clients), again.aggregate(g, clients)
        assert_same_bits(other, expected)
        assert not torch.equal(parameters(fastagg.aggregator(name, pre="bucketing").aggregate(g, clients)),
                               parameters(expected))  # fmt: skip
        with pytest.raises(InputError, match="turn is -1"):
            again.load_state_dict(server.state_dict() | {"turn": -1})
        assert again.state_dict()["turn"] == 2
    assert "turn" not in fastagg.aggregator("median", pre="nnm f=1").state_dict()


def test_a_round_that_fails_draws_the_same_buckets_again():
    g, clients = models()
    server = fastagg.aggregator("median", pre="bucketing")
    with pytest.raises(InputError):
        server.aggregate(g, [*clients[:-1], {key: value * math.nan for key, value in clients[-1].items()}])
    assert_same_bits(server.aggregate(g, clients), fastagg.median(g, clients, pre="bucketing"))


@pytest.mark.parametrize("pre", PRE)
@pytest.mark.parametrize("name", ["multi_krum", "trimmed_mean", "fedavg", "fedavgm"])
def test_dropped_clients(name, pre):
    g, clients = models()
    ids = [f"c{k:02}" for k in range(K)]
    bad = {key: value * math.nan for key, value in clients[2].items()}
    found = fastagg.aggregator(name, pre=PRE[pre], on_bad_client="drop").aggregate(
        g, [*clients[:2], bad, *clients[3:]], SIZES, ids
    )
    left = [k for k in range(K) if k != 2]
    expected = fastagg.aggregator(name, pre=PRE[pre]).aggregate(
        g, [clients[k] for k in left], [SIZES[k] for k in left], [ids[k] for k in left]
    )
    assert_same_bits(found, expected)
    assert list(found.dropped) == ["c02"]
    assert found.weights[2] == 0
    assert torch.equal(found.weights[left], expected.weights)


def test_values_of_clients_in_buckets():
    g, clients = models()
    found = fastagg.aggregator("fedawa", pre="bucketing s=4").aggregate(g, clients)
    bucket = stages.Bucketing(4).buckets(K, 0)
    for b in range(4):
        assert len(found.logits[bucket == b].unique()) == 1
    assert len(found.logits.unique()) == 4


@pytest.mark.parametrize("pre", ["nnm f=1", "bucketing s=2", "clipping c=0.1 + nnm f=1"])
@pytest.mark.parametrize("name", [name for name in METHODS if name not in TRAINERS])
def test_every_method_takes_stages_or_says_why_not(name, pre):
    g, clients = cohort(7)
    options = {"f": 0} if name in ("krum", "multi_krum", "bulyan") else OPTIONS[name]
    cls, buckets = registry()[name], pre.startswith("bucketing")
    if (
        cls.produces != "global"
        or cls.stale_as is not None
        or (buckets and (name == "fedadp" or any(s.required and s.per_client for s in cls.round_inputs)))
    ):
        with pytest.raises(ValueError, match="cannot be before it: it "):
            fastagg.aggregator(name, **options, pre=pre)
        return
    server = fastagg.aggregator(name, **options, pre=pre)
    whole = {spec.name for spec in cls.round_inputs if not spec.per_client}
    inputs = {key: value for key, value in round_inputs(name, 7).items() if not buckets or key in whole}
    result = server.aggregate(g, clients, **inputs)
    assert result.weights.shape[-1] == 7


@pytest.mark.parametrize(
    ("method", "options", "words"),
    [
        ("fedamp", {}, "it gives models to clients"),
        ("cfl", {}, "it gives models to clients"),
        ("fedlaw", {"model": torch.nn.Linear(1, 1)}, "mixed ones do not exist"),
        ("fedadp", {}, "it remembers clients"),
        ("fedavgm", {"weights": "fedadp"}, "it remembers clients"),
        ("fedawa", {"variant": "released"}, "it remembers clients"),
        ("fednova", {}, "it needs local_steps of each client"),
    ],
)
def test_methods_that_refuse(method, options, words):
    with pytest.raises(ValueError, match=f"{method}: pre='bucketing' cannot be before it: .*{words}"):
        fastagg.aggregator(method, **options, pre="bucketing")


def test_inputs_of_clients_in_buckets_are_refused():
    g, clients = models()
    with pytest.raises(InputError, match="weiavg: entropies are of clients, and it sees buckets"):
        fastagg.aggregator("weiavg", pre="bucketing").aggregate(g, clients, entropies=[1.0] * K)


@pytest.mark.parametrize(
    ("pre", "words"),
    [
        ("nm", "pre: no stage 'nm'; did you mean 'nnm'"),
        ("nnm", r"pre: nnm needs f, the number of clients that may be faulty .*\"nnm f=..\""),
        ("clipping", "pre: clipping needs c, the length"),
        ("nnm f=-1", "pre: nnm: f=-1; expected an integer >= 0"),
        ("nnm f=1.5", "pre: nnm: f=1.5; expected an integer"),
        ("nnm g=1", "pre: nnm: no option 'g'; .*it has f"),
        ("nnm 2", "pre: nnm: option '2': expected key=value"),
        ("arc f=1 + + nnm", "pre: no stage ''"),
        ("bucketing s=0", "pre: bucketing: s=0; expected an integer >= 1"),
        ({"stage": "clipping", "c": 0}, "pre: clipping: c=0; expected a number >= 1e-100"),
        ({"f": 2}, "pre has {'f': 2}; expected the name of a stage"),
        ([3], "pre has 3; expected the name of a stage"),
        (3, "pre=3; expected a list of stages, of which there are nnm, bucketing, clipping, arc"),
    ],
)
def test_wrong_options(pre, words):
    with pytest.raises(ValueError, match=words):
        fastagg.aggregator("fedavg", pre=pre)


def test_too_many_faulty():
    g, clients = models(6)
    for pre in ("nnm f=3", "arc f=3"):
        with pytest.raises(InputError, match=f"{pre[:3]}: f=3 needs more than 2 f = 6 clients .*, got 6; .* is 2"):
            fastagg.fedavg(g, clients, pre=pre)
    with pytest.raises(InputError, match="got 3; the largest f possible is 1"):
        fastagg.fedavg(g, clients, pre="bucketing + nnm f=2")


def test_a_global_model_is_needed():
    _, clients = models()
    for name in ("fedavg", "median", "uniform"):
        with pytest.raises(InputError, match="the global model is None; a Gram needs"):
            fastagg.aggregator(name, pre="nnm f=1").aggregate(None, clients)


def test_stages_of_a_server_optimiser_are_its_own():
    with pytest.raises(ValueError, match="give pre to fedavgm itself"):
        fastagg.aggregator("fedavgm", weights={"method": "krum", "pre": "nnm"})


@pytest.mark.parametrize("pre", PRE)
@pytest.mark.parametrize("name", ["krum", "trimmed_mean", "fedavg", "fedawa"])
def test_files(name, pre, tmp_path):
    center, paths = write_round(tmp_path / "in", *models(dtype=torch.float32))
    g, clients = read_round(center, paths)
    ids = [path.stem for path in paths]
    expected = fastagg.aggregator(name, pre=PRE[pre]).aggregate(g, clients, SIZES, ids)
    job = Job(name, center, paths[::-1], tmp_path / "out", sizes=dict(zip(ids, SIZES, strict=True)), memory="1MB",
              options={"pre": PRE[pre]})  # fmt: skip
    planned = job.plan()
    found = job.run()
    assert found.passes == planned["passes"]
    assert_same_bits(load_file(next(iter(found.paths.values()))), dict(expected))
    assert torch.equal(found.weights.flip(0), expected.weights)


def test_on_the_command_line(tmp_path, capsys):
    center, paths = write_round(tmp_path / "in", *models(dtype=torch.float32))
    g, clients = read_round(center, paths)
    for number, (words, options) in enumerate([
        (["--method", "trimmed_mean:f=2,pre=nnm"], {"f": 2, "pre": "nnm"}),
        (["--method", "trimmed_mean:pre=bucketing+nnm"], {"pre": ["bucketing", "nnm"]}),
        (["--method", "trimmed_mean", "--opt", "pre=bucketing s=3 seed=2 + arc"],
         {"pre": [{"stage": "bucketing", "s": 3, "seed": 2}, "arc"]}),
        (["--method", "trimmed_mean", "--opt", "pre=" + json.dumps(["arc", {"stage": "nnm", "f": 3}])],
         {"pre": ["arc", "nnm f=3"]}),
    ]):  # fmt: skip
        out = tmp_path / f"{number}.safetensors"
        assert command.main([*words, "--global", str(center), "--out", str(out), *map(str, paths)]) == 0
        expected = fastagg.trimmed_mean(g, clients, client_ids=[path.stem for path in paths], **options)
        assert_same_bits(load_file(out), dict(expected))
    assert command.main(["--method", "fedavg:pre=nnn", "--global", str(center), "--out", str(out), str(paths[0])]) == 2
    assert "no stage 'nnn'" in capsys.readouterr().err
