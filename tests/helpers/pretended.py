"""A CUDA device that is not there: CPU tensors that say they are on cuda:0, served by the emulated kernels.

While .capturing is set, whatever would wait for the device or copy from it raises, as CUDA does in a capture. Outside,
such copies are counted in .reads.
"""

from __future__ import annotations

import contextlib

import torch
from torch.overrides import TorchFunctionMode

from fastagg._engine import backends
from fastagg._engine.backends import plan

GPU, CPU = torch.device("cuda", 0), torch.device("cpu")
READS = ("cpu", "numpy", "item", "tolist", "nonzero", "__bool__", "__int__", "__float__", "__index__", "is_nonzero")
READS += ("pin_memory", "equal", "allclose")


class Stream:
    cuda_stream = 1

    def wait_event(self, event):
        assert event.external
        event.waited = True


class Pretended(TorchFunctionMode):
    capturing = False

    def __init__(self, monkeypatch, kernels):
        super().__init__()
        self.on_gpu, self.reads, self.kept = set(), 0, []
        mode = self

        class Event:
            def __init__(self, external=False):
                self.external = external

            def record(self, stream):
                mode.forbidden("cudaEventRecord")

            def synchronize(self):
                mode.forbidden("cudaEventSynchronize")

            query = synchronize

        replaced = {
            "current_stream": lambda device=None: Stream(), "Event": Event,
            "device": lambda device: contextlib.nullcontext(),
            "is_current_stream_capturing": lambda: self.capturing,
            "synchronize": lambda device=None: self.forbidden("cudaDeviceSynchronize"),
            "get_device_capability": lambda device=None: (8, 0),
        }  # fmt: skip
        for name, function in replaced.items():
            monkeypatch.setattr(torch.cuda, name, function)
        monkeypatch.setattr(plan, "_residents", plan._residents.__class__())
        monkeypatch.setattr(plan, "_send", self.send)
        monkeypatch.setattr(backends, "choose", lambda device, name=None: kernels if device == GPU else backends.cpu)

    @contextlib.contextmanager
    def capture(self):
        self.capturing = True
        try:
            yield
        finally:
            self.capturing = False

    def forbidden(self, what):
        if self.capturing:
            raise RuntimeError(f"{what}: operation not permitted when stream is capturing")

    def put(self, sd):
        return {key: self.placed(value.clone()) for key, value in sd.items()}

    def placed(self, x):
        self.kept.append(x)  # or its address might be another's
        self.on_gpu.add(x.untyped_storage()._cdata)
        return x

    def send(self, device, packed):
        self.forbidden("cudaMemcpyAsync")
        with torch._C.DisableTorchFunction():
            return self.placed(torch.from_numpy(packed))

    def is_there(self, x):
        return isinstance(x, torch.Tensor) and x.untyped_storage()._cdata in self.on_gpu

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs, name = dict(kwargs or {}), getattr(function, "__name__", "")
        with torch._C.DisableTorchFunction():
            there = any(self.is_there(x) for x in args) or any(
                self.is_there(x) for some in args if isinstance(some, list | tuple) for x in some
            )
            if name == "__get__" and function.__self__ is torch.Tensor.device:
                return GPU if there else CPU
            target = kwargs.get("device")
            if name == "to":
                target = next((x for x in args[1:] if isinstance(x, torch.device)), target)
            if there and (name in READS or (name == "to" and target is not None and target.type == "cpu")):
                self.forbidden(f"Tensor.{name}")
                self.reads += 1
                result = function(*args, **kwargs)
                return result.clone() if isinstance(result, torch.Tensor) else result
            to_gpu = target is not None and torch.device(target).type == "cuda"
            if to_gpu and name == "to" and not there:
                self.forbidden("cudaMemcpyAsync")
            args = [CPU if x == GPU else x for x in args] if to_gpu else args
            if "device" in kwargs and to_gpu:
                kwargs["device"] = CPU
            result = function(*args, **kwargs)
            if to_gpu or there:
                for x in result if isinstance(result, list | tuple) else [result]:
                    if isinstance(x, torch.Tensor):
                        self.placed(x)
            return result
