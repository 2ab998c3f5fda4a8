"""Every loader of files and states on damaged ones: they are read, or refused by the documented error.

Never another exception, a crash, a hang, or memory that a header only claims; what was loaded into is unchanged after
an error. The default profile generates 1,532 cases, the same every time; nightly 20,680: `make test-nightly`, or
FASTAGG_HYPOTHESIS=nightly python -m pytest tests/test_properties.py tests/test_fuzz.py
"""

from __future__ import annotations

import copy
import dataclasses
import gzip
import hashlib
import io
import json
import re
import resource
import signal
import struct
from contextlib import contextmanager, redirect_stderr, suppress
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import strategies as st

import fastagg
from fastagg._engine import saved
from fastagg._engine.aggregator import Aggregator
from fastagg._engine.files.mapped import open_model
from fastagg._engine.registry import registry
from fastagg.cli import main
from fastagg.sim import config, data, report
from helpers.data_files import write_cifar, write_idx, write_matlab, write_news, write_tiny_imagenet, write_usps
from helpers.every_method import METHODS, OPTIONS, cohort, models, run
from helpers.fake_runs import fake
from helpers.model_files import write_round, write_shards
from helpers.profiles import cases, check_number_of_cases
from helpers.states import frozen

MEMORY = 1 << 30  # what may be asked for beyond what is in use; the largest official file takes 190 MB as float32
SECONDS = 600  # it hangs, however slow the machine is
NUMBERS = (0, 1, 255, 2**15, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1)


@contextmanager
def bounded():
    """No more memory than MEMORY, no longer than SECONDS"""

    def late(*_):
        raise AssertionError(f"no answer in {SECONDS} seconds")

    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before, handler = resource.getrlimit(resource.RLIMIT_AS), signal.signal(signal.SIGALRM, late)
    resource.setrlimit(resource.RLIMIT_AS, (now + MEMORY, before[1]))
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, handler)
        resource.setrlimit(resource.RLIMIT_AS, before)


def loads_or_refuses(load, path, error=ValueError):
    """What load() gives, or None after that very error with the file's name in it"""
    with bounded():
        try:
            return load()
        except error as refused:
            assert str(path) in str(refused), refused  # noqa: PT017
            return None


@st.composite
def damage(draw, raw: bytes):
    """Bytes that were a good file"""
    at = st.integers(0, max(len(raw) - 1, 0)) | st.integers(0, min(len(raw), 32))  # headers are at the start
    kinds = st.sampled_from(["flip", "cut", "number", "insert", "remove", "extend"])
    new = bytearray(raw)
    for kind in draw(st.lists(kinds, min_size=1, max_size=4)):
        i = min(draw(at), len(new))
        if kind == "flip":
            new[i : i + 1] = bytes([draw(st.integers(0, 255))])
        elif kind == "cut":
            del new[i:]
        elif kind == "number":
            form = draw(st.sampled_from([">H", ">I", "<I", ">Q", "<Q"]))
            number = struct.pack(form, draw(st.sampled_from(NUMBERS)) % 2 ** (8 * struct.calcsize(form)))
            new[i : i + len(number)] = number
        elif kind == "insert":
            new[i:i] = draw(st.binary(max_size=20))
        elif kind == "remove":
            del new[i : i + draw(st.integers(1, 20))]
        else:
            new += draw(st.binary(min_size=1, max_size=20))
    return bytes(new)


def damaged(raw: bytes):
    """A good file with damage, or none at all"""
    others = st.binary(max_size=200) | st.sampled_from([raw, b"", b"[" * 100_000, b'{"a":' * 100_000])
    return st.one_of(damage(raw), damage(raw), damage(raw), others)


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("fuzz")


# ---- data sets ----


@cache
def official(folder: Path, kind: str) -> dict[str, bytes]:
    """The files of a small data set, which are left in its folder"""
    match kind:
        case "idx" | "idx.gz":
            write_idx(folder / kind, packed=kind == "idx.gz")
        case "svhn" | "syn":
            write_matlab(folder / kind, "synth_" * (kind == "syn"), (2, 2), compressed=kind == "syn")
        case "usps":
            write_usps(folder / kind, sizes=(2, 2))
        case "ag-news":
            write_news(folder / kind)
        case "tiny-imagenet":
            write_tiny_imagenet(folder / kind, classes=2, each=1, tests=1)
        case _:
            write_cifar(folder / kind, int(kind[5:]), each=2)
    lists = ("wnids.txt", "val_annotations.txt")  # a wrong name in them is noticed where it leads
    files = (path for path in sorted((folder / kind).rglob("*")) if path.is_file() and path.name not in lists)
    return {str(path.relative_to(folder / kind)): path.read_bytes() for path in files}


KINDS = ("idx", "idx.gz", "cifar10", "cifar100", "svhn", "syn", "usps", "ag-news", "tiny-imagenet")


@pytest.mark.parametrize("kind", KINDS)
@cases(60, 800, choice=st.data())
def test_data_sets(folder, kind, choice):
    good = official(folder, kind)
    name = choice.draw(st.sampled_from(sorted(good)))
    path = folder / kind / name
    raw = choice.draw(damaged(good[name]))
    if kind == "idx.gz" and choice.draw(st.booleans()):  # damage inside a file that is packed well
        raw = gzip.compress(choice.draw(damage(gzip.decompress(good[name]))), 1)
    try:
        path.write_bytes(raw)
        found = loads_or_refuses(
            lambda: data.load("mnist" if "idx" in kind else kind, folder / kind), path, data.DataError
        )
    finally:
        path.write_bytes(good[name])
    if found is not None:
        assert len(found.x) == len(found.y)
        assert found.y.max() < found.classes
        assert found.x.isfinite().all()
        assert found.test_x.isfinite().all()


# ---- the simulator's files ----

plain_values = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
json_values = st.recursive(
    plain_values, lambda v: st.lists(v, max_size=3) | st.dictionaries(st.text(max_size=8), v, max_size=3), max_leaves=8
)


@st.composite
def changed(draw, tree, values=json_values):
    """A tree of dicts and lists, of which one part is replaced, removed or doubled"""
    if not isinstance(tree, dict | list) or not tree or draw(st.integers(0, 4)) == 0:
        return draw(values)
    new = copy.copy(tree)
    at = draw(st.sampled_from(sorted(tree, key=str))) if isinstance(tree, dict) else draw(st.integers(0, len(tree) - 1))
    what = draw(st.sampled_from(["change", "change", "change", "remove", "add"]))
    if what == "remove":
        del new[at]
    elif what == "add":
        extra = draw(values)
        new.update({draw(st.text(max_size=8)): extra}) if isinstance(new, dict) else new.insert(at, extra)
    else:
        new[at] = draw(changed(tree[at], values))
    return new


@st.composite
def odd_safetensors(draw, raw: bytes):
    """A safetensors file that says something else of its tensors, or of the tree they are in"""
    size = struct.unpack("<Q", raw[:8])[0]
    header = json.loads(raw[8 : 8 + size])
    if draw(st.booleans()):
        header = draw(changed(header, json_values | st.sampled_from(["F64", "F8_E4M3", "F4", "C64", "U64", "BOOL"])))
    else:
        tree = draw(changed(json.loads(header["__metadata__"]["fastagg"])))
        header["__metadata__"]["fastagg"] = json.dumps(tree)
    head = json.dumps(header).encode()
    return signed(struct.pack("<Q", len(head)) + head, raw[8 + size :])


def signed(start: bytes, content: bytes) -> bytes:
    """A file with a checksum that fits, so that damage is not found by that alone"""
    start = re.sub(rb'("fastagg.sha256": ")[^"]*"', rb"\g<1>" + b"0" * 64 + b'"', start)
    digest = hashlib.sha256(start + content).hexdigest().encode()
    return start.replace(b'"fastagg.sha256": "' + b"0" * 64, b'"fastagg.sha256": "' + digest) + content


TREE = {
    "round": 3,
    "models": [{"w": torch.arange(6.0).view(2, 3), "n": torch.tensor(4)}],
    "memory": {"1": {"w": torch.ones(2)}},
    "server": {"method": "fedawa", "layers": None, "client_ids": [0, "a"], "half": torch.ones(3, dtype=torch.bfloat16)},
}


@cases(150, 1500, choice=st.data())
def test_checkpoints(folder, choice):
    path = folder / "checkpoint.safetensors"
    saved.save(path, TREE)
    raw = path.read_bytes()
    path.write_bytes(choice.draw(damaged(raw) | odd_safetensors(raw)))
    loads_or_refuses(lambda: saved.load(path), path, fastagg.InputError)


@cache
def run_files(folder: Path) -> tuple[Path, dict[str, bytes]]:
    path = fake(folder / "runs", "fedawa", 0, rounds=3, clients=4, classes=3)
    return path, {p.name: p.read_bytes() for p in path.iterdir()}


@st.composite
def odd_json(draw, raw: bytes):
    """A file of JSON lines, of which one says something else"""
    lines = raw.decode().splitlines() if raw.count(b"\n") > 1 else [raw.decode()]
    at = draw(st.integers(0, len(lines) - 1))
    lines[at] = json.dumps(draw(changed(json.loads(lines[at]))))
    return "\n".join(lines).encode()


@cases(200, 2500, choice=st.data())
def test_folders_of_runs(folder, choice):
    """What is read can be shown"""
    path, good = run_files(folder)
    name = choice.draw(st.sampled_from(sorted(good)))
    (path / name).write_bytes(choice.draw(odd_json(good[name]) | damaged(good[name])))
    try:
        found = loads_or_refuses(lambda: report.read_run(path), path)
    finally:
        (path / name).write_bytes(good[name])
    if found is not None:
        groups = report.group([found])
        assert "fedawa" in report.markdown(groups) or name in ("summary.json", "config.json")


TOML = """
method = "fedawa-l"
data = "digits"
alpha = 0.5
clients = 7
batched = true
[options]
steps = 5
reg = "euc"
"""
odd_toml = ["0", "-1", "1e400", "nan", "true", '""', '"x"', "[]", "[1]", "{}", "{a = 1}", "1979-05-27", "1" + "0" * 30]
odd_toml += ["9" * 5000, "[" * 5000 + "]" * 5000]
fields = st.sampled_from([f.name for f in dataclasses.fields(config.Config)] + ["steps", "x"])
toml_lines = st.lists(st.builds("{} = {}".format, fields, st.sampled_from(odd_toml)), min_size=1, max_size=3)
SPEAKERS = {"sim", "local training", *METHODS}  # what is said about an option begins with one of these


@cases(100, 1000, choice=st.data())
def test_toml(folder, choice):
    path = folder / "run.toml"
    odd = toml_lines.map(lambda lines: "\n".join([*lines, TOML]).encode())
    path.write_bytes(choice.draw(damaged(TOML.encode()) | odd))
    values = loads_or_refuses(lambda: config.read_toml(path), path)
    if values is None:
        return
    with bounded():
        try:
            config.from_dict(values, str(path))
        except (ValueError, TypeError) as error:
            said = str(error)
            assert said.partition(":")[0] in {str(path), *SPEAKERS} or said.startswith("no method"), said


@cases(100, 1000, choice=st.data())
def test_configuration_of_a_run(folder, choice):
    path = folder / "config.json"
    good = json.dumps(config.Config(method="fedawa").to_json()).encode()
    path.write_bytes(choice.draw(odd_json(good) | damaged(good)))
    loads_or_refuses(lambda: config.read_json(path), path)


# ---- models in files ----


@cache
def sharded(folder: Path) -> tuple[Path, bytes]:
    index = write_shards(folder / "shards", {key: torch.ones(3) for key in "abc"})
    return index, index.read_bytes()


@cases(60, 800, choice=st.data())
def test_indices_of_models(folder, choice):
    index, good = sharded(folder)
    index.write_bytes(choice.draw(odd_json(good.replace(b"\n", b"")) | damaged(good)))
    loads_or_refuses(lambda: open_model(index), index.parent, fastagg.InputError)


@cache
def small_round(folder: Path) -> list[str]:
    center, paths = write_round(folder / "round", *cohort())
    return ["aggregate", "--quiet", "--global", str(center), *map(str, paths), "-o", str(folder / "new.safetensors")]


@cases(60, 800, choice=st.data())
def test_json_of_the_command(folder, choice):
    """Any JSON for --sizes and --inputs, and any value of an option: an exit code and one line, or a model"""
    option, method, names = choice.draw(st.sampled_from([
        ("--sizes", "fedavg", None), ("--inputs", "feddisco", "label_dist"), ("--inputs", "fednova", "local_steps"),
        ("--opt", "fedavg", "params"),
    ]))  # fmt: skip
    numbers = json_values | st.sampled_from([10**400, [10**400] * 7, [[1], [1, 2], *range(5)], list(range(7))])
    value = choice.draw(numbers | st.builds(lambda v: {f"c{k}": v for k in range(7)}, numbers))
    text = json.dumps(value if option != "--inputs" else {names: value})
    command = [*small_round(folder), "--method", method, f"{option}={names}={text}" if option == "--opt" else option]
    said = io.StringIO()
    with bounded(), redirect_stderr(said):
        code = main([*command, *([] if option == "--opt" else [text])])
    assert code in (0, 1, 2)
    assert said.getvalue().count("\n") == (code > 0)


# ---- states of aggregators ----

odd_tensors = st.sampled_from([
    torch.tensor(float("nan")), torch.tensor([float("inf"), 1.0]), torch.ones(7), torch.ones(3, 2), torch.ones(0),
    torch.ones(7, dtype=torch.int64), -torch.ones(7), torch.ones(7, dtype=torch.complex64), torch.ones(7).bool(),
    torch.ones(7).to_sparse(), torch.ones(7, device="meta"), torch.ones(7, requires_grad=True),
    torch.full((7,), 6e4).half(), np.ones(7), np.array(["a"] * 7), np.ones(7, dtype=object),
])  # fmt: skip
state_values = odd_tensors | json_values | st.just(object())


@cache
def served(name: str):
    """A server after two rounds"""
    server = fastagg.aggregator(name, **OPTIONS[name])
    for seed in (0, 1):
        run(name, *cohort(seed=seed), server=server)
    return server


def loads_all_or_nothing(name, load):
    """load(server) takes over a state that serves another round, or raises InputError and changes nothing"""
    server = fastagg.aggregator(name, **OPTIONS[name])
    server.load_state_dict(served(name).state_dict())
    before = frozen(server.state_dict())
    with bounded():
        try:
            load(server)
        except fastagg.InputError as error:
            assert name in str(error)  # noqa: PT017
            assert frozen(server.state_dict()) == before
        else:
            with suppress(fastagg.InputError):  # it is the state of another model
                result = run(name, *cohort(), server=server)
                assert all(sd.weights.isfinite().all() for sd in models(result))


STATEFUL = [name for name in METHODS if registry()[name].state_dict is not Aggregator.state_dict]


@pytest.mark.parametrize("name", STATEFUL)
@cases(20, 400, choice=st.data())
def test_states(name, choice):
    odd = choice.draw(changed(served(name).state_dict(), state_values))
    loads_all_or_nothing(name, lambda server: server.load_state_dict(odd))


@pytest.mark.parametrize("name", sorted(set(METHODS) - set(STATEFUL)))
@cases(3, 20, choice=st.data())
def test_states_of_methods_without_memory(name, choice):
    odd = choice.draw(changed(served(name).state_dict(), state_values))
    loads_all_or_nothing(name, lambda server: server.load_state_dict(odd))


@pytest.mark.parametrize("name", STATEFUL)
@cases(20, 400, choice=st.data())
def test_state_files(folder, name, choice):
    path = folder / f"{name}.safetensors"
    served(name).save(path)
    raw = path.read_bytes()
    path.write_bytes(choice.draw(damaged(raw) | odd_safetensors(raw)))
    loads_all_or_nothing(name, lambda server: server.load(path))


def test_number_of_cases(request):
    check_number_of_cases(request, __name__, 12_000)
