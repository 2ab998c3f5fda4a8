"""A server of rounds whose clients arrive one by one, and somebody who kills it (SIGKILL) at given moments.

python -m benchmarks.killed_rounds FOLDER ROUNDS CLIENTS runs the server; whatever kills it, the next one goes on.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

import fastagg
from fastagg._engine import saved

METHOD = "fedadam"  # which remembers tensors: a round that counted twice would show in all that follow


def serve(folder: Path, rounds: int, clients: int) -> None:
    """Each client's model is known from the round and its number, so a round is what it is whenever it is computed"""
    server = fastagg.aggregator(METHOD, lr=0.1)
    at = {"round": 0, "model": {"w": torch.zeros(500), "seen": torch.zeros(clients)}, "server": None}
    if (folder / "server").exists():
        at = saved.load(folder / "server")
        server.load_state_dict(at["server"])
    print("began", flush=True)
    while at["round"] < rounds:
        r = at["round"]
        round = server.resume_round(folder / "spill", memory=1)
        if round is None:
            round = server.round(at["model"], memory=1, spill=folder / "spill")
        print("resumed", len(round.clients), flush=True)
        with round:
            for k in range(clients):
                if k not in round.clients:
                    w = torch.sin(torch.arange(500.0) * (k + 1) + r)
                    round.add(k, {"w": w, "seen": torch.eye(clients)[k]}, size=k + 1)
            model = round.finish()
            at = {"round": r + 1, "model": dict(model), "server": server.state_dict()}
            saved.save(folder / "server", at)
    server.resume_round(folder / "spill")  # removes what is left of the last one, if the process was killed just then
    print("done", flush=True)


@dataclass
class Kill:
    after: float  # seconds since the server began
    finished: int  # rounds
    waiting: int  # clients on the disk


def rounds_of(folder: Path, rounds: int, clients: int, moments: list[float]) -> tuple[dict, list[Kill]]:
    """The last model, of a server that is killed at these moments, in seconds; and the kills that met it"""
    folder.mkdir()
    moments, kills = list(reversed(moments)), []
    while True:
        process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.killed_rounds", folder, str(rounds), str(clients)],
            stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        assert process.stdout is not None
        assert process.stdout.readline() == "began\n"
        after = moments.pop() if moments else None
        try:
            said, _ = process.communicate(timeout=after)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            said, _ = process.communicate()
        if said.endswith("done\n"):
            break
        if process.returncode != -signal.SIGKILL or after is None:
            raise RuntimeError(f"the server stopped by itself, after {len(kills)} kills")
        finished = saved.load(folder / "server")["round"] if (folder / "server").exists() else 0
        kills.append(Kill(after, finished, len(list((folder / "spill").glob("client-*")))))
    at = saved.load(folder / "server")
    left = [path.name for path in (folder / "spill").iterdir()]
    if at["round"] != rounds or left:
        raise RuntimeError(f"it ended after round {at['round']} of {rounds}, and left {left}")
    return at["model"], kills


if __name__ == "__main__":
    serve(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
