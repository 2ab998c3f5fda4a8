from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

import fastagg
from fastagg.cli import main


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
    best = fastagg.info()["simd_best"]
    assert json.loads(run("info", "--json", FASTAGG_SIMD="baseline").stdout)["simd"] == "baseline"
    assert json.loads(run("info", "--json", FASTAGG_SIMD="avx512").stdout)["simd"] == best


def test_unknown_simd_level_is_said():
    done = run("info", FASTAGG_SIMD="sse9")
    assert done.returncode != 0
    assert "FASTAGG_SIMD='sse9': expected baseline, avx2 or avx512" in done.stderr


def test_help_and_no_command(capsys):
    assert main([]) == 2
    assert "info" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["info", "--help"])
    assert "FASTAGG_SIMD" in capsys.readouterr().out
