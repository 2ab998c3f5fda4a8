"""Runs in one file, and what is made of it."""

from __future__ import annotations

import gzip
import json
import lzma
import os
import shutil

import pytest

from fastagg.sim import archive, report
from helpers.fake_runs import fake


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A comparison: two methods, two seeds"""
    path = tmp_path_factory.mktemp("cmp")
    for label, final in (("fedavg", 0.8), ("fedawa", 0.83)):
        for seed in (0, 1):
            fake(path, label, seed, final=final, rounds=7, clients=4, new=True, data_dir="/somewhere/else")
    return path


def groups_of(runs):
    return report.group(runs)


@pytest.mark.parametrize("name", ["runs.xz", "runs.jsonl.gz"])
def test_the_same_tables(folder, tmp_path, name):
    assert archive.pack(folder, tmp_path / "new" / name) == 4
    runs = archive.unpack(tmp_path / "new" / name)
    direct = groups_of([report.read_run(path) for path in report.runs_in(folder)])
    assert report.markdown(groups_of(runs)) == report.markdown(direct)
    plain = [{k: v for k, v in row.items() if k not in ("rounds_per_second", "aggregation_share")}
             for row in report.table(groups_of(runs))]  # fmt: skip
    assert plain == [{k: row[k] for k in plain[0]} for row in report.table(direct)]  # to the last digit
    assert report.rows(groups_of(runs)) == report.rows(direct)
    assert runs[0].partition == direct["fedavg"][0].partition
    assert [m["round"] for m in runs[0].metrics] == list(range(8))


def test_same_runs_same_bytes_wherever_they_are(folder, tmp_path):
    other = shutil.copytree(folder, tmp_path / "elsewhere")
    os.utime(other, (1, 1))
    for suffix in archive.SUFFIXES:
        archive.pack(folder, tmp_path / f"a{suffix}")
        archive.pack(other, tmp_path / f"b{suffix}")
        assert (tmp_path / f"a{suffix}").read_bytes() == (tmp_path / f"b{suffix}").read_bytes()
    content = lzma.decompress((tmp_path / "a.xz").read_bytes()).decode()
    assert str(folder) not in content
    assert "somewhere" not in content


def test_what_is_large_is_left_out_unless_asked_for(folder, tmp_path):
    archive.pack(folder, tmp_path / "small.xz")
    archive.pack(folder, tmp_path / "heads.xz", ["heads"])
    fields = [{k for run in archive.unpack(tmp_path / f"{name}.xz") for m in run.metrics for k in m}
              for name in ("small", "heads")]  # fmt: skip
    assert fields[1] - fields[0] == {"heads"}
    assert not fields[1] & {"cosine", "model_cosine"}
    assert {"weights", "step", "train_loss", "seconds"} <= fields[0]
    with pytest.raises(ValueError, match="keep=weights; expected some of cosine"):
        archive.pack(folder, tmp_path / "x.xz", ["weights"])
    with pytest.raises(ValueError, match=r"ends in .xz or .gz"):
        archive.pack(folder, tmp_path / "x.zip")


@pytest.mark.parametrize("suffix", archive.SUFFIXES)
def test_damaged_files(folder, tmp_path, suffix):
    path = tmp_path / f"runs{suffix}"
    archive.pack(folder, path)
    good = path.read_bytes()
    for bad in (b"", good[:20], good[: len(good) // 2], good[:-4], good[:100] + b"\0\0\0\0" + good[104:], b"x" * 500):
        path.write_bytes(bad)
        with pytest.raises(ValueError, match=r"pack (the runs again|a folder)"):
            archive.unpack(path)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(ValueError, match="not a regular file"):
        archive.unpack(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda run: run.pop("config"), "config holds a NoneType"),
        (lambda run: run.update(metrics=[]), "it has no rounds"),
        (lambda run: run["metrics"][2].update(weights="x"), "it holds weights = 'x'"),
        (lambda run: run["metrics"][2].update(clients=[9]), "client 9 of 4"),
        (lambda run: run["partition"].update(counts=[[1], [1, 2]]), "partition holds counts"),
        (lambda run: run.pop("run"), "no object with the name of a run"),
    ],
)
def test_a_run_that_is_none(folder, tmp_path, change, message):
    archive.pack(folder, tmp_path / "runs.gz")
    lines = [json.loads(line) for line in gzip.decompress((tmp_path / "runs.gz").read_bytes()).splitlines()]
    change(lines[1])
    (tmp_path / "runs.gz").write_bytes(gzip.compress("\n".join(map(json.dumps, lines)).encode()))
    with pytest.raises(ValueError, match=f"run 2 cannot be read .*{message}"):
        archive.unpack(tmp_path / "runs.gz")


@pytest.mark.parametrize(("suffix", "compress"), [(".xz", lzma.compress), (".gz", gzip.compress)])
def test_a_file_that_becomes_too_large(tmp_path, monkeypatch, suffix, compress):
    """It is not decompressed to its end"""
    (tmp_path / f"bomb{suffix}").write_bytes(compress(b"0" * (32 << 20)))
    monkeypatch.setattr(archive, "LIMIT", 1 << 20)
    read = []
    pieces = archive._pieces

    def counted(file, suffix):
        for piece in pieces(file, suffix):
            read.append(len(piece))
            yield piece

    monkeypatch.setattr(archive, "_pieces", counted)
    with pytest.raises(ValueError, match="more than 1,048,576 bytes when it is decompressed"):
        archive.unpack(tmp_path / f"bomb{suffix}")
    assert sum(read) <= 2 * archive.PIECE
    assert max(read) <= archive.PIECE


def test_tables_and_figures_by_one_command(folder, tmp_path, capsys):
    assert archive.main(["pack", str(folder), str(tmp_path / "cmp.xz")]) == 0
    assert "cmp.xz: 4 runs, " in capsys.readouterr().out
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- runs: cmp -->\nold\n<!-- end of runs: cmp -->\nafter\n")
    command = ["tables", str(tmp_path), "--page", str(page), "--figures", "differences", "step"]
    assert archive.main(command) == 0
    table = (tmp_path / "cmp.md").read_text()
    assert "| against fedavg" in table
    text = page.read_text()
    assert text == f"before\n<!-- runs: cmp -->\n\n{table.strip()}\n\n<!-- end of runs: cmp -->\nafter\n"
    assert {path.name for path in tmp_path.iterdir()} == {
        "cmp.xz", "cmp.md", "page.md", "cmp-differences.png", "cmp-step.png",
    }  # fmt: skip
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert archive.main(command) == 0
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_what_the_command_refuses(tmp_path, capsys):
    assert archive.main(["tables", str(tmp_path)]) == 2
    assert "has no file of runs" in capsys.readouterr().err
    assert archive.main(["pack", str(tmp_path), str(tmp_path / "x.xz")]) == 2
    assert "no run of the simulator" in capsys.readouterr().err
    page = tmp_path / "page.md"
    page.write_text("<!-- runs: cmp -->\nno end")
    with pytest.raises(ValueError, match="without <!-- end of runs: cmp -->"):
        archive.publish(page, {"cmp": "table"})
