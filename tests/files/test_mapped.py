"""Files of strangers: read where they are, and refused where they are not what they say."""

from __future__ import annotations

import gc
import json
import os
import random
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from fastagg import InputError
from fastagg._engine import saved
from fastagg._engine.files import paging
from fastagg._engine.files.mapped import READABLE, open_model
from helpers.cohort import make
from helpers.model_files import assert_same_model, write_raw, write_shards

F32 = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


def model():
    gen = torch.Generator().manual_seed(0)
    bits = torch.randint(0, 2, (8,), generator=gen, dtype=torch.uint8)
    tensors = {f"of.{name}": torch.randn(3, 5, generator=gen).to(dtype) for name, dtype in READABLE.items()}
    return tensors | {"of.BOOL": bits.bool(), "scalar": torch.tensor(2.5), "none": torch.zeros(0, 4)}


def test_tensors_are_those_of_the_library(tmp_path):
    path = tmp_path / "client-7.safetensors"
    save_file(model(), path, {"format": "pt", "note": "x"})
    mapped = open_model(path)
    assert mapped.name == "client-7"
    assert mapped.metadata == {"format": "pt", "note": "x"}
    assert list(mapped.tensors) == list(load_file(path))  # the order of their bytes
    tensors = mapped.tensors
    del mapped
    gc.collect()
    assert_same_model(tensors, model())  # they keep the mapping alive


@pytest.mark.parametrize("spaces", range(4))
def test_tensors_may_lie_at_any_address(tmp_path, spaces):
    x = torch.randn(5, dtype=torch.float64)
    header = json.dumps({"x": {"dtype": "F64", "shape": [5], "data_offsets": [0, 40]}}).encode() + b" " * spaces
    path = write_raw(tmp_path / "x.safetensors", header, x.numpy().tobytes())
    assert torch.equal(open_model(path).tensors["x"], x)


def test_mapped_files_hold_no_descriptors(tmp_path):
    save_file({"x": torch.ones(3)}, tmp_path / "x.safetensors")
    before = len(os.listdir("/proc/self/fd"))
    held = [open_model(tmp_path / "x.safetensors") for _ in range(20)]
    assert len(os.listdir("/proc/self/fd")) == before
    assert all(float(m.tensors["x"].sum()) == 3 for m in held)
    where = held[0].files[0].address
    assert f"{where:x}-" in Path("/proc/self/maps").read_text()
    del held
    gc.collect()
    assert f"{where:x}-" not in Path("/proc/self/maps").read_text()


@pytest.mark.parametrize("given", ["folder", "index"])
def test_sharded_models(tmp_path, given):
    index = write_shards(tmp_path / "hospital-3", model(), 3)
    mapped = open_model(index if given == "index" else index.parent)
    assert mapped.name == "hospital-3"
    assert_same_model(mapped.tensors, model())
    assert mapped.bytes == sum(t.nbytes for t in model().values())


def test_a_folder_with_one_file(tmp_path):
    save_file(model(), tmp_path / "adapter_model.safetensors")
    mapped = open_model(tmp_path)
    assert mapped.name == tmp_path.name
    assert_same_model(mapped.tensors, model())


@pytest.mark.parametrize(
    ("header", "data", "says"),
    [
        ({"x": F32}, b"1234567", ""),  # truncated
        ({"x": F32}, b"123456789", ""),  # more than it says
        ({"x": F32, "y": {**F32, "data_offsets": [4, 12]}}, b"0" * 12, ""),  # overlap
        ({"x": F32, "y": {**F32, "data_offsets": [12, 20]}}, b"0" * 20, ""),  # hole
        ({"x": {**F32, "data_offsets": [4, 12]}}, b"0" * 12, ""),  # hole at the start
        ({"x": {**F32, "shape": [3]}}, b"0" * 8, ""),
        ({"x": {**F32, "shape": [-2]}}, b"0" * 8, ""),
        ({"x": {**F32, "shape": [2**40, 2**40]}}, b"0" * 8, ""),
        ({"x": {**F32, "shape": [0, 2**63], "data_offsets": [0, 0]}}, b"", ""),
        ({"x": {**F32, "data_offsets": [8, 0]}}, b"0" * 8, ""),
        ({"x": {**F32, "data_offsets": [False, 8]}}, b"0" * 8, ""),
        ({"x": {**F32, "data_offsets": [0, 8.0]}}, b"0" * 8, ""),
        ({"x": {**F32, "dtype": "F8_E4M3", "shape": [8]}}, b"0" * 8, "key 'x' has dtype F8_E4M3"),
        ({"x": {**F32, "dtype": "U32"}}, b"0" * 8, "key 'x' has dtype U32"),
        ({"x": {**F32, "dtype": "XYZ"}}, b"0" * 8, ""),
        ({"x": [1]}, b"0" * 8, ""),
        ({}, b"", "no tensors"),
        ([1, 2], b"", ""),
        (b"", b"", ""),
        (b"{" * 100_000, b"", ""),
        (b'{"x": ' + b"[" * 100_000, b"", ""),
        (json.dumps({"x": F32}).encode()[:-1] + b', "x": ' + json.dumps(F32).encode() + b"}", b"0" * 8, ""),
        ({"__metadata__": {"a": 1}, "x": F32}, b"0" * 8, ""),
        ({"__metadata__": [], "x": F32}, b"0" * 8, ""),
    ],
)
def test_hostile_headers_are_refused(tmp_path, header, data, says):
    path = write_raw(tmp_path / "evil.safetensors", header, data)
    with pytest.raises(InputError, match=r"evil\.safetensors.*" + re.escape(says)):
        open_model(path)


@pytest.mark.parametrize("length", [0, 7, 8, 9, 2**31, 2**63, 2**64 - 1])
def test_header_lengths_that_cannot_be(tmp_path, length):
    path = tmp_path / "evil.safetensors"
    path.write_bytes(length.to_bytes(8, "little")[: length if length < 8 else 8] + b"{}"[: length > 8])
    with pytest.raises(InputError, match=r"evil\.safetensors"):
        open_model(path)


def test_what_is_no_file(tmp_path):
    os.mkfifo(tmp_path / "pipe.safetensors")
    for name in ("pipe.safetensors", "missing.safetensors"):
        with pytest.raises(InputError, match=name):
            open_model(tmp_path / name)
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="empty is a folder without"):
        open_model(tmp_path / "empty")
    for name in "ab":
        save_file({"x": torch.ones(1)}, tmp_path / "empty" / f"{name}.safetensors")
    with pytest.raises(InputError, match="name one of them"):
        open_model(tmp_path / "empty")


@pytest.mark.parametrize("name", ["../x.safetensors", "/etc/passwd", "..", "", "a/b", 3, None, "x\0y"])
def test_an_index_stays_in_its_folder(tmp_path, name):
    save_file({"x": torch.ones(1)}, tmp_path / "x.safetensors")
    (tmp_path / "m").mkdir()
    index = tmp_path / "m" / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"x": name}}))
    with pytest.raises(InputError, match=r"index\.json: key 'x' is in .* not the name of a file beside it"):
        open_model(index)


def test_an_index_and_its_shards_say_the_same(tmp_path):
    index = write_shards(tmp_path, {"a": torch.ones(1), "b": torch.ones(2)})
    good = json.loads(index.read_text())
    first, second = good["weight_map"]["a"], good["weight_map"]["b"]

    def refused(weight_map, says):
        index.write_text(json.dumps({"weight_map": weight_map}))
        with pytest.raises(InputError, match=says):
            open_model(index)

    refused({"a": first, "b": first}, "'b' is not in")
    refused({"a": second, "b": second}, "'b' is not listed|'a' is not in")
    refused({"a": first, "b": second, "c": second}, "'c' is not in")
    save_file({"a": torch.ones(1), "more": torch.ones(1)}, tmp_path / first)
    refused(good["weight_map"], "key 'more' is not listed")
    (tmp_path / first).unlink()
    refused(good["weight_map"], f"{first} cannot be read")
    for content in ("[]", "{", '{"weight_map": []}', '{"weight_map": {"a": "x", "a": "y"}}', "[" * 100_000):
        index.write_text(content)
        with pytest.raises(InputError, match=r"index\.json"):
            open_model(index)


def test_damaged_headers_are_refused_or_read_within_the_file(tmp_path):
    good, path = tmp_path / "good.safetensors", tmp_path / "bad.safetensors"
    save_file({"a.weight": torch.ones(3, 4), "a.bias": torch.ones(7).half(), "n": torch.tensor(3)}, good, {"k": "v"})
    content = good.read_bytes()
    length = 8 + int.from_bytes(content[:8], "little")
    rng = random.Random(7)
    read, said = 0, set()
    for _ in range(600):
        damaged = bytearray(content)
        for _ in range(rng.choice((1, 1, 2, 5))):
            at = rng.randrange(length)
            damaged[at] = rng.choice((rng.randrange(256), ord(rng.choice('0123456789,:{}[]"-'))))
        if rng.random() < 0.1:
            del damaged[rng.randrange(len(damaged)) :]
        path.write_bytes(damaged)
        try:
            tensors = open_model(path).tensors
        except InputError as error:
            said.add("bad.safetensors" in str(error))
            continue
        read += 1
        assert sum(t.nbytes for t in tensors.values()) <= len(damaged)
        for tensor in tensors.values():
            tensor.clone()  # every byte can be read
    assert said == {True}
    assert read > 10


def test_changes_are_noticed(tmp_path):
    path = tmp_path / "x.safetensors"
    save_file({"x": torch.ones(3)}, path)
    [file] = open_model(path).files
    file.check_unchanged()
    os.utime(path, ns=(1, 1))
    with pytest.raises(InputError, match=r"x\.safetensors was changed"):
        file.check_unchanged()
    path.unlink()
    with pytest.raises(InputError, match=r"x\.safetensors cannot be read any more"):
        file.check_unchanged()


def test_reading_ahead_in_a_file_that_was_cut_is_an_error_and_not_a_crash(tmp_path):
    path = tmp_path / "x"
    path.write_bytes(b"1" * 50_000)
    with open(path, "r+b") as file:
        memory = paging.mapped(file.fileno(), 50_000)
        start = paging.ctypes.addressof(memory)
        with paging.ReadAhead() as ahead:
            ahead.populate([(start, start + 49_152)], []).result()
            paging.release([(start, start + 49_152)])
            file.truncate(100)
            with pytest.raises(paging.Unreadable) as caught:
                ahead.populate([(start + 8192, start + 49_152)], []).result()
    assert start <= caught.value.address < start + 50_000


def test_pages_of_neighbours_are_asked_for_once():
    page = paging.PAGE
    address, size = torch.tensor([5 * page, 10, 100, 9 * page]).numpy(), torch.tensor([page, 50, page, 1]).numpy()
    assert paging.ranges(address, size) == [(0, 2 * page), (5 * page, 6 * page), (9 * page, 10 * page)]


def test_pages_are_let_go_and_nothing_else(tmp_path):
    path, size = tmp_path / "x", 8 << 20
    path.write_bytes(b"1" * size)
    with open(path, "rb") as file:
        memory = paging.mapped(file.fileno(), size)
    start = paging.ctypes.addressof(memory)

    def resident():
        told = Path("/proc/self/smaps").read_text().partition(f"{start:x}-")[2]
        return int(re.search(r"Rss:\s+(\d+) kB", told)[1]) << 10

    other = torch.ones(3 << 20)  # memory of nobody's file
    for first, last in ((0, size), (0, size // 2), (size // 2, size)):
        with paging.ReadAhead() as ahead:
            ahead.populate([(start, start + size)], []).result()
            assert resident() == size
            ahead.release([(start + first, start + last), (other.data_ptr(), other.data_ptr() + other.nbytes)])
        left = size - (last - first)
        assert left - 2 * paging.LARGE_PAGE <= resident() <= left
    assert bool((other == 1).all())


def test_header_fills_up_to_a_length(tmp_path):
    parts = [("x", torch.float32, torch.Size([2]))]
    header = saved.header(parts, {"a": "b"}, 4096)
    assert len(header) == 4096
    (tmp_path / "x.safetensors").write_bytes(header + torch.ones(2).numpy().tobytes())
    assert torch.equal(load_file(tmp_path / "x.safetensors")["x"], torch.ones(2))
    with pytest.raises(ValueError, match="does not fit into 64"):
        saved.header(parts, {"a": "b"}, 64)


def test_shards_do_not_leave_their_folder_by_links(tmp_path):
    g, _ = make(1, {"a.weight": (3, 4), "b.weight": (5,)})
    index = write_shards(tmp_path / "m", g, 2)
    shard = tmp_path / "m" / "model-00001-of-00002.safetensors"
    shard.rename(tmp_path / "m" / "real.safetensors")
    shard.symlink_to("real.safetensors")
    assert_same_model(open_model(index).tensors, g)
    (tmp_path / "link").symlink_to(tmp_path / "m")  # which the caller names: anything goes
    assert_same_model(open_model(tmp_path / "link" / index.name).tensors, g)
    (tmp_path / "m" / "real.safetensors").rename(tmp_path / "secret.safetensors")
    shard.unlink()
    shard.symlink_to(tmp_path / "secret.safetensors")
    with pytest.raises(InputError, match=r"00001-of-00002\.safetensors is a link to a file outside of its folder"):
        open_model(index)
