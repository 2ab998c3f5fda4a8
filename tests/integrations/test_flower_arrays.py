"""Flower's arrays as tensors and back, for all that NumPy writes and for bytes that it did not write."""

from __future__ import annotations

import io
import random
import warnings

import numpy as np
import pytest
import torch

pytest.importorskip("flwr", reason="needs flwr: make test-integrations")
from flwr.app import Array, ArrayRecord

import fastagg
from fastagg.integrations.flower import pack, unpack, view

pytestmark = pytest.mark.integration


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "?"])
def test_what_pack_writes_is_what_numpy_writes(dtype):
    for shape in [(), (0,), (3,), (2, 3, 4), (5, 0, 2)]:
        array = np.asarray(np.arange(np.prod(shape, dtype=int)).reshape(shape) % 5, dtype=dtype)
        file = io.BytesIO()
        np.save(file, array)
        record = pack({"a": array})
        assert record["a"].data == file.getvalue()
        assert record["a"] == Array(array)
        assert np.array_equal(view(record)["a"].numpy(), array)


def test_arrays_of_other_order_and_byte_order():
    a = np.arange(12, dtype=np.float32).reshape(3, 4)
    for array in (np.asfortranarray(a), a.astype(">f4"), a.T, a[::2]):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert np.array_equal(view(ArrayRecord([array]))["0"].numpy(), array)
            assert np.array_equal(pack({"0": array})["0"].numpy(), array)


def test_unpack_gives_tensors_of_their_own():
    record = pack({"w": torch.ones(3), "h": torch.ones(3, dtype=torch.bfloat16)})
    for tensor in unpack(record).values():
        tensor += 1
    assert all((tensor == 1).all() for tensor in unpack(record).values())


def test_damaged_payloads():
    """Whatever the bytes: an InputError, or what np.load reads from them"""
    generator = random.Random(0)
    whole = pack({"a": torch.arange(24.0).view(2, 3, 4)})["a"].data
    shapes = (
        b"(2, 3, 4)",
        b"(24,)    ",
        b"(-2,-12) ",
        b"(9**99,) ",
        b"(0, 9999)",
        b"(True,24)",
        b"((24,),) ",
        b"(2,2,2,3)",
    )
    damaged = [whole.replace(b"(2, 3, 4)", shape) for shape in shapes]
    damaged += [whole.replace(b"<f4", d) for d in (b">f4", b"|O8", b"<c8", b"<U1", b"<M8", b"<i4", b"<f2", b"<f9")]
    damaged += [whole[:n] for n in (0, 5, 7, 9, 10, 60, 127, 128, 129)] + [whole + b"\0", whole[:-1]]
    for _ in range(3000):
        data = bytearray(whole)
        for _ in range(generator.randint(1, 3)):
            data[generator.randrange(len(data) if generator.random() < 0.1 else 128)] = generator.randrange(256)
        damaged.append(bytes(data))
    read = named = 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for data in damaged:
            try:
                tensor = view({"a": Array("float32", (2, 3, 4), "numpy.ndarray", data)}, "node 7")["a"]
            except fastagg.InputError as error:
                named += "node 7: key 'a'" in str(error)
                continue
            array = np.load(io.BytesIO(data), allow_pickle=False)
            assert array.shape == tensor.shape
            assert array.tobytes() == tensor.numpy().astype(array.dtype).tobytes()
            read += 1
    assert read + named == len(damaged)
    assert 0 < read < named
