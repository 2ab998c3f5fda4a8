"""Work lists and uploads of the GPU backends."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastagg._engine import table as tables
from fastagg._engine.backends import plan

sizes = st.one_of(st.integers(0, 40), st.sampled_from([1023, 1024, 1025, 2048, 5000, 70_000]))
dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.int64])


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(sizes, dtypes, st.integers(-1, 4)), min_size=1, max_size=30), st.sampled_from([1, 3, 50, 2048])
)
def test_every_element_is_worked_on_once(tensors, most):
    sd = {str(t): torch.empty(n, dtype=dtype) for t, (n, dtype, _) in enumerate(tensors)}
    layout = tables.build(None, [sd]).layout
    group = np.array([g for _, _, g in tensors], dtype=np.int32)
    work = plan.work(layout, group, 5, most)
    seen = {t: [] for t in range(len(tensors))}
    slots = {}
    for code, first, count in work.launches:
        for place, chunk, chunks, slot in work.items[first : first + count].tolist():
            owners = set()
            for _ in range(chunks):  # as the kernels walk
                t = int(work.order[place])
                begin = chunk * plan.CHUNK
                end = min(begin + plan.CHUNK, tensors[t][0])
                seen[t].append((begin, end))
                owners.add(int(group[t]))
                assert layout.codes[t] == code
                chunk += 1
                if end == tensors[t][0]:
                    place, chunk = place + 1, 0
            assert len(owners) == 1
            assert slot not in slots
            slots[slot] = owners.pop()
    for t, (n, _, g) in enumerate(tensors):
        expected = [(at, min(at + plan.CHUNK, n)) for at in range(0, n, plan.CHUNK)] if g >= 0 else []
        assert sorted(seen[t]) == expected
    assert sorted(slots) == list(range(work.slots))
    for g in range(5):
        first, last = work.first_slot[g : g + 2]
        assert [slot for slot, owner in sorted(slots.items()) if owner == g] == list(range(first, last))
    kinds = len({(g, dtype) for n, dtype, g in tensors if g >= 0 and n})
    assert work.slots <= most + kinds


class FakeStream:
    def __init__(self, number):
        self.cuda_stream, self.waited = number, []

    def wait_event(self, event):
        self.waited.append(event)


class FakeEvent:
    def record(self, stream):
        self.recorded = stream


class FakeBuffer:
    """Memory of a device, and the streams that it was recorded on"""

    def __init__(self, streams):
        self.streams = streams

    def __getitem__(self, part):
        return self

    def view(self, form):
        return self

    def record_stream(self, stream):
        self.streams.append(stream)


@pytest.fixture
def device(monkeypatch):
    """A CUDA device as far as uploads see it: .stream is current, .capturing, and .sent are the transfers"""

    class Device:
        stream, capturing, sent = FakeStream(1), False, []

    def send(device, packed):
        Device.sent.append(packed.copy())
        return FakeBuffer([])

    def event(external):
        assert external  # or a capture could not wait for what was recorded outside
        return FakeEvent()

    Device.sent = []
    monkeypatch.setattr(plan, "_send", send)
    monkeypatch.setattr(plan, "_residents", plan._residents.__class__())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Device.stream)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: Device.capturing)
    monkeypatch.setattr(torch.cuda, "Event", event)
    return Device


GPU = torch.device("cuda", 0)


def wanted(n, size=4):
    return n, lambda: [np.full(size, n, dtype=np.int32)]


def on(device, *numbers):
    """The buffers of some uploads"""
    return [arrays[0] for arrays in plan.upload(device, *map(wanted, numbers))]


def test_what_is_there_is_not_sent_again(device):
    [first] = on(GPU, 1)
    assert on(GPU, 1) == [first]
    assert on(GPU, 2) != [first]
    assert on(torch.device("cuda", 1), 1) != [first]
    assert len(device.sent) == 3
    assert device.stream.waited == []


def test_what_is_missing_goes_in_one_transfer(device):
    on(GPU, 1)
    on(GPU, 1, 2, 3)
    assert [packed.view(np.int32).tolist() for packed in device.sent] == [[1] * 4, [2] * 4 + [3] * 4]
    on(GPU, 3), on(GPU, 2)
    assert len(device.sent) == 2


def test_what_is_there_is_not_made_again(device):
    on(GPU, 1)

    def fail():
        raise AssertionError

    plan.upload(GPU, (1, fail))


def test_another_stream_waits_for_the_transfer(device):
    [first] = on(GPU, 1)
    event = next(iter(plan._residents.values())).event
    assert event.recorded is device.stream
    device.stream = other = FakeStream(2)
    assert on(GPU, 1) == [first]
    assert other.waited == [event]
    assert first.streams == [other]  # its memory is not reused while that stream may read it
    assert len(device.sent) == 1


@pytest.mark.parametrize("stream", [1, 2])
def test_a_captured_graph_needs_what_is_there_waits_for_it_and_keeps_it(device, stream):
    device.capturing = True
    with pytest.raises(RuntimeError, match="make the same call once before"):
        on(GPU, 1)
    device.capturing = False
    [first] = on(GPU, 1)
    event = next(iter(plan._residents.values())).event
    device.capturing, device.stream = True, FakeStream(stream)
    assert on(GPU, 1) == [first]
    assert device.stream.waited == [event]  # also on the stream of the upload: a replay may be on another
    device.capturing = False
    for n in range(2, 100):
        on(GPU, n)
    assert on(GPU, 1) == [first]


def test_without_external_events_the_host_waits_for_the_transfer(device, monkeypatch):
    def event(**options):
        raise TypeError("external")

    waited = []
    monkeypatch.setattr(torch.cuda, "Event", event)
    device.stream.synchronize = lambda: waited.append(True)
    on(GPU, 1)
    on(GPU, 1)
    assert waited == [True]
    device.capturing, device.stream = True, FakeStream(2)
    on(GPU, 1)
    assert device.stream.waited == []


def test_old_uploads_are_dropped(device):
    for n in range(100):
        on(GPU, n)
    assert len(plan._residents) == plan._MOST_RESIDENTS
    on(GPU, 99)
    assert len(device.sent) == 100
    on(GPU, 0)
    assert len(device.sent) == 101
    on(GPU, 1000, 69)  # the second is the next to go, but wanted
    assert len(device.sent) == 102
    plan.upload(GPU, wanted(101, plan._MOST_BYTES // 4 + 1))  # larger than all may be: kept while it is used
    assert len(plan._residents) == 1


@pytest.mark.parametrize("where", ["cpu", "cuda"])
def test_arrays_arrive_as_they_were(monkeypatch, device, where):
    monkeypatch.setattr(plan, "_send", lambda device, packed: torch.from_numpy(packed))
    arrays = [np.arange(5, dtype=np.int32), np.arange(6, dtype=np.int64).reshape(2, 3), np.array([0.5])]
    arrays += [np.empty((0, 4), np.int32), np.arange(12, dtype=np.int32).reshape(3, 4).T]
    some, more = plan.upload(torch.device(where), ("some", lambda: arrays[:2]), ("more", lambda: arrays[2:]))
    for sent, got in zip(arrays, some + more, strict=True):
        assert np.array_equal(got.numpy(), sent)
        assert got.numpy().dtype == sent.dtype
        assert got.is_contiguous()
        assert got.data_ptr() % 16 == 0 or got.numel() == 0
