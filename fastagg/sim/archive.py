"""Runs of a comparison in one small file, and tables and figures made from such files.

python -m fastagg.sim.archive pack runs/cmp docs/results/cmp.xz           the runs below a folder, as one file
python -m fastagg.sim.archive pack runs/cmp cmp.xz --keep cosine heads    with matrices that are left out otherwise
python -m fastagg.sim.archive tables docs/results                         tables and figures of all files in a folder
python -m fastagg.sim.archive tables docs/results --page docs/results.md  and the tables into a page

A file has one line of JSON per run: its options, summary, partition and the records of its rounds. It is compressed by
xz or gzip, as its name says, and has the same bytes for the same runs.
"""

from __future__ import annotations

import argparse
import gzip
import io
import json
import lzma
import sys
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from fastagg._engine import atomic
from fastagg._engine.regular import open_regular
from fastagg.sim import report
from fastagg.sim.report import Run
from fastagg.sim.report.reading import CONFIG, PARTITION, SUMMARY, assembled, fitting, parsed, round_of
from fastagg.sim.statistics import CONFIDENCE

SUFFIXES = (".xz", ".gz")
LARGE = ("cosine", "model_cosine", "heads")  # left out unless asked for
LIMIT = 1 << 30  # bytes that a file may have when it is decompressed
PIECE = 1 << 20
DIGITS = 6  # that numbers keep, except for what is compared
EXACT = {"accuracy", "personal_accuracy"}
FIGURES = ("differences", "accuracy", "step", "spread")  # that a document shows


def pack(folder: Path, target: Path, keep: Sequence[str] = ()) -> int:
    """Writes all runs below the folder into one file, and returns their number.

    keep   which of the large fields of a round (cosine, model_cosine, heads) are stored as well
    """
    _check_name(target)
    if unknown := sorted(set(keep) - set(LARGE)):
        raise ValueError(f"keep={', '.join(unknown)}; expected some of {', '.join(LARGE)}")
    lines = []
    for path in report.runs_in(Path(folder)):
        run, where = report.read_run(path), path.relative_to(folder).as_posix()
        lines.append(json.dumps(_slim(run, where, keep), separators=(",", ":"), sort_keys=True) + "\n")
    text = "".join(lines).encode()
    if len(text) > LIMIT:
        raise ValueError(f"{folder}: its runs have {len(text):,} bytes, more than {LIMIT:,}; pack fewer of them")
    target.parent.mkdir(parents=True, exist_ok=True)
    atomic.write(target, _compressed(text, target))
    return len(lines)


def _slim(run: Run, where: str, keep: Sequence[str]) -> dict[str, Any]:
    left_out = set(LARGE) - set(keep)
    metrics = [
        {k: v if k in EXACT else _rounded(v) for k, v in m.items() if k not in left_out and v is not None}
        for m in run.metrics
    ]
    config = {k: v for k, v in run.config.items() if k != "data_dir"}  # a place on the machine that made the run
    return {"run": where, "config": config, "summary": run.summary, "partition": run.partition, "metrics": metrics}


def _rounded(value: Any) -> Any:
    if isinstance(value, list):
        return [_rounded(v) for v in value]
    if isinstance(value, dict):
        return {k: _rounded(v) for k, v in value.items()}
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value


def _compressed(text: bytes, target: Path) -> bytes:
    if target.suffix == ".xz":
        return lzma.compress(text, preset=9)
    packed = io.BytesIO()
    with gzip.GzipFile(filename="", mode="wb", fileobj=packed, mtime=0, compresslevel=9) as file:
        file.write(text)
    return packed.getvalue()


def unpack(path: Path) -> list[Run]:
    """The runs in a file; ValueError says what is wrong with it"""
    path = Path(path)
    runs = []
    for number, line in enumerate(_decompressed(path).splitlines(), 1):
        try:
            runs.append(_run(parsed(line.decode()), path))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path}: run {number} cannot be read ({error}); pack the runs again") from error
    if not runs:
        raise ValueError(f"{path} has no runs; pack a folder with some")
    return runs


def _run(value: Any, path: Path) -> Run:
    parts = {"config": CONFIG, "summary": SUMMARY, "partition": PARTITION}
    if not isinstance(value, dict) or not isinstance(value.get("run"), str):
        raise ValueError("it is no object with the name of a run")
    found = {name: fitting(value.get(name), forms, name, "this is no run") for name, forms in parts.items()}
    records = value.get("metrics")
    if not isinstance(records, list) or not records:
        raise ValueError("it has no rounds")
    clients = len(found["partition"].get("counts") or [])
    rounds = {round_of(record, clients): record for record in records}
    metrics = [rounds[r] for r in sorted(rounds)]
    return assembled(path / value["run"], found["config"], found["summary"], found["partition"], metrics)


def _check_name(path: Path) -> None:
    if path.suffix not in SUFFIXES:
        raise ValueError(f"{path}: expected a name that ends in {' or '.join(SUFFIXES)}")


def _decompressed(path: Path) -> bytes:
    """All of a file, whatever it is, in bounded memory"""
    _check_name(path)
    found = io.BytesIO()
    try:
        with open_regular(path) as file:
            for piece in _pieces(file, path.suffix):
                found.write(piece)
                if found.tell() > LIMIT:
                    raise ValueError(f"it has more than {LIMIT:,} bytes when it is decompressed")
    except (OSError, ValueError, EOFError, lzma.LZMAError, zlib.error) as error:
        raise ValueError(f"{path} cannot be read ({error}); pack the runs again") from error
    return found.getvalue()


def _pieces(file: Any, suffix: str) -> Iterator[bytes]:
    if suffix == ".gz":
        with gzip.GzipFile(fileobj=file) as opened:
            while piece := opened.read(PIECE):
                yield piece
        return
    decompressor = lzma.LZMADecompressor(memlimit=256 << 20)
    while not decompressor.eof:
        more = file.read(PIECE) if decompressor.needs_input else b""
        if decompressor.needs_input and not more:
            raise EOFError("it ends too early")
        yield decompressor.decompress(more, PIECE)
    if decompressor.unused_data or file.read(1):
        raise ValueError("something follows its end")


def regenerate(folder: Path, out: Path, figures: Sequence[str] = FIGURES) -> dict[str, str]:
    """Of every file of runs in a folder, out/NAME.md, the tables, and out/NAME-FIGURE.png; returns the tables by NAME.

    figures   what a document shows of a report's figures, by their names (differences, accuracy, loss, step, ...)
    """
    from fastagg.sim import page, plots  # which needs matplotlib

    folder, out = Path(folder), Path(out)
    paths = sorted(path for path in folder.iterdir() if path.suffix in SUFFIXES)
    if not paths:
        raise ValueError(f"{folder} has no file of runs (*{', *'.join(SUFFIXES)})")
    if len(names := [path.stem for path in paths]) > len(set(names)):
        raise ValueError(f"{folder} has two files of the same name: {', '.join(map(str, paths))}; delete one")
    out.mkdir(parents=True, exist_ok=True)
    tables = {}
    for path in paths:
        groups = report.group(unpack(path))
        tables[path.stem] = report.markdown(groups)
        atomic.write(out / f"{path.stem}.md", tables[path.stem])
        pictures = page.Pictures(out, f"{path.stem}-")
        shown = plots.every_figure(groups, report.differences(groups), report.averaged(groups), CONFIDENCE)
        for drawn in shown:
            if drawn.kind in figures:
                pictures.written(drawn)
    return tables


def publish(page: Path, tables: dict[str, str]) -> list[str]:
    """Puts each table that a page has a place for between `<!-- runs: NAME -->` and `<!-- end of runs: NAME -->`;
    returns their names"""
    with open_regular(page) as file:
        text = file.read().decode()
    done = []
    for name, table in tables.items():
        begin, end = f"<!-- runs: {name} -->\n", f"<!-- end of runs: {name} -->"
        before, found, rest = text.partition(begin)
        _, closed, after = rest.partition(end)
        if found and not closed:
            raise ValueError(f"{page} has {begin.strip()} without {end}")
        if found:
            text = f"{before}{begin}\n{table.strip()}\n\n{end}{after}"
            done.append(name)
    atomic.write(page, text)
    return done


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    packing = commands.add_parser("pack", help="put all runs below a folder into one file")
    packing.add_argument("folder", type=Path, help="a comparison, or any folder with runs")
    packing.add_argument("target", type=Path, help="the file, *.xz or *.gz")
    packing.add_argument("--keep", nargs="+", default=[], choices=LARGE, help="large fields to be stored as well")
    showing = commands.add_parser("tables", help="make tables and figures of the files in a folder")
    showing.add_argument("folder", type=Path, help="a folder with files of runs")
    showing.add_argument("--out", type=Path, help="where to (default: the same folder)")
    showing.add_argument("--figures", nargs="+", default=FIGURES, help="which figures (default: %(default)s)")
    showing.add_argument("--page", type=Path, help="a document with places for the tables")
    args = parser.parse_args(argv)
    try:
        if args.command == "pack":
            count = pack(args.folder, args.target, args.keep)
            print(f"{args.target}: {count} run{'s' * (count > 1)}, {args.target.stat().st_size:,} bytes")
        else:
            tables = regenerate(args.folder, args.out or args.folder, args.figures)
            placed = publish(args.page, tables) if args.page else []
            for name in tables:
                print(f"{name}: {'in ' + str(args.page) if name in placed else 'written'}")
    except (ValueError, OSError, ImportError) as error:
        print(f"fastagg.sim.archive: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
