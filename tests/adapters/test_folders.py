"""Adapters in folders, as PEFT writes them, and `fastagg aggregate` on them."""

from __future__ import annotations

import json
import math
import os
import re

import pytest
import torch
from safetensors.torch import load_file, save_file

import fastagg
from fastagg._engine.adapters.peft import config_with, scaling_of
from fastagg._engine.files.command import _size
from fastagg.cli import main
from helpers.adapters import PREFIX, SHAPES, adapter, cohort, dense

CONFIG = {"peft_type": "LORA", "lora_alpha": 16, "base_model_name_or_path": "some/model", "target_modules": ["q_proj"]}
RANKS = (4, 8, 2)


def write(folder, sd, rank, **more):
    folder.mkdir(parents=True)
    save_file(sd, folder / "adapter_model.safetensors", {"format": "pt"})
    (folder / "adapter_config.json").write_text(json.dumps({**CONFIG, "r": rank, **more}))
    return folder


@pytest.fixture
def round_(tmp_path):
    """A global adapter of rank 4, and clients of ranks 4, 8 and 2: folders, and state dicts"""
    g = adapter(4)
    clients = [adapter(rank, seed=1 + k) for k, rank in enumerate(RANKS)]
    paths = [write(tmp_path / f"c{k}", sd, rank) for k, (sd, rank) in enumerate(zip(clients, RANKS, strict=True))]
    return write(tmp_path / "g", g, 4), paths, g, clients


def run(*arguments):
    return main(["aggregate", *map(str, arguments)])


def same(found, expected):
    assert set(found) == set(expected)
    assert all(torch.equal(found[key], value) for key, value in expected.items())


@pytest.mark.parametrize("form", ["rank", "exact", "separate"])
def test_folders_are_what_their_tensors_and_configs_are(round_, form):
    center, paths, g, clients = round_
    found = fastagg.lora.aggregate(center, paths, [1, 2, 3], form=form)
    expected = fastagg.lora.aggregate(g, clients, [1, 2, 3], form=form, scaling=lambda r: 16 / r)
    same(found, expected)
    assert torch.equal(found.weights, expected.weights)
    assert found.config["base_model_name_or_path"] == "some/model"


@pytest.mark.parametrize("form", ["rank", "exact", "separate"])
def test_the_command(round_, tmp_path, capsys, form):
    center, paths, *_ = round_
    sizes = json.dumps({"c0": 1, "c1": 2, "c2": 3})
    out = tmp_path / "new"
    assert run("--method", "fedawa", "--global", center, *paths, "-o", out, "--sizes", sizes, "--lora", form) == 0
    expected = fastagg.lora.aggregate(center, paths, [1, 2, 3], form=form, client_ids=["c0", "c1", "c2"])
    said = capsys.readouterr().out
    assert "fedawa of 3 clients" in said
    assert ("leaves out at most" in said) == (form == "rank")
    assert sorted(os.listdir(out)) == ["adapter_config.json", "adapter_model.safetensors"]
    same(load_file(out / "adapter_model.safetensors"), expected)
    new = fastagg.lora.load(out)
    assert {m: scaling_of(new.config)(m, r) for m, r in expected.ranks.items()} == pytest.approx(expected.scaling)
    assert new.config["r"] == {"rank": 4, "exact": 14, "separate": 8}[form]
    assert new.config["target_modules"] == ["q_proj"]
    again = fastagg.aggregate_files("fedawa", center, paths, out, sizes=[1, 2, 3], lora=form)  # replaces it
    assert again.weights.tolist() == expected.weights.tolist()
    assert again.truncation == expected.truncation


def test_the_command_takes_adapters_for_what_they_are(round_, tmp_path):
    center, paths, *_ = round_
    assert run("--method", "fedavg", *paths, "-o", tmp_path / "a", "--quiet") == 0
    same(load_file(tmp_path / "a" / "adapter_model.safetensors"), fastagg.lora.aggregate(None, paths, method="fedavg"))
    assert run("--method", "fedawa", *paths, "-o", tmp_path / "b", "--rank", 3, "--quiet") == 0
    expected = fastagg.lora.aggregate(None, paths, rank=3, client_ids=["c0", "c1", "c2"])
    same(load_file(tmp_path / "b" / "adapter_model.safetensors"), expected)
    assert run("--method", "krum", "--opt", "f=0", "--global", center, *paths, "-o", center, "--quiet") == 0
    assert fastagg.lora.load(center).config["r"] == 4


def test_state_report_and_plan(round_, tmp_path, capsys):
    center, paths, *_ = round_
    state, out = tmp_path / "state", tmp_path / "new"
    given = ["--method", "fedawa", "--opt", "variant=released", "--global", center, *paths, "-o", out]
    assert run(*given, "--dry-run") == 0
    assert "3 tensors in 3 layers" in capsys.readouterr().out
    assert not out.exists()
    server = fastagg.aggregator("fedawa", variant="released")
    for _ in range(2):
        assert run(*given, "--state", state, "--report", tmp_path / "report", "--quiet") == 0
        expected = fastagg.lora.aggregate(center, paths, method=server, client_ids=["c0", "c1", "c2"])
        same(load_file(out / "adapter_model.safetensors"), expected)
    assert json.loads((tmp_path / "report" / "report.json").read_text())["clients"] == ["c0", "c1", "c2"]


@pytest.mark.parametrize("given", [["--rank", "3"], ["--lora", "exact"], ["--lora", "separate"], []], ids=str)
@pytest.mark.parametrize("with_global", [True, False])
def test_a_plan_says_how_much_is_written(round_, tmp_path, capsys, given, with_global):
    center, paths, *_ = round_
    command = ["--method", "fedavg", *(["--global", center] if with_global else []), *paths, "-o", tmp_path / "new"]
    assert run(*command, *given, "--dry-run") == 0
    plan = capsys.readouterr().out
    assert run(*command, *given, "--quiet") == 0
    size = sum(value.nbytes for value in load_file(tmp_path / "new" / "adapter_model.safetensors").values())
    assert f"write   1 x {_size(size)} in 1 file" in plan


def test_an_adapter_is_one_file(round_, tmp_path, capsys):
    """However large: PEFT looks for no other"""
    center, paths, *_ = round_
    given = ["--method", "fedavg", "--global", center, *paths, "-o", tmp_path / "new", "--shard-size", "4KB"]
    assert run(*given, "--dry-run") == 0
    assert "in 1 file to" in capsys.readouterr().out
    assert run(*given, "--quiet") == 0
    assert sorted(os.listdir(tmp_path / "new")) == ["adapter_config.json", "adapter_model.safetensors"]


def test_progress_and_what_was_read(round_, tmp_path):
    center, paths, _, clients = round_
    said = []
    found = fastagg.aggregate_files("fedawa", center, paths, tmp_path / "new", progress=lambda *step: said.append(step))
    size = sum(value.nbytes for sd in clients for value in sd.values())
    assert [step for step in said if step[1] == step[2]] == [("Gram", size, size), ("new factors", size, size)]
    assert (found.passes, found.bytes_read) == (2, 2 * size)


def test_clients_that_cannot_be_read(round_, tmp_path, capsys):
    center, paths, *_ = round_
    (paths[1] / "adapter_config.json").unlink()
    (paths[2] / "adapter_model.safetensors").write_bytes(b"nothing")
    given = ["--method", "fedawa", "--global", center, *paths, "-o", tmp_path / "new"]
    assert run(*given) == 1
    assert "adapter_config.json" in capsys.readouterr().err
    assert run(*given, "--on-bad-client", "drop") == 0
    assert "left out: c1, c2" in capsys.readouterr().out
    with pytest.raises(fastagg.InputError, match=r"client 1: .*no adapter_config.json"):
        fastagg.lora.aggregate(center, paths)
    assert set(fastagg.lora.aggregate(center, paths, on_bad_client="drop").dropped) == {1, 2}


@pytest.mark.parametrize(("change", "why"), [
    ({"peft_type": "IA3"}, "peft_type is IA3; only LORA"),
    ({"use_dora": True}, "use_dora: the weights of DoRA are scaled"),
    ({"lora_alpha": "16"}, "lora_alpha is '16', expected a number"),
    ({"lora_alpha": math.nan}, "lora_alpha is nan"),
    ({"lora_alpha": 10**400}, "lora_alpha is 1000"),
    ({"lora_alpha": 0}, "scaling of module .* is 0.0, which leaves nothing"),
    ({"alpha_pattern": {"(a+)+$": 3}}, r"alpha_pattern has .*only names of modules"),
    ({"alpha_pattern": {r"layers\.\d\.q_proj": 3}}, r"alpha_pattern has .*only names of modules"),
    ({"alpha_pattern": {"q_proj": "3"}}, "lora_alpha is '3'"),
    ({"r": 8}, r"key '.*layers.0.q_proj.lora_A.weight' has rank 2, and its config says 8"),
    ({"rank_pattern": {"0.v_proj": 3}}, r"key '.*layers.0.v_proj.lora_A.weight' has rank 2, and its config says 3"),
    ({"r": "2"}, "r is '2', expected an integer"),
    ({"rank_pattern": {"q_proj": 2.5}}, "r is 2.5, expected an integer"),
    ({"rank_pattern": ["q_proj"]}, r"rank_pattern is \['q_proj'\], expected an object"),
    ({"alpha_pattern": ["q_proj"]}, r"alpha_pattern is \['q_proj'\], expected an object"),
    ({"use_rslora": "false"}, "use_rslora is 'false', expected true or false"),
    ({"target_parameters": ["experts"]}, "target_parameters: adapters of parameters"),
    ({"kasa_config": {"beta": 1e-4}}, "kasa_config: KaSA multiplies with lora_diag"),
    ({"use_bdlora": {"nblocks": 2}}, "use_bdlora: a factor of blocks on a diagonal"),
    ({"monteclora_config": {"num_samples": 8}}, "monteclora_config: MonteCLoRA samples"),
])  # fmt: skip
def test_configs_that_are_refused(tmp_path, change, why):
    sd = adapter(2)
    good, bad = write(tmp_path / "a", sd, 2), write(tmp_path / "b", sd, 2, **change)
    with pytest.raises(fastagg.InputError, match=rf"client 1: .*{why}"):
        fastagg.lora.aggregate(None, [good, bad], method="fedavg")


def test_ranks_that_other_regular_expressions_say_are_not_compared(tmp_path):
    path = write(tmp_path / "a", adapter(2), 8, rank_pattern={r".*_proj|(a+)+": 2})
    assert set(fastagg.lora.aggregate(None, [path], method="fedavg").ranks.values()) == {2}


@pytest.mark.parametrize(("change", "why"), [
    ({"peft_type": "lora"}, ""), ({"peft_type": None}, ""),
    ({"lora_alpha": None}, "lora_alpha is None"), ({"use_dora": True}, "use_dora: the weights of DoRA"),
    ({"peft_type": "ADALORA"}, "peft_type is ADALORA; only LORA"),
], ids=str)  # fmt: skip
def test_the_command_averages_no_factors_because_of_what_all_configs_say(tmp_path, capsys, change, why):
    """They would be taken for models, and A and B averaged separately"""
    names = (".weight", "") if change.get("peft_type") == "ADALORA" else ("", "")  # AdaLoRA's have none
    sds = [{key.replace(*names): value for key, value in adapter(2, seed=k).items()} for k in range(3)]
    paths = [write(tmp_path / f"c{k}", sd, 2, **change) for k, sd in enumerate(sds)]
    if change == {"peft_type": None}:
        for path in paths:
            config = json.loads((path / "adapter_config.json").read_text())
            (path / "adapter_config.json").write_text(json.dumps({k: v for k, v in config.items() if k != "peft_type"}))
    code = run("--method", "fedavg", *paths, "-o", tmp_path / "new")
    said = capsys.readouterr()
    if why:
        assert (code, why in said.err, (tmp_path / "new").exists()) == (1, True, False)
    else:
        assert (code, "leaves out at most" in said.out) == (0, True)


def test_where_a_new_adapter_cannot_be_written(round_, tmp_path, capsys):
    center, paths, *_ = round_
    given = ["--method", "fedawa", "--global", center, *paths]
    assert run(*given, "-o", tmp_path / "new.safetensors") == 1
    assert "name a folder, which gets adapter_model.safetensors" in capsys.readouterr().err
    assert run(*given, "-o", paths[0]) == 1
    assert "is a client" in capsys.readouterr().err
    assert run("--method", "median", "--global", center, *paths, "-o", tmp_path / "new") == 1
    assert "elements of an adapter's update" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_scalings_of_modules():
    config = {**CONFIG, "r": 8, "alpha_pattern": {"layers.0.q_proj": 32, r"v\_proj": 4}}
    assert scaling_of(config)(PREFIX + "layers.1.q_proj", 8) == 2
    assert scaling_of(config)(PREFIX + "layers.0.q_proj", 8) == 4
    assert scaling_of(config)(PREFIX + "layers.0.v_proj", 4) == 1
    assert scaling_of({**config, "use_rslora": True})(PREFIX + "layers.1.q_proj", 4) == 8


def test_the_first_pattern_that_fits_counts():
    patterns = {"^layers.0.q_proj": 2, "0.q_proj$": 3, "q_proj": 4, "layers.1.q_proj": 5, "^v_proj": 6, "v_proj": 7}
    scaling = scaling_of({**CONFIG, "alpha_pattern": patterns})
    alphas = [scaling(PREFIX + name, 1) for name in
              ("layers.0.q_proj", "more.layers.0.q_proj", "layers.1.q_proj", "q_proj", "layers.0.v_proj", "v_proj",
               "a_v_proj")]  # fmt: skip
    assert alphas == [2, 3, 4, 4, 7, 6, 16]


def test_a_new_config_knows_modules_whose_names_end_with_others():
    """A pattern of layers.0.q would be taken for vision.layers.0.q as well"""
    ranks = {f"{PREFIX}{m}": r for m, r in (("layers.0.q", 2), ("vision.layers.0.q", 8), ("layers.0.v", 8), ("q", 3))}
    found = config_with(CONFIG, ranks, {m: 2.0 / r for m, r in ranks.items()})
    assert found["rank_pattern"] == {r"vision\.layers\.0\.q": 8, r"layers\.0\.q": 2, "q": 3}
    assert (found["r"], found["lora_alpha"], found["alpha_pattern"]) == (8, 2, {})


@pytest.mark.parametrize("use_rslora", [False, True])
def test_a_new_config_says_every_modules_rank_and_scaling(use_rslora):
    ranks = {PREFIX + m: r for m, r in zip(SHAPES, (3, 7, 3), strict=True)}
    scalings = {PREFIX + m: s for m, s in zip(SHAPES, (2.0, 1.5, 0.25), strict=True)}
    found = config_with({**CONFIG, "use_rslora": use_rslora}, ranks, scalings)
    assert found["r"] == 3
    assert list(found["rank_pattern"].values()) == [7]
    for module, scaling in scalings.items():
        assert scaling_of(found)(module, ranks[module]) == pytest.approx(scaling, rel=1e-12)


def test_a_new_config_targets_the_modules_of_all_clients():
    """PEFT leaves out the factors of modules that the config does not name"""
    _, clients = cohort(2)
    odd = {key: value for key, value in clients[1].items() if "layers.1" in key}

    def targets(given):
        config = {**CONFIG, **given}
        rest = {key: value for key, value in clients[0].items() if key not in odd}
        some = [fastagg.lora.Adapter(sd, config) for sd in (rest, odd)]
        return fastagg.lora.aggregate(None, some, method="fedavg").config["target_modules"]

    assert targets({"target_modules": ["v_proj", "q_proj"]}) == ["v_proj", "q_proj"]
    assert targets({"target_modules": ["0.q_proj", "v_proj"]}) == ["0.q_proj", "layers.1.q_proj", "v_proj"]
    assert targets({"layers_to_transform": [0]}) == ["layers.1.q_proj", "q_proj"]
    assert targets({"target_modules": "all-linear"}) == "all-linear"
    pattern = targets({"target_modules": r"layers\.0\..*"})
    assert [m for m in (*SHAPES, "layers.2.q_proj") if re.fullmatch(pattern, m)] == list(SHAPES)


def test_saving(tmp_path):
    sd = {**adapter(2), "x.bias": torch.tensor(3.0)}
    with pytest.raises(fastagg.InputError, match="no config: pass config="):
        fastagg.lora.save(sd, tmp_path / "new")
    path = fastagg.lora.save(sd, tmp_path / "new", {**CONFIG, "target_modules": {"b", "a"}})
    same(load_file(path), sd)
    loaded = fastagg.lora.load(tmp_path / "new")
    assert loaded.config["target_modules"] == ["a", "b"]
    result = fastagg.lora.aggregate(None, [loaded] * 2, method="fedavg", form="exact")
    fastagg.lora.save(result, tmp_path / "exact")
    new = fastagg.lora.load(tmp_path / "exact")
    scalings = {m: scaling_of(new.config)(m, 4) for m in result.ranks}
    expected = dense(sd, 8.0)
    for module, update in dense(new, scalings).items():
        torch.testing.assert_close(update, expected[module])
