"""fastagg.sim.simulate and fastagg.sim.compare, with models, data, methods, splits and metrics of the user's own."""

from __future__ import annotations

import re
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import nn

import fastagg
from fastagg.extend import GlobalAggregator
from fastagg.sim import data as data_sets
from fastagg.sim.library import Runs, _config
from fastagg.sim.local import FedProx
from fastagg.sim.simulation import Simulation

SMALL = {"clients": 4, "rounds": 2, "epochs": 1, "alpha": 1.0, "proxy": 0}


def make_net() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))


def to_every_second(labels: np.ndarray, clients: int, rng: np.random.Generator) -> list[np.ndarray]:
    return [np.arange(k, len(labels), clients) for k in range(clients)]


def error_rate(outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (outputs.argmax(1) != y).float()


def squares(outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (outputs[:, 0] - y).square()


class Plain(GlobalAggregator):
    """The mean by data size, and not in the registry."""

    name, paper = "plain", "a test"
    reads, needs_global = "weights", False

    def weigh(self, cohort):
        return cohort.shares


@pytest.fixture(scope="module")
def digits():
    d = data_sets.load("digits")
    return d.x[:400], d.y[:400], d.test_x, d.test_y


def test_own_model_and_data(digits):
    run = fastagg.sim.simulate(make_net, digits, method="fedawa", **SMALL)
    assert run.rounds.tolist() == [0, 1, 2]
    assert run.accuracy.shape == run.loss.shape == (3,)
    assert run.accuracy[-1] > run.accuracy[0]
    assert np.isnan(run.train_loss[0])
    assert [len(w) for w in run.weights[1:]] == [4, 4]
    assert run.model is not None
    make_net().load_state_dict(run.model)
    assert run.folder is None
    assert run.config["model"] == f"{__name__}:make_net"
    assert run.config["data"].startswith("own:")
    assert run.summary["finished"]


def test_memory_and_folder_are_the_same_run(digits, tmp_path):
    options = {"model": make_net, "data": digits, "method": "fedawa", **SMALL}
    a, b = fastagg.sim.simulate(**options), fastagg.sim.simulate(**options, out=tmp_path / "run")
    np.testing.assert_array_equal(a.accuracy, b.accuracy)
    assert b.folder == tmp_path / "run"
    for key, value in a.model.items():
        assert torch.equal(value, b.model[key])


def test_a_run_goes_on_with_the_same_objects_and_no_others(digits, tmp_path):
    options = {"model": make_net, "data": digits, "method": Plain, **SMALL}
    whole = fastagg.sim.simulate(**options)
    fastagg.sim.simulate(**options | {"rounds": 1}, out=tmp_path / "run")
    with pytest.raises(ValueError, match="holds a run already"):
        fastagg.sim.simulate(**options, out=tmp_path / "run")
    other = (digits[0] + 1, *digits[1:])
    with pytest.raises(ValueError, match="was begun with data="):
        fastagg.sim.simulate(**options | {"data": other}, out=tmp_path / "run", resume=True)
    longer = fastagg.sim.simulate(**options, out=tmp_path / "run", resume=True)
    np.testing.assert_array_equal(longer.accuracy, whole.accuracy)
    with pytest.raises(ValueError, match="name it by out="):
        fastagg.sim.simulate(**options, resume=True)


def test_objects_of_a_notebook(digits, tmp_path):
    run = fastagg.sim.simulate(lambda: make_net(), digits, out=tmp_path / "run", **SMALL)
    assert run.config["model"] == "own:test_objects_of_a_notebook.<locals>.<lambda>"
    from fastagg.sim import config
    from fastagg.sim.run import simulate

    with pytest.raises(ValueError, match=r"model is .*<lambda>, which exists only in the program that made it"):
        simulate(
            config.read_json(tmp_path / "run/config.json"),
            tmp_path / "run",
            resume=True,
            dataset=data_sets.load("digits"),
        )


def test_methods_of_all_kinds(digits):
    def accuracy(method, **options):
        return fastagg.sim.simulate(make_net, digits, method=method, options=options, **SMALL).accuracy

    np.testing.assert_array_equal(accuracy(Plain), accuracy("fedavg"))
    np.testing.assert_array_equal(accuracy(f"{__name__}:Plain"), accuracy("fedavg"))
    np.testing.assert_array_equal(accuracy(fastagg.aggregator("fedawa", steps=3)), accuracy(fastagg.FedAWA, steps=3))
    run = fastagg.sim.simulate(make_net, digits, method=fastagg.aggregator("fedawa", steps=3), **SMALL)
    assert run.label == "fedawa (steps=3)"
    with pytest.raises(TypeError, match="expected a name, or an aggregator or its class"):
        accuracy(3)


def test_own_split(digits):
    run = fastagg.sim.simulate(make_net, digits, split=to_every_second, **SMALL)
    counts = np.array(run.found.partition["counts"])
    assert counts.sum(1).tolist() == [100] * 4
    y = digits[1].numpy()
    assert counts.tolist() == [np.bincount(y[k::4], minlength=10).tolist() for k in range(4)]
    for split, words in (
        (lambda y, K, rng: [np.arange(5)] * K, "given to two clients"),
        (lambda y, K, rng: [np.arange(5)], "has 1 clients, expected 4"),
        (lambda y, K, rng: [[0], [1], [], [2]], "client 2 has no samples"),
        (lambda y, K, rng: None, "the split returned a NoneType; expected a list with the indices of each client's"),
        (lambda y, K, rng: {k: [k] for k in range(K)}, "the split returned a dict"),
        (lambda y, K, rng: [np.arange(k, 404, K) for k in range(K)], "client 0 sample 400; expected 0 to 399"),
        (lambda y, K, rng: [[0], [1], [2], [-1]], "client 3 sample -1; expected 0 to 399"),
        (lambda y, K, rng: [[0.5], [1], [2], [3]], r"entry of client 0 is float64 of shape \(1,\); expected indices"),
        (lambda y, K, rng: [0, 1, 2, 3], r"entry of client 0 is int64 of shape \(\); expected indices"),
        (lambda y, K, rng: [[[0], [1, 2]]] * K, "entry of client 0 is no array"),
    ):
        with pytest.raises(ValueError, match=words):
            fastagg.sim.simulate(make_net, digits, split=split, **SMALL)


def test_own_split_by_masks(digits):
    masks, rows = (
        fastagg.sim.simulate(make_net, digits, split=split, **SMALL)
        for split in (lambda y, K, rng: [np.arange(len(y)) % K == k for k in range(K)], to_every_second)
    )
    np.testing.assert_array_equal(masks.accuracy, rows.accuracy)


def test_data_of_each_client(digits):
    x, y, test_x, test_y = digits
    own = {"clients": [(x[:50], y[:50]), (x[50:300], y[50:300])], "test": (test_x, test_y)}
    run = fastagg.sim.simulate(make_net, own, **SMALL | {"clients": 2})
    assert np.array(run.found.partition["counts"]).sum(1).tolist() == [50, 250]
    assert run.weights[1] == pytest.approx([50 / 300, 250 / 300], abs=1e-6)
    with pytest.raises(ValueError, match="data of 2 clients were given, and clients=4"):
        fastagg.sim.simulate(make_net, own, **SMALL)
    left_out = {name: value for name, value in SMALL.items() if name != "clients"}
    assert fastagg.sim.simulate(make_net, own, **left_out).accuracy.tolist() == run.accuracy.tolist()


def test_a_share_to_train_on(digits):
    whole, part = (fastagg.sim.simulate(make_net, digits, **SMALL, train_share=share) for share in (1.0, 0.5))
    full, half = (np.array(run.found.partition["counts"]) for run in (whole, part))
    assert half.sum(1).tolist() == [round(n / 2) for n in full.sum(1)]
    assert (half <= full).all()


def test_callbacks_see_every_round(digits):
    seen = []
    run = fastagg.sim.simulate(make_net, digits, callbacks=[lambda record, o: seen.append((o.label, record))], **SMALL)
    assert seen == [("fedavg", record) for record in run.records[1:]]
    fastagg.sim.simulate(make_net, digits, callbacks=lambda record, o: seen.append(record["round"]), **SMALL)
    assert seen[-2:] == [1, 2]


def test_unknown_options_are_named(digits):
    with pytest.raises(TypeError, match=r"no option 'rouns', did you mean 'rounds'\?|no option 'rouns'"):
        fastagg.sim.simulate(make_net, digits, rouns=3)


def test_compare(digits, tmp_path):
    runs = fastagg.sim.compare(
        {"fedavg": {}, "fedawa": {"steps": 2}, Plain: {}}, seeds=2, model=make_net, data=digits, jobs=1, progress=False,
        **SMALL,
    )  # fmt: skip
    assert isinstance(runs, Runs)
    assert [run.label for run in runs] == ["fedavg"] * 2 + ["fedawa (steps=2)"] * 2 + ["Plain"] * 2
    assert [run.config["seed"] for run in runs[:2]] == [0, 1]
    rows = {row["method"]: row for row in runs.table()}
    assert rows["Plain"]["difference"] == 0
    assert rows["fedawa (steps=2)"]["pairs"] == 2
    assert rows["fedavg"]["baseline"] is None
    assert runs[0].folder is None
    assert runs[0].model is not None  # though its folder is gone
    assert "| fedavg" in str(runs).replace("*", "")
    runs.plot().savefig(tmp_path / "curves.png")
    assert (tmp_path / "curves.png").stat().st_size > 1000
    page = runs.report(tmp_path / "page.html")
    assert page == tmp_path / "page.html"
    assert "fedawa (steps=2)" in page.read_text()


def test_compare_over_a_grid_in_processes_is_continued(digits, tmp_path):
    def make(rounds, **more):
        return fastagg.sim.compare(
            ["fedavg", ("fedawa", {"steps": 2})], grid={"alpha": [0.5, 5.0]}, model=make_net, data=digits, jobs=2,
            out=tmp_path / "cmp", progress=False, **SMALL | {"rounds": rounds}, **more,
        )  # fmt: skip

    runs = make(1)
    assert len(runs) == 4
    assert len(list((tmp_path / "cmp").rglob("summary.json"))) == 4
    assert {run.config["alpha"] for run in runs} == {0.5, 5.0}
    seen = []
    again = make(2, callbacks=[lambda record, o: seen.append((o.alpha, o.label, record["round"]))])
    assert sorted(seen) == sorted((a, label, 2) for a in (0.5, 5.0) for label in ("fedavg", "fedawa (steps=2)"))
    assert [run.rounds[-1] for run in again] == [2] * 4


def make_linear() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))


def test_a_grid_of_objects(digits, tmp_path):
    local = [FedProx(mu=0.1), FedProx(mu=1.0), "sgd"]
    grid = {"model": [make_net, make_linear], "local": local, "split": [to_every_second]}
    options = {"data": digits, "grid": grid, "jobs": 1, "progress": False, "out": tmp_path / "cmp", **SMALL}
    runs = fastagg.sim.compare(["fedavg"], **options)
    assert len({tuple(run.loss) for run in runs}) == len(runs) == 6
    labels = ["fedavg+FedProx(mu=0.1)", "fedavg+FedProx(mu=1.0)", "fedavg"] * 2
    assert [run.label for run in runs] == labels
    seen = []
    again = fastagg.sim.compare(["fedavg"], **options, callbacks=[lambda record, o: seen.append(record)])
    assert not seen  # the same objects are the same runs
    assert [run.loss.tolist() for run in again] == [run.loss.tolist() for run in runs]
    two = {"model": [lambda: make_net(), lambda: make_linear()]}  # without a name to tell them apart
    with pytest.raises(ValueError, match=r"would be the same run.*leave one out"):
        fastagg.sim.compare(["fedavg"], **options | {"grid": two, "out": None})


def test_a_grid_of_data_and_of_their_pixels():
    rng = np.random.default_rng(0)
    x, test_x = (rng.integers(0, 256, (n, 8, 8), np.uint8) for n in (80, 40))
    both = [(x[:n], np.arange(n) % 10, test_x, np.arange(40) % 10) for n in (80, 60)]
    options = {"model": make_net, "jobs": 1, "progress": False, **SMALL}
    runs = fastagg.sim.compare(["fedavg"], data=both[0], grid={"pixels": ["half", "unit"]}, **options)
    alone = [fastagg.sim.simulate(make_net, both[0], pixels=how, **SMALL) for how in ("half", "unit")]
    assert [run.loss.tolist() for run in runs] == [run.loss.tolist() for run in alone]
    assert runs[0].loss.tolist() != runs[1].loss.tolist()
    runs = fastagg.sim.compare(["fedavg"], grid={"data": both}, **options)
    assert [np.sum(run.found.partition["counts"]) for run in runs] == [80, 60]


def test_a_grid_of_a_methods_options(digits):
    options = {"model": make_net, "data": digits, "jobs": 1, "progress": False, **SMALL}
    runs = fastagg.sim.compare(["fedawa"], grid={"options": [{"steps": 1}, {"steps": 7}]}, **options)
    assert [run.label for run in runs] == ["fedawa (steps=1)", "fedawa (steps=7)"]


@pytest.mark.parametrize(
    ("grid", "words"),
    [
        ({"seed": [0, 1]}, "grid: seeds are not for a grid; a comparison has seeds of its own"),
        ({"method": ["fedavg"]}, "grid: methods are not for a grid"),
        ({"alpha": 0.1}, r"grid: alpha=0.1; expected a list of the values that it takes"),
        ({"model": "mlp"}, "grid: model='mlp'; expected a list"),
        ({"alpha": []}, r"grid: alpha=\[\]; expected a list"),
    ],
)
def test_what_a_grid_cannot_have(grid, words, digits):
    with pytest.raises(ValueError, match=words):
        fastagg.sim.compare(["fedavg"], grid=grid, data=digits, **SMALL)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"seeds": 0}, "seeds=0; expected how many, from 1 on, or a list"),
        ({"seeds": []}, r"seeds=\[\]; expected how many"),
        ({"jobs": 0}, "compare: jobs=0; expected an integer >= 1"),
        ({"methods": []}, "compare: there are no methods"),
        ({"baseline": "fedavgg"}, "baseline='fedavgg' is not in this comparison; expected one of fedavg, uniform"),
    ],
)
def test_what_is_wrong_is_said_before_any_run(given, words, digits):
    made = []
    options = {"methods": ["fedavg", "uniform"], "model": make_net, "data": digits, "callbacks": made.append} | SMALL
    with pytest.raises(ValueError, match=words):
        fastagg.sim.compare(**options | given)
    assert not made


def test_methods_with_options_as_on_the_command_line(digits):
    options = {"model": make_net, "data": digits, **SMALL}
    runs = fastagg.sim.compare(["fedavg:server_lr=0.5", "fedawa:steps=2"], jobs=1, progress=False, **options)
    assert [run.label for run in runs] == ["fedavg (server_lr=0.5)", "fedawa (steps=2)"]
    alone = fastagg.sim.simulate(method="fedavg:server_lr=0.5", **options)
    np.testing.assert_array_equal(alone.loss, runs[0].loss)


def test_numbers_of_numpy_and_paths_are_written_down(digits, tmp_path):
    of_numpy = {name: np.float64(v) if isinstance(v, float) else np.int64(v) for name, v in SMALL.items()}
    of_numpy |= {"seed": np.int32(3), "lr": np.float32(0.0625), "data_dir": tmp_path, "options": {"steps": np.int64(2)}}
    run = fastagg.sim.simulate(make_net, digits, method="fedawa", out=tmp_path / "run", **of_numpy)
    assert run.config["options"] == {"steps": 2}
    assert run.config["data_dir"] == str(tmp_path)
    runs = fastagg.sim.compare(
        ["fedavg"], grid={"clients": np.array([3, 4])}, seeds=np.arange(1), model=make_net, data=digits, jobs=1,
        progress=False, **{name: value for name, value in SMALL.items() if name != "clients"},
    )  # fmt: skip
    assert [run.config["clients"] for run in runs] == [3, 4]


class Fails(nn.Sequential):
    def forward(self, x):
        if self.training:
            raise KeyError("deep in the model")
        return super().forward(x)


def make_one_that_fails() -> nn.Module:
    return Fails(nn.Flatten(), nn.Linear(64, 10))


def test_an_error_of_the_users_code_in_another_process(digits):
    with pytest.raises(RuntimeError, match=r"(?s)a run in another process failed: .*in forward.*deep in the model"):
        fastagg.sim.compare(
            ["fedavg"], seeds=2, jobs=2, model=make_one_that_fails, data=digits, progress=False, **SMALL
        )


def test_what_other_processes_cannot_have(digits):
    options = {"model": lambda: make_net(), "data": digits, "progress": False, "seeds": 2, **SMALL}
    with pytest.raises(ValueError, match="jobs=2: other processes cannot have model="):
        fastagg.sim.compare(["fedavg"], jobs=2, **options)
    assert len(fastagg.sim.compare(["fedavg"], **options)) == 2  # one after the other


def test_what_was_defined_at_a_prompt():
    """As in a notebook, where it has a name that other processes can look up and do not have"""
    code = """
import torch, fastagg
def make_net(): return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
def compare(**options):
    return fastagg.sim.compare(["fedavg"], seeds=2, model=make_net, samples=300, clients=2, rounds=1, **options)
print(len(compare()))
try:
    compare(jobs=2)
except ValueError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert re.match(r"2\njobs=2: other processes cannot have model=.* \(it is defined at a prompt\)", done.stdout)


def test_frames(digits):
    pytest.importorskip("pandas")
    runs = fastagg.sim.compare(["fedavg"], model=make_net, data=digits, jobs=1, progress=False, **SMALL)
    frame = runs[0].to_frame()
    assert frame["accuracy"].tolist() == runs[0].accuracy.tolist()
    assert "seconds_train" in frame
    assert len(runs.to_frame()) == 1
    assert len(runs.to_frame(curves=True)) == 3


def one_step_per_batch(client):
    """Plain SGD by hand"""
    for x, y in client.batches():
        client.model.zero_grad()
        client.loss(client.model(x), y).backward()
        with torch.no_grad():
            for p in client.model.parameters():
                p -= client.lr * p.grad


def test_own_client(digits):
    plain = {"momentum": 0.0, "weight_decay": 0.0, "batched": False}
    ours = fastagg.sim.simulate(make_net, digits, local=one_step_per_batch, **SMALL, **plain)
    theirs = fastagg.sim.simulate(make_net, digits, **SMALL, **plain)
    for key, value in theirs.model.items():
        torch.testing.assert_close(ours.model[key], value, rtol=1e-5, atol=1e-6)
    assert ours.label == "fedavg+one_step_per_batch"
    assert ours.train_loss[1:] == pytest.approx(theirs.train_loss[1:], rel=1e-5)


def test_own_metric(digits):
    run, usual = (fastagg.sim.simulate(make_net, digits, metric=m, metric_best=b, **SMALL)
                  for m, b in ((error_rate, "min"), (None, "max")))  # fmt: skip
    np.testing.assert_allclose(run.accuracy, 1 - usual.accuracy, atol=1e-6)
    assert "error_rate" in str(Runs([run]))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"loss": lambda outputs, y: 1.0}, "the loss of 2 samples is a float; expected a tensor"),
        ({"loss": lambda outputs, y: outputs.mean(0)}, r"the loss of 2 samples is of shape \(10,\)"),
        ({"loss": nn.CrossEntropyLoss}, "loss=<class .*CrossEntropyLoss'>; expected a function"),
        ({"metric": lambda outputs, y: "good"}, "the metric of 2 samples is a str; expected a number"),
        ({"metric": 3}, "metric=3; expected a function"),
    ],
)
def test_losses_and_metrics_that_are_none(given, words, digits):
    with pytest.raises((ValueError, TypeError), match=words):
        fastagg.sim.simulate(make_net, digits, **given, **SMALL)


def test_a_metric_in_numpy(digits):
    ours, usual = (
        fastagg.sim.simulate(make_net, digits, metric=metric, **SMALL)
        for metric in (lambda outputs, y: outputs.argmax(1).numpy() == y.numpy(), None)
    )
    np.testing.assert_allclose(ours.accuracy, usual.accuracy, rtol=1e-6)


def test_regression():
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(300, 5, generator=rng)
    y = x @ torch.arange(5.0) + 0.01 * torch.randn(300, generator=rng)
    run = fastagg.sim.simulate(
        lambda: nn.Linear(5, 1), (x[:200], y[:200], x[200:], y[200:]), loss=squares, metric=squares, metric_best="min",
        split="iid", **SMALL | {"rounds": 10, "lr": 0.02, "epochs": 5, "lr_decay": 1.0},
    )  # fmt: skip
    assert run.accuracy[-1] < 0.1 * run.accuracy[0]
    np.testing.assert_allclose(run.accuracy, run.loss, rtol=1e-5)
    usual = fastagg.sim.simulate(lambda: nn.Linear(5, 1), (x[:200], y[:200], x[200:], y[200:]), split="iid", **SMALL)
    assert usual.loss[-1] < usual.loss[0]  # the squared error


def numbers():
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(300, 5, generator=rng)
    return x[:200], x[:200] @ torch.arange(5.0), x[200:], x[200:] @ torch.arange(5.0)


@pytest.mark.parametrize(
    "given",
    [
        {"loss": nn.MSELoss()},
        {"loss": lambda outputs, y: (outputs - y).square()},
        {"metric": lambda outputs, y: (outputs - y).abs().mean()},
    ],
    ids=["module", "of each", "metric"],
)
@pytest.mark.filterwarnings("error")
def test_outputs_are_compared_with_their_own_targets(given):
    """[N, 1] less [N] is [N, N]: training would go on, towards the mean of all targets"""
    [what] = given
    with pytest.raises(ValueError, match=rf"the {what} compares each output with all targets: outputs are \(2, 1\)"):
        fastagg.sim.simulate(lambda: nn.Linear(5, 1), numbers(), split="iid", **given, **SMALL)
    flat = lambda: nn.Sequential(nn.Linear(5, 1), nn.Flatten(0))  # noqa: E731
    fits = fastagg.sim.simulate(flat, numbers(), split="iid", **given, **SMALL)
    assert fits.loss[-1] < fits.loss[0]


def test_a_split_of_values_sees_them():
    seen = []

    def by_size(y, clients, rng):
        seen.append(y)
        return np.array_split(np.argsort(y), clients)

    data = numbers()
    fastagg.sim.simulate(lambda: nn.Linear(5, 1), data, split=by_size, **SMALL)
    np.testing.assert_array_equal(seen[0], data[1].numpy())


@pytest.mark.parametrize("method", ["fedlaw", "server_ft"])
@pytest.mark.parametrize("loss", [None, squares])
def test_the_server_minimises_what_clients_do(method, loss):
    """On values to predict, of which cross-entropy would make nothing"""
    x, y, test_x, test_y = numbers()
    data = (x, y[:, None], test_x, test_y[:, None]) if loss is None else (x, y, test_x, test_y)
    run = fastagg.sim.simulate(
        lambda: nn.Linear(5, 1), data, method=method, loss=loss, split="iid", **SMALL | {"proxy": 50, "lr": 1e-4},
        options={"epochs": 100, "lr": 0.05},
    )  # fmt: skip
    usual = fastagg.sim.simulate(lambda: nn.Linear(5, 1), data, loss=loss, split="iid", **SMALL | {"lr": 1e-4})
    assert run.loss[-1] < 0.95 * usual.loss[-1]


def test_the_server_minimises_a_loss_for_classes_of_the_users_own(digits):
    """FedLAW's losses, and those of the mean of the same models, on the same samples"""
    seen = []

    def ten_times(outputs, y):
        return 10 * nn.functional.cross_entropy(outputs, y, reduction="none")

    def run(loss, lr):
        options = SMALL | {"proxy": 50, "lr": lr, "weight_decay": 0.0, "rounds": 1, "momentum": 0.0}
        options |= {"model": make_net, "data": digits, "method": "fedlaw", "loss": loss, "options": {"epochs": 1}}
        made, own = _config(options)
        sim = Simulation(made, own=own)
        real = sim.server.aggregate
        sim.server.aggregate = lambda *args, **more: seen.append(real(*args, **more)) or seen[-1]
        sim.next_round()
        return seen[-1].losses[0]

    assert run(ten_times, 0.001) == pytest.approx(10 * run(None, 0.01), rel=1e-5)
    with pytest.raises(ValueError, match="sim: the simulator sets loss itself"):
        fastagg.sim.simulate(make_net, digits, method="fedlaw", options={"loss": ten_times}, **SMALL)


@pytest.mark.parametrize(
    ("method", "options", "words"),
    [
        ("feddisco", {}, "feddisco needs label_dist, and these data have no classes but values to predict"),
        ("weiavg", {"by": "entropy"}, "weiavg needs entropies, and these data have no classes"),
        ("feddf", {}, r"the model's output has shape \(50, 1\); expected logits of two classes or more"),
        ("fedbe", {}, r"the model's output has shape \(50, 1\); expected logits of two classes or more"),
    ],
)
def test_methods_for_classes_say_so(method, options, words):
    with pytest.raises(ValueError, match=words):
        fastagg.sim.simulate(
            lambda: nn.Linear(5, 1), numbers(), method=method, options=options, **SMALL | {"proxy": 50}
        )


def test_text():
    rng = torch.Generator().manual_seed(0)
    words = torch.randint(0, 50, (300, 8), generator=rng)
    y = (words[:, 0] < 25).long()

    class Words(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.fc = nn.Embedding(50, 16), nn.Linear(16, 2)

        def forward(self, x):
            return self.fc(self.embedding(x[:, 0]))

    run = fastagg.sim.simulate(
        Words, (words[:200], y[:200], words[200:], y[200:]), **SMALL | {"rounds": 10, "lr": 0.5, "epochs": 5}
    )
    assert run.accuracy[-1] > 0.8


def test_all_by_name_on_the_command_line(tmp_path, capsys, monkeypatch):
    from fastagg.cli import main

    (tmp_path / "mine_for_sim.py").write_text(
        "import torch, numpy as np\n"
        "from fastagg.sim import data\n"
        "from fastagg.extend import GlobalAggregator\n"
        "def net(shape, classes): return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, classes))\n"
        "def numbers():\n    d = data.load('digits')\n    return d.x[:200], d.y[:200], d.test_x, d.test_y\n"
        "def halves(y, K, rng): return np.array_split(rng.permutation(len(y)), K)\n"
        "def wrong(o, y): return (o.argmax(1) != y).float()\n"
        "class Even(GlobalAggregator):\n    'The plain mean.'\n    name, paper, reads = 'even', 'mine', 'weights'\n"
        "    def weigh(self, cohort): return np.full(cohort.K, 1 / cohort.K)\n"
    )
    monkeypatch.chdir(tmp_path)
    names = {"model": "net", "data": "numbers", "partition": "halves", "metric": "wrong", "method": "Even"}
    given = [word for option, name in names.items() for word in (f"--{option}", f"mine_for_sim:{name}")]
    small = ["--clients", "3", "--rounds", "1", "--epochs", "1", "--proxy", "0", "--quiet"]
    assert main(["sim", *given, "--metric-best", "min", *small, "--out", "run"]) == 0
    said = capsys.readouterr().out
    assert "| Even" in said.replace("*", "")
    assert "wrong" in said
    assert main(["sim", "--model", "mine_for_sim:nett", *small, "--out", "other"]) == 2
    assert "has no attribute 'nett'" in capsys.readouterr().err
