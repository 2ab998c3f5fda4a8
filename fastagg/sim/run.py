"""A run in its folder: options, metrics, checkpoint, summary; made from the start, or continued after a stop."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from fastagg._engine import atomic
from fastagg._engine.distributed.peers import Peers
from fastagg._engine.saved import load, save
from fastagg.sim import attack, config, data, report
from fastagg.sim.config import Config
from fastagg.sim.report import read_metrics
from fastagg.sim.simulation import Simulation


def simulate(
    options: Config, out: Path, *, resume: bool = False, dataset: data.Dataset | None = None,
    on_round: Callable[[dict[str, Any]], None] | None = None, peers: Peers | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Runs to the end, or to Ctrl-C, and returns the summary. Everything is in the folder `out`, which is locked
    meanwhile; a crash loses at most one round. resume continues what is there, to the curve that an undisturbed run
    would have had. With peers, all of them call this; the first one records, and returns the summary."""
    threads, out = torch.get_num_threads(), Path(out)
    torch.set_num_threads(options.threads)
    try:
        with ExitStack() as held:
            if peers is None:
                sim, resumed = _begin(options, out, resume, dataset, held)
                return _simulate(options, sim, resumed, out, on_round)
            with peers.together():  # nobody goes on, and writes, before all have read
                sim, resumed = _begin(options, out, resume, dataset, held, peers)
                peers.agree({"step": "begin", "round": str(sim.round)})
            try:
                ended = _simulate(options, sim, resumed, out, on_round) if sim.first else _follow(options, sim, resumed)
            except Exception as error:
                peers.tell(error)
            if not ended["interrupted"]:
                peers.agree({"step": "end"})  # all is written
            return ended
    finally:
        torch.set_num_threads(threads)


def _begin(
    options: Config, out: Path, resume: bool, dataset: data.Dataset | None, held: ExitStack, peers: Peers | None = None
) -> tuple[Simulation, bool]:
    """The run at its beginning, or where a former one ended, which is true then. Nothing is written; the process that
    will write has locked the folder."""
    saved = out / "checkpoint.safetensors"
    check_folder(options, out, resume)  # before data are read, which may take a while
    sim = Simulation(options, dataset, peers)
    if sim.first:
        out.mkdir(parents=True, exist_ok=True)
        held.enter_context(atomic.Lock(out / "run.lock", "this run"))
        check_folder(options, out, resume)  # again: it may have been begun meanwhile
    resumed = resume and saved.exists()
    if resumed:
        try:
            sim.load_state_dict(load(saved))
        except (ValueError, TypeError, KeyError, AttributeError, IndexError, RuntimeError) as error:
            what = f"{type(error).__name__}: {error}" if not isinstance(error, ValueError) else error
            raise ValueError(f"{saved} cannot be continued ({what}); delete {out}, or name another folder") from error
    return sim, resumed


def check_folder(options: Config, out: Path, resume: bool) -> None:
    """A run that is there has these options, and is to be resumed"""
    if (out / "config.json").exists():
        if not resume:
            raise ValueError(f"{out} holds a run already; resume it (--resume), or name another folder (--out)")
        check_same(options, config.read_json(out / "config.json"), out)


def _follow(options: Config, sim: Simulation, resumed: bool) -> dict[str, Any]:
    """What the other processes do while the first is in _simulate"""
    if not resumed:
        sim.state_dict()
    try:
        while sim.round < options.rounds:
            sim.next_round()
            sim.state_dict()
    except KeyboardInterrupt:
        return {"interrupted": True}
    except attack.Diverged:
        pass
    return {"interrupted": False}


def _simulate(options: Config, sim: Simulation, resumed: bool, out: Path, on_round) -> dict[str, Any]:
    metrics, saved = out / "metrics.jsonl", out / "checkpoint.safetensors"
    planned = options.rounds
    if resumed:
        keep_rounds(metrics, sim.round)
        planned = max(planned, config.read_json(out / "config.json").rounds)  # it may become longer, never shorter
        atomic.write_json(out / "config.json", options.to_json() | {"rounds": planned})
    else:
        atomic.write_json(out / "config.json", options.to_json())  # first: no checkpoint without its options
        metrics.unlink(missing_ok=True)
        counts, shares = sim.parts.counts.tolist(), [len(rows) for rows in sim.parts.test]
        facts = {"counts": counts, "test_sizes": shares, "proxy": len(sim.proxy[0]), "classes": sim.data.classes}
        facts["attackers"] = sim.attackers
        atomic.write_json(out / "partition.json", facts)
        append(metrics, {"round": 0, "clients": [], "seconds": {}} | sim.evaluated())
        save(saved, sim.state_dict())

    def conclude(**more: Any) -> dict[str, Any]:
        summary = {
            "label": options.label, "method": options.method, "seed": options.seed,
            **report.summarise(read_metrics(metrics), planned),
            "training": "batched" if sim.trainer.batched else "one by one",
            "versions": {
                "fastagg": version("fastagg"), "torch": torch.__version__, "python": platform.python_version(),
            },
        } | more  # fmt: skip
        atomic.write_json(out / "summary.json", summary)
        return summary

    conclude()  # so that a run that is killed has a name
    ended: dict[str, Any] = {"interrupted": False}
    try:
        while sim.round < options.rounds:
            record = sim.next_round()
            append(metrics, record)
            save(saved, sim.state_dict())
            if on_round is not None:
                on_round(record)
    except KeyboardInterrupt:
        ended = {"interrupted": True}
    except attack.Diverged:  # a result too: this attack ends training, and leaves no accuracy to speak of
        ended |= {"finished": True, "diverged": True, "accuracy": None}
    return conclude(**ended)


def check_same(new: Config, old: Config, out: Path) -> None:
    """A run is continued with the options it began with; it may be made longer, and its data may have moved."""
    free = {"rounds", "data_dir"}
    a, b = new.to_json(), old.to_json()
    for name in a:
        if name not in free and a[name] != b[name]:
            raise ValueError(f"{out} was begun with {name}={b[name]!r}, not {a[name]!r}; name another folder (--out)")


def _no_link(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


def append(metrics: Path, record: dict[str, Any]) -> None:
    with atomic.naming(metrics), open(metrics, "a", opener=_no_link) as file:
        file.write(json.dumps(record) + "\n")
        file.flush()
        os.fsync(file.fileno())


def keep_rounds(metrics: Path, last: int) -> None:
    """Drops what was recorded after the checkpoint, up to which every round must be there"""
    records = [record for record in read_metrics(metrics) if record["round"] <= last]
    first = next((r for r, record in enumerate(records) if record["round"] != r), len(records))
    if first <= last:
        raise ValueError(
            f"{metrics} lacks round {first}, though the checkpoint is of round {last}; "
            f"delete {metrics.parent}, or name another folder"
        )
    atomic.write(metrics, "".join(json.dumps(record) + "\n" for record in records))
