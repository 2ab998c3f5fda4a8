"""Makes runs, in this process or several at a time in processes of their own, and shows how far they are."""

from __future__ import annotations

import _thread
import multiprocessing
import os
import queue
import signal
import sys
import threading
import time
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, cast

from fastagg._engine.distributed.peers import Peers
from fastagg.sim import run
from fastagg.sim.config import Config
from fastagg.sim.objects import Own
from fastagg.sim.scripts import calls_unguarded

GRACE = 5.0  # seconds that a run has to finish its summary when it is stopped
EVERY = 5.0  # seconds between lines of progress where there is no terminal
SIGNALS = (signal.SIGINT, signal.SIGTERM)
UNGUARDED = (
    'processes for several at a time would run this script again; put its call under `if __name__ == "__main__":`'
)
OnRound = Callable[[dict[str, Any], Config], object]


class Job(NamedTuple):
    """A run to make"""

    options: Config
    folder: Path
    own: Own | None = None


Todo = Sequence[Job]


class Signals:
    """What came of the signals that end programs"""

    first = 0  # the number of the first one


@contextmanager
def stoppable() -> Iterator[Signals]:
    """In this block SIGTERM is like Ctrl-C: the first of either raises KeyboardInterrupt, the next ends this process
    and those it started at once."""
    seen = Signals()
    if threading.current_thread() is not threading.main_thread():
        yield seen
        return

    def handler(number: int, _: Any) -> NoReturn:
        if not seen.first:
            seen.first = number
            raise KeyboardInterrupt
        for child in multiprocessing.active_children():
            child.kill()
        os._exit(128 + number)

    former = {each: signal.signal(each, handler) for each in SIGNALS}
    try:
        yield seen
    finally:
        for each, before in former.items():
            signal.signal(each, before)


def make_runs(
    todo: Todo, progress: bool, jobs: int | None, peers: Peers | None = None, callbacks: Sequence[OnRound] = ()
) -> bool:
    """Makes every run that is not finished. True if Ctrl-C, or what is like it, ended it.

    jobs        processes that make runs at the same time; None: as many as the cores allow
    callbacks   called in this process after each round of any of them, with its record and the run's options
    """
    if not todo:
        return False
    wanted = jobs
    if wanted is None:
        wanted = (os.cpu_count() or 1) // max(job.options.threads for job in todo)
    wanted = max(1, min(wanted, len(todo)))
    if wanted > 1 and (why := why_not_sent(todo)):
        if jobs is not None:
            raise ValueError(f"jobs={jobs}: other processes cannot have {why}; define it in a module, or pass jobs=1")
        wanted = 1
    if wanted > 1 and calls_unguarded():
        if jobs is not None:
            raise ValueError(f"jobs={jobs}: {UNGUARDED}, or pass jobs=1")
        warnings.warn(f"runs are made one after another: {UNGUARDED}", stacklevel=4)  # at compare
        wanted = 1
    with Progress(todo, progress and (peers is None or peers.rank == 0), callbacks) as bar:
        try:
            if wanted > 1:
                in_processes(todo, wanted, bar)
                return False
            for job in todo:
                shown = partial(bar.show, job)
                ended = run.simulate(
                    job.options, job.folder, resume=True, own=job.own, on_round=shown, peers=peers
                )  # fmt: skip
                if ended["interrupted"]:
                    return True
                bar.end(job)
            return False
        except KeyboardInterrupt:
            return True


def why_not_sent(todo: Todo) -> str:
    """What other processes cannot be sent: an object of a notebook, for one; empty if they can be sent all"""
    for own in {id(job.own): job.own for job in todo if job.own is not None}.values():
        for name, value in vars(own).items():
            try:
                sent = bytes(ForkingPickler.dumps(value if name != "data" else None))  # data are tensors
            except Exception as error:  # whatever its class raises
                return f"{name}={value!r} ({error})"
            if b"__main__" in sent and not hasattr(sys.modules["__main__"], "__file__"):  # a file they would load
                return f"{name}={value!r} (it is defined at a prompt)"
    return ""


def in_processes(todo: Todo, jobs: int, bar: Progress) -> None:
    """Raises what a run raises, or KeyboardInterrupt; then, too, no process is left."""
    waiting = deque(todo)
    working: dict[Connection, Any] = {}  # processes by the connections to them
    at: dict[Connection, Job] = {}  # the run that each of them makes
    try:
        for _ in range(jobs):
            start(working)
        for ours in working:
            at[ours] = give(ours, waiting)
        while at:
            for ours in cast(list[Connection], wait(list(at), timeout=1)):
                kind, value = received(ours, working[ours], at[ours])
                if kind == "error":
                    raise value
                if kind == "round":
                    bar.show(at[ours], value)
                    continue
                bar.end(at.pop(ours))
                if waiting:
                    at[ours] = give(ours, waiting)
    finally:
        stop(working)


def start(working: dict[Connection, Any]) -> None:
    """A process for runs. It does not see the signals that end programs, which a terminal sends to all of them: this
    process tells it to stop."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    child = context.Process(target=in_child, args=(theirs,), daemon=True)
    resource_tracker.ensure_running()  # here, since it would unblock the signals below
    former = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # the child inherits this, so it holds from its start
    try:
        child.start()
        working[ours] = child
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, former)
    theirs.close()


def give(ours: Connection, waiting: deque[Job]) -> Job:
    job = waiting.popleft()
    with suppress(BrokenPipeError):  # received() finds out
        ours.send(job)
    return job


def received(ours: Connection, child: Any, job: Job) -> tuple[str, Any]:
    try:
        return ours.recv()
    except (EOFError, OSError) as error:
        child.join()
        code = child.exitcode
        how = f"was ended by signal {-code}" if code < 0 else f"ended with code {code}"
        raise ChildProcessError(
            f"{job.folder}: the process of this run {how}; the same command continues it"
        ) from error


def stop(working: dict[Connection, Any]) -> None:
    """Tells processes to stop, and waits for a moment; those that are still there are killed, which loses one round"""
    try:
        for ours in working:
            with suppress(OSError):
                ours.send(None)
        end = time.monotonic() + GRACE
        for child in working.values():
            child.join(max(0, end - time.monotonic()))
    finally:
        for ours, child in working.items():
            child.kill()
            child.join()
            ours.close()


def in_child(theirs: Connection) -> None:
    """Makes the runs that come, until the parent says stop or is gone"""
    sys.unraisablehook = unraised
    given: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
    busy = threading.Lock()  # held while a run is made
    threading.Thread(target=listen, args=(theirs, given, busy), daemon=True).start()
    with suppress(KeyboardInterrupt, BrokenPipeError):
        try:
            while (job := given.get()) is not None:
                with busy:
                    run.simulate(
                        job.options, job.folder, resume=True, own=job.own,
                        on_round=lambda record: theirs.send(("round", record)),
                    )  # fmt: skip
                theirs.send(("end", None))
        except (ValueError, TypeError, OSError, ImportError) as error:
            theirs.send(("error", error))
        except Exception:  # of the user's code: its class may not be sent, and where it was raised matters
            theirs.send(("error", RuntimeError(f"a run in another process failed: {traceback.format_exc()}")))


def unraised(what: Any) -> None:
    """Where Python cannot raise the KeyboardInterrupt of listen(), as in a callback, there is nothing to say"""
    if what.exc_type is not KeyboardInterrupt:
        sys.__unraisablehook__(what)


def listen(theirs: Connection, given: queue.SimpleQueue, busy: threading.Lock) -> None:
    try:
        while (job := theirs.recv()) is not None:
            given.put(job)
    except (EOFError, OSError):
        pass
    except Exception as error:  # of an object that this process cannot have
        theirs.send(("error", ValueError(f"other processes cannot have what a run is made of: {error}; pass jobs=1")))
    if busy.acquire(blocking=False):  # no run is being made, and none begins any more
        os._exit(0)
    _thread.interrupt_main()
    given.put(None)
    time.sleep(GRACE)
    os._exit(1)


class Progress:
    """How far runs are, and how long it will take: a bar on a terminal, else a line on stderr every few seconds"""

    def __init__(self, todo: Todo, wanted: bool, callbacks: Sequence[OnRound] = ()) -> None:
        self.at = {job.folder: 0 for job in todo}  # rounds
        self.last = {job.folder: job.options.rounds for job in todo}
        self.callbacks = callbacks
        self.shown: dict[Path, str] = {}
        self.made, self.ended = 0, 0
        self.begun: set[Path] = set()
        self.first = 0.0  # when the first round was made: from there on time is measured
        self.said = time.monotonic()
        self.wanted, self.bar = wanted and sys.stderr is not None, None
        if self.wanted and sys.stderr is not None and sys.stderr.isatty():
            from tqdm import tqdm

            # no rate: those of runs side by side add up, and would not be the rounds/s of a run in the report
            form = "{desc}: {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} rounds [{elapsed}{postfix}]"
            self.bar = tqdm(total=sum(self.last.values()), desc=runs_of(len(todo)), bar_format=form, dynamic_ncols=True)

    def show(self, job: Job, record: dict[str, Any]) -> None:
        """A round was made"""
        for callback in self.callbacks:
            callback(record, job.options)
        folder, o = job.folder, job.options
        name = f"{o.label}/{o.seed}" if len(self.at) > 1 else o.label
        self.made += 1
        self.begun.add(folder)
        self.first = self.first or time.monotonic()
        self.at[folder] = record["round"]  # a run that goes on does not begin at 0
        accuracy = record["personal_accuracy"] if record["accuracy"] is None else record["accuracy"]
        text = "-" if accuracy is None else f"{100 * accuracy:.1f} %" if o.metric is None else f"{accuracy:.4g}"
        self.shown[folder] = f"{name} round {record['round']}: {text}"
        self.say()

    def end(self, job: Job) -> None:
        """A run is finished, perhaps early"""
        self.at[job.folder] = self.last[job.folder]
        self.ended += 1
        self.shown.pop(job.folder, None)

    def say(self) -> None:
        left = self.left()
        parts = [*([f"about {duration(left)} left"] if left else []), *self.shown.values()]
        if self.bar is not None:
            self.bar.n = sum(self.at.values())
            self.bar.set_postfix_str(", ".join(parts))
        elif self.wanted and time.monotonic() - self.said >= EVERY:
            self.said = time.monotonic()
            done = f"{sum(self.at.values())} of {sum(self.last.values())} rounds"
            runs = f", {self.ended} of {runs_of(len(self.at))}" if len(self.at) > 1 else ""
            print(f"{done}{runs}; {', '.join(parts)}", file=sys.stderr, flush=True)

    def left(self) -> float | None:
        """Seconds, if rounds go on as they did; None until a run has made its second round"""
        timed = self.made - len(self.begun)  # of each run's first round it is not known when it began
        if timed < 1:
            return None
        return (time.monotonic() - self.first) / timed * (sum(self.last.values()) - sum(self.at.values()))

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *exception: object) -> None:
        if self.bar is not None:
            self.bar.close()


def runs_of(number: int) -> str:
    return f"{number} run{'s' * (number != 1)}"


def duration(seconds: float) -> str:
    """In a unit that leaves two digits or so"""
    for unit, size in (("h", 3600), ("min", 60)):
        if seconds >= 1.5 * size:
            return f"{seconds / size:.1f} {unit}" if unit == "h" else f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"
