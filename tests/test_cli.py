from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

import fastagg
from fastagg import _cpu
from fastagg.cli import main
from fastagg.sim import choices, data, models


def run(*args, **env):
    return subprocess.run(
        [sys.executable, "-m", "fastagg", *args], capture_output=True, text=True, env={**os.environ, **env}, check=False
    )


def test_info():
    done = run("info")
    assert done.returncode == 0
    for word in (fastagg.__version__, "simd", "threads", "backends", "reference", "cpu"):
        assert word in done.stdout
    facts = json.loads(run("info", "--json").stdout)
    assert facts["backends"]["reference"] == "available"
    assert facts.keys() == fastagg.info().keys()


def test_simd_can_be_lowered_but_not_raised():
    best, levels = fastagg.info()["simd_best"], _cpu.simd_levels()
    assert json.loads(run("info", "--json", FASTAGG_SIMD="baseline").stdout)["simd"] == "baseline"
    assert json.loads(run("info", "--json", FASTAGG_SIMD=levels[-1]).stdout)["simd"] == best


def test_unknown_simd_level_is_said():
    done = run("info", FASTAGG_SIMD="sse9")
    assert done.returncode != 0
    assert "FASTAGG_SIMD='sse9': expected auto, baseline, " in done.stderr


HELP = [("--help",), ("--version",), (), ("info", "--help"), ("methods", "--help")]
HELP += [(command, "--help") for command in ("aggregate", "sim", "compare", "reproduce")]
HELP += [("reproduce",)]  # which lists the recipes


def test_help_is_printed_without_torch():
    code = f"""
import sys
from fastagg.cli import main
for argv in {HELP!r}:
    try:
        main(list(argv))
    except SystemExit as end:
        assert end.code == 0, argv
    assert "torch" not in sys.modules and "numpy" not in sys.modules, argv
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert f"fastagg {fastagg.__version__}\n" in done.stdout
    assert "usage: fastagg compare" in done.stdout


def test_version():
    assert run("--version").stdout == f"fastagg {fastagg.__version__}\n"


def test_choices_that_help_lists_are_those_there_are():
    assert choices.DATASETS == data.DATASETS
    assert models.MODELS == choices.MODELS


def test_methods(capsys):
    assert main(["methods"]) == 0
    text = capsys.readouterr().out
    for method in fastagg.list_methods():
        assert f"\n{method.name} " in "\n" + text
        assert method.paper in text
    assert "options: a=0.5, b=0.1, metric='kl'" in text
    assert "in each round: local_steps" in text
    assert main(["methods", "feddisco", "krum"]) == 0
    text = capsys.readouterr().out
    assert fastagg.feddisco.__doc__ in text
    assert "Krum" in text or "krum" in text
    assert "Defaults: a=0.5, b=0.1, metric='kl', target='uniform', normalize=None" in text
    assert main(["methods", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert [m["name"] for m in listed] == [m.name for m in fastagg.list_methods()]
    [fednova] = [m for m in listed if m["name"] == "fednova"]
    assert fednova["options"]["momentum"] == 0.0
    assert [spec["name"] for spec in fednova["round_inputs"]] == ["local_steps"]
    assert main(["methods", "krumm"]) == 2
    assert "no method 'krumm'; did you mean 'krum'?" in capsys.readouterr().err


def test_a_reader_that_leaves_is_no_error():
    script = f"{sys.executable} -m fastagg methods | head -1"
    done = subprocess.run(script, shell=True, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    assert done.stdout.startswith(f"{fastagg.list_methods()[0].name} ")


def test_help_and_no_command(capsys):
    assert main([]) == 2
    assert "info" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["info", "--help"])
    assert "FASTAGG_SIMD" in capsys.readouterr().out
