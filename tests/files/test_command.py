"""`fastagg aggregate` as a script meets it: what it writes, what it says, and its exit codes."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file

import fastagg
from fastagg._engine.atomic import Temporary
from fastagg._engine.files.command import Bar, key_value
from fastagg.cli import main
from helpers.every_method import cohort
from helpers.model_files import assert_same_model, load_model, read_round, write_raw, write_round


@pytest.fixture
def files(tmp_path):
    center, paths = write_round(tmp_path / "in", *cohort())
    return center, paths, tmp_path / "new.safetensors"


def run(*arguments):
    return main(["aggregate", *map(str, arguments)])


def failed(capsys, code, *arguments):
    assert run(*arguments) == code
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("fastagg aggregate: ")
    assert said.err.count("\n") == 1
    return said.err


def fail_for(name):
    really = Temporary.place

    def place(self, target=None):
        if self.target.name == name:
            raise OSError(5, "Input/output error")
        return really(self, target)

    return place


def test_a_round(files, tmp_path, capsys):
    center, paths, out = files
    (tmp_path / "sizes.json").write_text(json.dumps({f"c{k}": k + 1 for k in range(7)}))
    assert run("--method", "fedawa", "--global", center, *paths, "-o", out, "--sizes", tmp_path / "sizes.json") == 0
    expected = fastagg.fedawa(*read_round(center, paths), [1, 2, 3, 4, 5, 6, 7])
    assert_same_model(load_model(out), dict(expected))
    said = capsys.readouterr()
    assert "fedawa of 7 clients" in said.out
    assert str(out) in said.out
    assert said.err == ""  # no bar where nobody looks


@pytest.mark.parametrize("words", [["--on-bad-client", "drop"], ["--opt", "on_bad_client=drop"]])
def test_a_damaged_file_is_left_out(words, files, capsys):
    center, paths, out = files
    write_raw(paths[1], {"x": 3})
    common = ("--method", "fedavg", "--global", center, *paths, "-o", out)
    for more in ([], ["--on-bad-client", "raise"], [*words, "--on-bad-client", "raise"]):
        assert f"client 1 (id 'c1'): {paths[1]} is not a good safetensors" in failed(capsys, 1, *common, *more)
    assert not out.exists()
    assert run(*common, *words) == 0
    assert "left out: c1" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        run("--help")
    assert "--on-bad-client {raise,drop}" in capsys.readouterr().out


def test_state_options_and_lists(files, tmp_path, capsys):
    center, paths, _ = files
    (tmp_path / "sizes.json").write_text("[1, 2, 3, 4, 5, 6, 7]")
    server = fastagg.FedAWA(layerwise=True, steps=2)
    for _ in range(2):
        expected = server.aggregate(*read_round(center, paths), [1, 2, 3, 4, 5, 6, 7], [f"c{k}" for k in range(7)])
        assert run("--method", "fedawa:steps=2", "--opt", "layerwise=true", "--state", tmp_path / "f.state", "--quiet",
                   "--global", center, *paths, "-o", center, "--sizes", tmp_path / "sizes.json") == 0  # fmt: skip
        assert_same_model(load_model(center), dict(expected))
    assert capsys.readouterr() == ("", "")


def test_what_a_method_wants_besides(files, tmp_path, capsys):
    _, paths, out = files
    dist = torch.rand(7, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    (tmp_path / "info.json").write_text(
        json.dumps({"label_dist": {f"c{k}": row for k, row in enumerate(dist.tolist())}})
    )
    assert run("--method", "feddisco", *paths, "-o", out, "--inputs", tmp_path / "info.json") == 0
    _, clients = read_round(paths[0], paths)
    assert_same_model(load_model(out), dict(fastagg.feddisco(None, clients, label_dist=dist)))
    capsys.readouterr()
    assert "feddisco needs label_dist" in failed(capsys, 1, "--method", "feddisco", *paths, "-o", tmp_path / "b")
    assert "takes no 'label_dist'" in failed(
        capsys, 2, "--method", "fedavg", *paths, "-o", out, "--inputs", tmp_path / "info.json"
    )


def test_report(files, tmp_path, capsys):
    center, paths, out = files
    base = ("--global", center, *paths, "-o", out, "--report")
    assert run("--method", "simprox", *base, tmp_path / "report") == 0
    said = capsys.readouterr().out
    assert all(f"c{k} " in said for k in range(7))
    facts = json.loads((tmp_path / "report" / "report.json").read_text())
    expected = fastagg.simprox(*read_round(center, paths))
    assert facts["weights"] == expected.weights.tolist()
    assert facts["cosine"] == expected.gram.cosine().tolist()
    assert (tmp_path / "report" / "cosine.png").read_bytes()[:4] == b"\x89PNG"
    assert run("--method", "fedavg", *base, tmp_path / "one.png") == 0  # it has no Gram of its own
    assert json.loads((tmp_path / "one.json").read_text())["norms"] == expected.gram.norms().tolist()
    assert run("--method", "fedamp", "--global", center, *paths, "-o", tmp_path / "p", "--report", tmp_path / "p") == 0
    assert len(json.loads((tmp_path / "p" / "report.json").read_text())["weights"]) == 7


def test_dry_run_reads_headers_only(files, capsys):
    center, paths, out = files
    assert run("--method", "simprox", "--global", center, *paths, "-o", out, "--dry-run", "--shard-size", "500") == 0
    said = capsys.readouterr().out
    size = sum(t.nbytes for t in load_model(center).values())
    assert f"{2 * 7 * size / 1000:.3g} kB: {7 * size / 1000:.3g} kB of clients, 2 x, in 1 and 1 pieces" in said
    assert "in 3 files" in said
    assert not out.exists()
    write_raw(paths[2], {"x": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}, b"0000")
    said = failed(capsys, 1, "--method", "simprox", "--global", center, *paths, "-o", out, "--dry-run")
    assert "id 'c2'" in said


def test_errors_and_exit_codes(files, tmp_path, capsys):
    center, paths, out = files
    good = ("--global", center, *paths, "-o", out)
    assert "did you mean 'fedawa'" in failed(capsys, 2, "--method", "fedawaa", *good)
    assert "no option 'lrr'" in failed(capsys, 2, "--method", "fedawa", "--opt", "lrr=1", *good)
    assert "expected key=value" in failed(capsys, 2, "--method", "fedawa", "--opt", "lr", *good)
    assert "only Python" in failed(capsys, 2, "--method", "fedawa", "--opt", "layers=x", *good)
    assert "needs --global" in failed(capsys, 2, "--method", "fedawa", *paths, "-o", out)
    assert "memory='x'" in failed(capsys, 2, "--method", "fedavg", "--memory", "x", *good)
    assert "sizes.json" in failed(capsys, 1, "--method", "fedavg", "--sizes", tmp_path / "sizes.json", *good)
    (tmp_path / "sizes.json").write_text("3")
    assert "expected an object or a list" in failed(
        capsys, 1, "--method", "fedavg", "--sizes", tmp_path / "sizes.json", *good
    )
    assert "name a folder" in failed(capsys, 1, "--method", "fedamp", *good)
    assert "'c0'" in failed(capsys, 1, "--method", "fedavg", *good, paths[0])
    paths[3].write_bytes(paths[3].read_bytes()[:-1])
    assert "c3.safetensors" in failed(capsys, 1, "--method", "fedavg", *good)
    for wrong in (["--method", "fedavg"], ["x.safetensors", "-o", "y"], ["--nonsense"]):
        with pytest.raises(SystemExit) as stopped:
            run(*wrong)
        assert stopped.value.code == 2
    assert not out.exists()


BIG = 10**400


@pytest.mark.parametrize(
    ("code", "says", "arguments"),
    [
        (1, "(id 'c0'): its entry in sizes is 1000", ["--sizes", json.dumps([BIG] * 7)]),
        (
            1,
            "(id 'c6'): its entry in sizes is 1000",
            ["--sizes", json.dumps({f"c{k}": BIG * (k > 5) for k in range(7)})],
        ),
        (1, "(id 'c1'): its entry in sizes is [1, 2]", ["--sizes", "[[1], [1, 2], 1, 1, 1, 1, 1]"]),
        (
            1,
            "(id 'c0'): its entry in sizes is [1], expected a finite number >= 0",
            ["--sizes", '{"c0": [1], "c1": 1, "c2": 1, "c3": 1, "c4": 1, "c5": 1, "c6": 1}'],
        ),
        (1, "its entry in sizes is [1, 2], expected a finite number", ["--sizes", json.dumps([[1, 2]] * 7)]),
        (1, "--sizes is not JSON", ["--sizes", "[1, 2"]),
        (1, "label_dist: expected one for each", ["--method", "feddisco", "--inputs", '{"label_dist": "x"}']),
        (1, "label_dist have shape (4,)", ["--method", "feddisco", "--inputs", '{"label_dist": [[1], [1, 2], 3, 4]}']),
        (
            1,
            "(id 'c0'): its entry in label_dist is [1000",
            ["--method", "feddisco", "--inputs", json.dumps({"label_dist": [[BIG]] * 7})],
        ),
        (
            1,
            "(id 'c0'): its entry in local_steps is {}",
            ["--method", "fednova", "--inputs", json.dumps({"local_steps": [{}] * 7})],
        ),
        (2, "expected a JSON list of the parameters' names", ["--opt", "params=5"]),
        (2, "expected a JSON list of the parameters' names", ["--opt", "params=fc"]),
        (2, "expected a JSON list of the parameters' names", ["--opt", "params=[[1]]"]),
        (2, "option 'lr': a number of 401 digits", ["--method", "fedawa", "--opt", f"lr={BIG}"]),
    ],
)
def test_one_line_for_what_is_not_understood(files, capsys, code, says, arguments):
    center, paths, out = files
    assert says in failed(capsys, code, "--method", "fedavg", "--global", center, *paths, "-o", out, *arguments)
    assert not out.exists()


def test_json_on_the_command_line(files, capsys):
    center, paths, out = files
    sizes = {f"c{k}": k + 1 for k in range(7)}
    expected = dict(fastagg.fedavg(*read_round(center, paths), [1, 2, 3, 4, 5, 6, 7]))
    for given in (json.dumps(sizes), " [1, 2, 3, 4, 5, 6, 7]"):
        assert run("--method", "fedavg", "--global", center, *paths, "-o", out, "--sizes", given) == 0
        assert_same_model(load_model(out), expected)
    info = json.dumps({"local_steps": [1, 2, 3, 4, 5, 6, 7]})
    assert run("--method", "fednova", "--global", center, *paths, "-o", out, "--inputs", info) == 0


def test_the_report_does_not_replace_what_is_read(files, tmp_path, capsys):
    center, paths, out = files
    (tmp_path / "sizes.json").write_text("[1, 2, 3, 4, 5, 6, 7]")
    said = failed(capsys, 1, "--method", "fedavg", "--global", center, *paths, "-o", out, "--sizes",
                  tmp_path / "sizes.json", "--report", tmp_path / "sizes.png")  # fmt: skip
    assert "the report would replace" in said
    assert (tmp_path / "sizes.json").read_text() == "[1, 2, 3, 4, 5, 6, 7]"


def test_a_file_that_is_none(files, tmp_path, capsys):
    center, paths, out = files
    os.mkfifo(tmp_path / "fifo")
    os.mkfifo(tmp_path / "fifo.safetensors")
    os.mkfifo(tmp_path / "fifo.safetensors.index.json")
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "folder" / "model.safetensors.index.json")
    (tmp_path / "shards").mkdir()
    (tmp_path / "shards" / "model.safetensors.index.json").write_text('{"weight_map": {"a": "a.safetensors"}}')
    os.mkfifo(tmp_path / "shards" / "a.safetensors")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "socket"))
    bad = ["/dev/zero", *(tmp_path / name for name in (
        "fifo", "fifo.safetensors", "fifo.safetensors.index.json", "folder", "shards", "socket"))]  # fmt: skip
    for path in bad:
        failed(capsys, 1, "--method", "fedavg", "--global", path, *paths, "-o", out)
        failed(capsys, 1, "--method", "fedavg", "--global", center, *paths, path, "-o", out)
        failed(capsys, 1, "--method", "fedawa", "--global", center, *paths, "-o", out, "--state", path)
        assert not out.exists()
    for path in (tmp_path / "fifo.safetensors", tmp_path / "folder", "/dev/null"):
        failed(capsys, 1, "--method", "fedavg", "--global", center, *paths, "-o", path)


def test_no_folder_named_like_a_file(files, tmp_path, capsys):
    center, paths, _ = files
    for name in ("out.pt", "model.bin", "model.safetensors.index.json"):
        assert "expected a .safetensors file or a folder" in failed(
            capsys, 1, "--method", "fedavg", "--global", center, *paths, "-o", tmp_path / name
        )
        assert not (tmp_path / name).exists()
    (tmp_path / "a.folder").mkdir()
    for name in ("a.folder", "v1.0", "plain"):
        assert run("--method", "fedavg", "--global", center, *paths, "-o", tmp_path / name) == 0
        assert (tmp_path / name / "model.safetensors").exists()


def test_adapters_stay_adapters(tmp_path):
    g, clients = cohort()
    for name, sd in zip(("g", "c0", "c1"), (g, *clients), strict=False):
        (tmp_path / name).mkdir()
        save_file(sd, tmp_path / name / "adapter_model.safetensors", {"format": "pt"})
        (tmp_path / name / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "of": name}))
    base = ("--method", "fedavg", tmp_path / "c0", tmp_path / "c1", "--quiet")
    assert run(*base, "--global", tmp_path / "g", "-o", tmp_path / "new") == 0
    assert sorted(os.listdir(tmp_path / "new")) == ["adapter_config.json", "adapter_model.safetensors"]
    assert json.loads((tmp_path / "new" / "adapter_config.json").read_text())["of"] == "g"
    expected = dict(fastagg.fedavg(None, clients[:2]))
    assert_same_model(load_model(tmp_path / "new" / "adapter_model.safetensors"), expected)
    assert run(*base, "-o", tmp_path / "without") == 0
    assert json.loads((tmp_path / "without" / "adapter_config.json").read_text())["of"] == "c0"
    before = (tmp_path / "g" / "adapter_config.json").read_text()
    assert run(*base, "--global", tmp_path / "g", "-o", tmp_path / "g") == 0
    assert sorted(os.listdir(tmp_path / "g")) == ["adapter_config.json", "adapter_model.safetensors"]
    assert (tmp_path / "g" / "adapter_config.json").read_text() == before
    assert run(*base, "--global", tmp_path / "g", "-o", tmp_path / "plain.safetensors") == 0
    assert "adapter_config.json" not in os.listdir(tmp_path)


def test_a_command_that_is_repeated_completes_the_state(files, tmp_path, capsys, monkeypatch):
    center, paths, _ = files
    command = ("--method", "fedadam", "--global", center, *paths, "-o", center, "--state", tmp_path / "s.state")

    with monkeypatch.context() as patch:
        patch.setattr(Temporary, "place", fail_for("s.state"))
        assert "the new model is written, but" in failed(capsys, 1, *command)
    model = center.read_bytes()
    assert run(*command) == 0
    assert "s.state was completed" in capsys.readouterr().out
    assert center.read_bytes() == model
    assert sorted(os.listdir(tmp_path)) == ["in", "s.state"]


def test_help_teaches(capsys):
    with pytest.raises(SystemExit) as stopped:
        run("--help")
    assert stopped.value.code == 0
    said = capsys.readouterr().out
    assert said.count("fastagg aggregate --method fed") == 3
    assert "Exit codes" in said


INTERRUPTED = """
import sys, fastagg._engine.files.job, fastagg._engine.files.streamed
from fastagg.cli import main
def stop(self, *_): raise KeyboardInterrupt
fastagg._engine.files.streamed.SlabOutputs.mark = stop
sys.exit(main(sys.argv[1:]))
"""


def test_an_interrupt_removes_what_was_begun(files):
    center, paths, out = files
    command = ["aggregate", "--method", "fedavg", "--global", center, *paths, "-o", out]
    done = subprocess.run([sys.executable, "-c", INTERRUPTED, *command], capture_output=True, text=True, check=False)
    assert done.returncode == 130
    assert done.stderr == "fastagg aggregate: stopped; nothing was written\n"
    assert os.listdir(out.parent) == ["in"]


LIGHT = """
import sys
from fastagg.cli import main
assert main(sys.argv[1:]) == 0
heavy = {"sklearn", "matplotlib", "triton", "fastagg.sim"} & set(sys.modules)
assert not heavy, heavy
"""


def test_nothing_of_the_simulator_is_loaded(files):
    center, paths, out = files
    command = ["aggregate", "--method", "fedawa", "--global", center, *paths, "-o", out]
    subprocess.run([sys.executable, "-c", LIGHT, *command], check=True)


def test_values_on_the_command_line():
    given = ("a=1", "a=0.5", "a=true", "a=None", "a=cos", 'a=["x", "y"]', "a=")
    assert [key_value(text)["a"] for text in given] == [1, 0.5, True, None, "cos", ["x", "y"], ""]


@pytest.mark.parametrize("with_tqdm", [True, False])
def test_progress_on_a_terminal(monkeypatch, capsys, with_tqdm):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    if not with_tqdm:
        monkeypatch.setitem(sys.modules, "tqdm", None)
    clock = iter(range(0, 1000, 10))
    monkeypatch.setattr("fastagg._engine.files.command.time.monotonic", lambda: next(clock))
    with Bar(quiet=False) as bar:
        for name in ("Gram", "mix"):
            for done in (1, 2, 3):
                bar(name, done * 10**9, 3 * 10**9)
    said = capsys.readouterr().err
    assert "Gram" in said
    assert "mix" in said
    assert with_tqdm or "mix: 2 GB of 3 GB, 0.2 GB/s" in said
    with Bar(quiet=True) as bar:
        bar("Gram", 1, 2)
    assert capsys.readouterr().err == ""


def test_the_released_fedawa_without_a_state_warns_in_one_line(files, tmp_path, capsys):
    center, paths, out = files
    command = ["--method", "fedawa:variant=released", "--global", center, *paths, "-o", out]
    assert run(*command, "--state", tmp_path / "state") == 0
    assert capsys.readouterr().err == ""
    assert run(*command) == 0
    said = capsys.readouterr().err
    assert said.startswith("fastagg aggregate: fedawa: variant='released' learns over rounds")
    assert "--state" in said
    assert said.count("\n") == 1


@pytest.mark.parametrize("closed", ["/dev/full", "pipe", "nothing"])
def test_a_round_that_is_made_does_not_fail_because_it_cannot_be_told(files, tmp_path, closed):
    center, paths, _ = files
    command = ["aggregate", "--method", "fedavg", "--global", center, *paths, "-o", center]
    shell = (
        " ".join(map(str, [sys.executable, "-m", "fastagg", *command]))
        + {"/dev/full": " > /dev/full", "pipe": " | true", "nothing": " >&-"}[closed]
    )
    done = subprocess.run(["bash", "-o", "pipefail", "-c", shell], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("key", ["a.ia3_l", "a.lora_A.weight"])
def test_an_adapters_configuration_is_not_read_through_a_link(tmp_path, capsys, key):
    (tmp_path / "secret").write_text('{"password": 1}')
    folders = []
    for k in range(2):
        folders.append(tmp_path / f"client{k}")
        folders[-1].mkdir()
        save_file({key: torch.ones(2, 3)}, folders[-1] / "adapter_model.safetensors")
    config = folders[0] / "adapter_config.json"
    config.symlink_to(tmp_path / "secret")
    given = ["--method", "fedavg", *folders, "-o", tmp_path / "new"]
    assert "is a link to a file outside of its folder" in failed(capsys, 1, *given)
    config.unlink()
    config.write_text("[1]")
    assert "expected a JSON object" in failed(capsys, 1, *given)
    config.write_text('{"r": 8}')
    if "lora" in key:  # whose factors are not averaged
        assert "no adapter_config.json beside it" in failed(capsys, 1, *given)
        return
    assert run(*given, "--quiet") == 0
    assert (tmp_path / "new" / "adapter_config.json").read_text() == '{"r": 8}'


def test_a_private_global_model_stays_private(files):
    center, paths, out = files
    os.chmod(center, 0o600)
    assert run("--method", "fedavg", "--global", center, *paths, "-o", out, "--quiet") == 0
    assert os.stat(out).st_mode & 0o777 == 0o600
