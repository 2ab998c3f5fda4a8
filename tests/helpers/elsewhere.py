"""A device that is not there: CPU tensors that say they are on Apple's GPU.

As on a real one, an operation wants all of its tensors on one device, there is no float64, and NumPy cannot read them.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch._C import _functorch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

MPS, CPU = torch.device("mps", 0), torch.device("cpu")
# What may have tensors of two devices
BETWEEN = ("to", "cpu", "copy_", "__getitem__", "__setitem__", "__set__", "_has_compatible_shallow_copy_type")


class Elsewhere(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.storages, self.kept = set(), []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs, name = dict(kwargs or {}), getattr(function, "__name__", "")
        with torch._C.DisableTorchFunction():
            if name == "_parse_to" or function is torch.device:  # these only read what they are given
                return function(*args, **kwargs)
            given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
            there = [self.is_there(x) for x in given]
            if name == "__get__" and getattr(function, "__self__", None) is Tensor.device:
                return MPS if any(there) else CPU
            if name in ("numpy", "__array__") and any(there):
                raise TypeError("can't convert mps:0 device type tensor to numpy")
            missing = [x for x, t in zip(given, there, strict=True) if not t and x.dim()]
            if name not in BETWEEN and any(there) and missing:
                raise RuntimeError(f"{name}: Expected all tensors to be on the same device")
            onto = any(there[:1]) if name in BETWEEN else any(there)
            if name == "cpu":
                onto = False
            if name == "to" and len(given) > 1:
                onto = there[1]
            for wanted in [x for x in (*args[1:2], kwargs.get("device")) if is_device(x)]:
                onto = torch.device(wanted).type == "mps"
            args, kwargs = tree_map(lambda x: CPU if is_device(x) else x, (args, kwargs))
            result = function(*args, **kwargs)
            if name in ("to", "cpu") and onto != there[0]:
                result = result.clone()
            for x in tree_leaves(result):
                if onto and isinstance(x, Tensor):
                    if x.dtype == torch.float64:
                        raise TypeError(f"{name}: Cannot convert a MPS Tensor to float64 dtype")
                    self.place(x)
            return result

    def is_there(self, x):
        return plain(x).untyped_storage()._cdata in self.storages

    def place(self, x):
        self.kept.append(plain(x))  # or its address might be another's
        self.storages.add(plain(x).untyped_storage()._cdata)


def plain(x):
    """What is inside of vmap's and grad's tensors"""
    while _functorch.is_functorch_wrapped_tensor(x):
        x = _functorch.get_unwrapped(x)
    return x


def is_device(x):
    return isinstance(x, torch.device) or (isinstance(x, str) and x.partition(":")[0] in ("cpu", "mps"))
