"""examples/flower as people run it: `flwr run` against a SuperLink, with a simulation and with SuperNodes of their own.

Everything is on loopback and in processes of its own, in a session that is ended whatever happens.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="needs flwr: make test-integrations")
pytest.importorskip("sklearn", reason="needs scikit-learn: make test-integrations")
import httpx

pytestmark = pytest.mark.integration
ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
README = ROOT / "examples/flower/README.md"
RAY_WAS_LATE = "The current node timed out during startup"
LIMIT = 3600.0  # seconds before a test counts as hung, however slow the machine is

# What the test lays over the example's client: one that sends NaN, and one that never ends its training
FAULTS = """
import time
from pathlib import Path
from flwr.app import ArrayRecord
from flwr.clientapp import ClientApp
from fastagg_digits.client_app import app as good

def fault(message, context, call):
    kind = context.node_config.get("fault", "")
    if kind.startswith("die"):
        Path(kind[4:]).touch()
        time.sleep(3600)
    reply = call(message, context)
    if kind == "nan" and message.content["config"]["server-round"] >= 2 and "arrays" in reply.content:
        model = reply.content["arrays"].to_torch_state_dict()
        reply.content["arrays"] = ArrayRecord({key: value * float("nan") for key, value in model.items()})
    return reply

app = ClientApp(mods=[fault])
app.train()(good)
app.evaluate()(good)
"""


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class Federation:
    """A SuperLink, and the processes around it"""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder, self.stack, self.port = folder, stack, free_port()
        self.deadline = time.monotonic() + LIMIT
        self.logs: list[Path] = []
        path = os.pathsep.join([str(BIN), os.environ["PATH"]])
        self.env = {
            **os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "FLWR_HOME": str(folder / "home"),
            "FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1", "OMP_NUM_THREADS": "1",
            "RAY_USAGE_STATS_ENABLED": "0", "no_proxy": "127.0.0.1,localhost", "NO_PROXY": "127.0.0.1,localhost",
        }  # fmt: skip
        (folder / "home").mkdir()
        (folder / "home" / "config.toml").write_text(
            f'[superlink]\ndefault = "test"\n[superlink.test]\naddress = "127.0.0.1:{self.port}"\ninsecure = true\n'
        )

    def start(self, name: str, *command: str, cwd: Path | None = None) -> subprocess.Popen:
        self.logs.append(self.folder / f"{name}.log")
        with self.logs[-1].open("wb") as log:
            process = subprocess.Popen(
                [str(BIN / command[0]), *command[1:]], env=self.env, cwd=cwd or self.folder, stdin=subprocess.DEVNULL,
                stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        self.stack.callback(end, process)
        return process

    def superlink(self, *options: str) -> None:
        self.start(
            "superlink", "flower-superlink", "--insecure", "--host", "127.0.0.1", "--port", str(self.port),
            "--disable-runtime-dependency-installation", *options,
        )  # fmt: skip
        self.wait(self.is_up, "the SuperLink did not start")

    def is_up(self) -> bool:
        try:
            return httpx.get(f"http://127.0.0.1:{self.port}/health", timeout=1, trust_env=False).is_success
        except httpx.HTTPError:
            return False

    def run(self, app: Path, *options: str, **config: object) -> None:
        given = " ".join(f"{key.replace('_', '-')}={json.dumps(value)}" for key, value in config.items())
        self.command = ["flwr", "run", str(app), "test", "--stream", "--run-config", given, *options]
        self.last_run = self.start("run", *self.command)

    def wait(self, done, what: str) -> None:
        while not done():
            if time.monotonic() > self.deadline:
                pytest.fail(f"{what}\n{self.said()}")
            time.sleep(0.2)

    def report(self, path: Path) -> dict[int, dict]:
        """What the server has written at the end of the run. A run that ended because Ray did not start within its 30
        seconds, as it happens on a busy machine, is started again."""
        while not path.exists():
            self.wait(lambda: path.exists() or self.last_run.poll() is not None, "the server did not finish")
            time.sleep(1)  # the run's end may be seen first
            if not path.exists():
                log = (self.folder / "run.log").read_text(errors="replace")
                assert RAY_WAS_LATE in log, f"the run ended without a report\n{self.said()}"
                self.last_run = self.start("run", *self.command)
        time.sleep(0.2)  # it may be writing
        return {int(r): numbers for r, numbers in json.loads(path.read_text()).items()}

    def said(self) -> str:
        return "\n".join(f"--- {log.name}\n{log.read_text(errors='replace')[-4000:]}" for log in self.logs)


def end(process: subprocess.Popen) -> None:
    """The process, and all that it started"""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@pytest.fixture
def federation(tmp_path):
    with ExitStack() as stack:
        yield Federation(tmp_path, stack)


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README.read_text(), re.DOTALL)


def accuracies(log: str) -> list[list[float]]:
    """Of the global model, round by round, as each run's log ends"""
    ends = [text.split("{", 1)[1] for text in log.split("ServerApp-side Evaluate Metrics:")[1:]]
    return [[float(x) for x in re.findall(r"\d+: \{'accuracy': '([\d.e+-]+)'\}", end)] for end in ends]


def copied(folder: Path) -> Path:
    return shutil.copytree(ROOT / "examples" / "flower", folder / "app", ignore=shutil.ignore_patterns("__pycache__"))


@pytest.fixture(scope="module")
def faulty(tmp_path_factory):
    """A run of which one client sends NaN and one has just died. The SuperLink misses its heartbeat for up to a minute
    before it calls the node dead: other tests run meanwhile."""
    folder = tmp_path_factory.mktemp("faulty")
    app = copied(folder)
    (app / "fastagg_digits" / "faults.py").write_text(FAULTS)
    toml = app / "pyproject.toml"
    toml.write_text(toml.read_text().replace("fastagg_digits.client_app:app", "fastagg_digits.faults:app"))
    with ExitStack() as stack:
        federation = Federation(folder, stack)
        federation.superlink()
        training, report = folder / "training", folder / "report.json"
        nodes = []
        for k, fault in enumerate(["", "", "nan", f"die {training}"]):
            nodes.append(
                federation.start(
                    f"node{k}", "flower-supernode", "--insecure", "--superlink", f"127.0.0.1:{federation.port}",
                    "--host", "127.0.0.1", "--port", str(free_port()),
                    "--node-config", f'partition-id={k} num-partitions=4 fault="{fault}"',
                )
            )  # fmt: skip
        link = federation.logs[0]
        federation.wait(lambda: link.read_text().count("Activated node_id") == 4, "the SuperNodes did not connect")
        federation.run(app, num_server_rounds=3, min_nodes=3, fraction_evaluate=0.0, timeout=LIMIT, report=str(report))
        federation.wait(training.exists, "the client that is to die did not begin to train")
        end(nodes[3])
        yield federation, report


@pytest.fixture(scope="module")
def processes(tmp_path_factory):
    """The processes of the README, at work: they start one for every message, and mostly wait"""
    with ExitStack() as stack:
        federation = Federation(tmp_path_factory.mktemp("processes"), stack)
        ports = {port: str(free_port()) for port in ("8000", "9094", "9095")}
        ports["8000"] = str(federation.port)

        def here(text: str) -> str:
            for port, free in ports.items():
                assert port in README.read_text()
                text = re.sub(rf"\b{port}\b", free, text)
            return text

        [connection] = blocks("toml")
        (federation.folder / "home" / "config.toml").write_text(here(connection))
        [link, *nodes, run] = here(blocks("sh")[1]).splitlines()
        federation.start("superlink", *shlex.split(link))
        federation.wait(federation.is_up, "the SuperLink did not start")
        for k, node in enumerate(nodes):
            federation.start(f"node{k}", *shlex.split(node))
        yield federation, federation.start("run", *shlex.split(run), cwd=ROOT)


@pytest.mark.usefixtures("processes", "faulty")  # these go on beside it
def test_simulation(federation, tmp_path):
    pytest.importorskip("ray", reason="needs flwr[simulation]: make test-integrations")
    federation.superlink("--simulation")
    report = tmp_path / "report.json"
    nodes = "num-supernodes=3 client-resources-num-cpus=1"
    federation.run(
        copied(tmp_path),
        "--federation-config",
        nodes,
        num_server_rounds=3,
        min_nodes=3,
        report=str(report),
        method="cwfedavg",
        timeout=LIMIT,
    )
    rounds = federation.report(report)
    assert sorted(rounds) == [0, 1, 2, 3]
    assert rounds[3]["accuracy"] > 0.6 > rounds[0]["accuracy"], federation.said()
    assert rounds[3]["accuracy-at-clients"] > rounds[3]["accuracy"]  # where each has its own model and its own data
    assert len(rounds[3]["fastagg-clients"]) == 3
    assert rounds[3]["fastagg-dropped"] == []


def end_all(home: Path) -> None:
    """What `flwr run` leaves behind: the SuperLink that it started, and its processes"""
    mine = f"FLWR_HOME={home}\0".encode()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if mine in (process / "environ").read_bytes():
                os.kill(int(process.name), signal.SIGKILL)


def test_the_processes_of_the_readme(processes):
    federation, run = processes
    federation.wait(lambda: run.poll() is not None, "the run did not end")
    [[first, *_, last]] = accuracies((federation.folder / "run.log").read_text()) or [[0, 0]]
    assert last > 0.4 > first, federation.said()
    federation.stack.close()


def test_supernodes_of_which_one_sends_nan_and_one_dies(faulty):
    federation, report = faulty
    link = federation.logs[0]
    rounds = federation.report(report)
    assert sorted(rounds) == [0, 1, 2, 3]
    assert [len(rounds[r].get("fastagg-clients", ())) for r in (1, 2, 3)] == [3, 2, 2], federation.said()
    [sent_nan] = rounds[2]["fastagg-dropped"]
    assert rounds[3]["fastagg-dropped"] == [sent_nan]
    assert sent_nan in rounds[1]["fastagg-clients"]
    assert rounds[3]["accuracy"] > 0.6 > rounds[0]["accuracy"], rounds
    federation.wait(lambda: "Finished task" in link.read_text(), "the run did not end")
    federation.stack.close()  # the next test is to be alone


# Before the commands of the README, which are run as they stand there. Flower waits 15 seconds for its own SuperLink.
AGAIN = """
set -e
flwr() {
  while true; do
    code=0; command flwr "$@" > said 2>&1 || code=$?
    cat said
    grep -q -e "Failed to start local SuperLink within" -e "timed out during startup" said || return $code
  done
}
"""


# The last, for it installs fastagg anew
def test_the_simulation_of_the_readme(federation, tmp_path):
    pytest.importorskip("ray", reason="needs flwr[simulation]: make test-integrations")
    files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if files.returncode:
        pytest.skip("not a clone")
    for name in files.stdout.split("\0")[:-1]:
        (tmp_path / "clone" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / "clone" / name)
    (tmp_path / "home" / "config.toml").unlink()  # as a new user has it
    del federation.env["PYTHONPATH"]
    federation.env |= {
        "FASTAGG_CUDA": "0", "FLWR_LOCAL_SUPERLINK_HTTP_API_PORT": str(free_port()),
        "FLWR_LOCAL_CONTROL_API_PORT": str(free_port()),
    }  # fmt: skip
    commands = blocks("sh")[0]
    federation.stack.callback(end_all, tmp_path / "home")
    done = subprocess.run(
        ["bash", "-c", AGAIN + commands], env=federation.env, cwd=tmp_path / "clone", capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    found = accuracies(done.stdout)
    assert len(found) == commands.count("flwr run") == 2, done.stdout[-4000:]
    for first, *_, last in found:
        assert last > 0.4 > first
