"""A round of 20 ResNet-18s, aggregated by fastagg and by the PyTorch code people usually write: time and memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from itertools import islice

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from benchmarks import measure, models
from benchmarks.torch_code import CONTESTANTS

NAMES = {"fedavg": "FedAvg", "fedawa": "FedAWA", "krum": "Krum"}
MOST = 7  # measured rounds; one at least
FEW = 7  # clients, the fewest that Krum can be told to expect two attackers among
ALL = 60  # times the time of PyTorch's FedAvg is that of all methods of PyTorch here: 0.08 of 4.5 s on a quiet machine
SHARE = 0.8  # of one core, less than which says that other programs had it: what is timed here computes all the time


def compare(console: Console, model: str, K: int, seconds: float) -> tuple[Table, list[str]]:
    """The table, and what it says in words.

    seconds   after which no further round is measured. Where one would take longer, there are fewer clients
    """
    torch.manual_seed(0)
    global_sd = models.MODELS[model]()
    columns = TextColumn("{task.description:<40}"), BarColumn(), TimeElapsedColumn()
    contests = [CONTESTANTS[name] for name in NAMES]
    memory = {}
    with Progress(*columns, console=console, transient=True) as bar:
        made = iter(bar.track(models.clients(global_sd, K), K, description="making client models"))
        client_sds = list(islice(made, FEW))
        contests[0].usual(global_sd, client_sds)  # PyTorch's own beginnings are not to count
        if ALL * measure.timed(lambda: contests[0].usual(global_sd, client_sds)) * K / FEW < seconds:
            client_sds += made
        bar.update(bar.task_ids[0], visible=False)
        for c in bar.track(contests, description="do both give the same answer?"):
            ours = c.fastagg(global_sd, client_sds)
            theirs, used = measure.with_memory(lambda c=c: c.usual(global_sd, client_sds))
            c.agree(ours, theirs)
            del ours, theirs
            memory[c.name] = measure.peak_extra_memory(lambda c=c: c.fastagg(global_sd, client_sds)), used
        jobs: dict[str, Callable[[], object]] = {"read": measure.read_once(client_sds)}
        for c in contests:
            jobs[c.name] = lambda c=c: c.fastagg(global_sd, client_sds)
            jobs[c.name + " torch"] = lambda c=c: c.usual(global_sd, client_sds)
        task = bar.add_task("timing, in turns and random order", total=1)
        began, computed = time.monotonic(), time.process_time()
        times = measure.interleaved(jobs, _until(seconds, bar, task), warm=())  # all have run
        quiet = time.process_time() - computed >= SHARE * (time.monotonic() - began)
    said = words(times, torch.get_num_threads()) if quiet else [BUSY]
    if len(client_sds) < K:
        said.append(f"There were {len(client_sds)} clients, not {K}, for {K} would have taken too long here.")
    return table_of(model, global_sd, len(client_sds), times, memory, quiet), said


def _until(seconds: float, bar: Progress, task: TaskID) -> Iterator[int]:
    """Rounds, as many as there is time for"""
    begun = time.monotonic()
    for made in range(MOST):
        spent = time.monotonic() - begun
        if made and spent * (made + 1) / made > seconds:
            break
        bar.update(task, completed=max(made / MOST, spent / seconds if made else 0))
        yield made
    bar.update(task, completed=1)


def table_of(model: str, global_sd: dict, K: int, times: dict, memory: dict, quiet: bool) -> Table:
    size = sum(v.numel() * v.element_size() for v in global_sd.values())
    title = f"a round of {K} x {model}, {K * size / 1e9:.2f} GB"
    table = Table(title=title, title_style="bold", title_justify="left")
    table.add_column("")
    for heading in ("fastagg", "PyTorch", "faster", "extra memory", "PyTorch's"):
        table.add_column(heading, justify="right", style="bold green" if heading == "faster" else "")
    for name, shown in NAMES.items():
        ours, theirs = (times[name + kind].median for kind in ("", " torch"))
        ratio = f"{measure.faster(theirs, ours)} x" if quiet else "?"
        table.add_row(shown, ms(ours), ms(theirs), ratio, *map(mb, memory[name]))
    return table


# Threads that wait for each other, as PyTorch's do, then wait for other programs: the ratio would be theirs
BUSY = (
    "Other programs used this machine at the same time: the times say little, and how many times faster is left out. "
    "The memory is right. `make bench` measures more, on a quiet machine."
)


def words(times: dict, threads: int) -> list[str]:
    R, rounds = times["read"].median, len(times["read"].seconds)
    parts = [
        f"{shown} {times[name].median / R:.1f} against {times[name + ' torch'].median / R:.0f}"
        for name, shown in NAMES.items()
    ]
    return [
        f"Time in reads of the clients' memory, fastagg against PyTorch's usual code: {', '.join(parts)}. FedAvg is a "
        "plain sum: there is least to gain.",
        f"A read takes {ms(R)} here, by {threads} threads. Medians of {rounds} round{'s' * (rounds > 1)}; `make bench` "
        "measures more of them, and the best PyTorch code too.",
    ]


def ms(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.0f} ms" if seconds >= 0.01 else f"{seconds * 1e3:.2f} ms"


def mb(count: int | None) -> str:
    return "?" if count is None else f"{count / 1e6:.0f} MB"
