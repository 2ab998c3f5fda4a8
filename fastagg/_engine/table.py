"""State dicts in, a table of addresses out. Every check of a caller's tensors, and its message, is in this file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any, TypeGuard, cast

import numpy as np
import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from fastagg._engine import scanner
from fastagg._engine.checks import BadClientError, InputError
from fastagg._engine.dtypes import DTYPE_CODE, FLOATING, PLAIN
from fastagg._engine.forked import one_thread
from fastagg._engine.hints import prefix_hint, warn_of_same_tensors

# Floats that a client may send where the model has wider ones, which hold each of their values
NARROWER = {
    torch.float32: (torch.float16, torch.bfloat16),
    torch.float64: (torch.float16, torch.bfloat16, torch.float32),
}
BUFFER_NAMES = frozenset({"running_mean", "running_var", "num_batches_tracked"})

StateDict = Mapping[str, Any]  # name -> torch tensor or NumPy array
Out = StateDict | Sequence[StateDict] | None  # what a call is to write into
Params = Iterable[str] | torch.nn.Module | None  # names of the parameters, or the module that has them
Layers = Callable[[str], str] | None  # from a tensor's name to its layer's


@dataclass(frozen=True, eq=False)
class Layout:
    """What does not change from round to round: the names, shapes, dtypes and layers of a model's T tensors."""

    keys: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    layers: tuple[str, ...]  # names, in order of first appearance
    numel: np.ndarray  # [T] int64
    bytes: np.ndarray  # [T] int64
    codes: np.ndarray  # [T] int32, DTYPE_CODE
    layer: np.ndarray  # [T] int32, index into layers
    is_param: np.ndarray  # [T] bool: a parameter, not a buffer
    gram_layer: np.ndarray  # [T] int32, the layer of what enters the Gram, -1 for what does not
    layer_numel: np.ndarray  # [L] int64: elements that enter the Gram, per layer

    @cached_property
    def gram_dtypes(self) -> frozenset[torch.dtype]:
        """Of the tensors that enter the Gram"""
        return frozenset(dtype for dtype, layer in zip(self.dtypes, self.gram_layer, strict=True) if layer >= 0)

    @cached_property
    def gram_numel(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Elements that enter the Gram: [L] and []"""
        layers = torch.from_numpy(self.layer_numel.copy())
        return layers, layers.sum()


def module_of(key: str) -> str:
    """The module a tensor sits in: 'layer1.0.bn1' for 'layer1.0.bn1.weight'."""
    return key.rpartition(".")[0]


@lru_cache(maxsize=64)
def layout_of(keys, shapes, dtypes, params, tied, layer_names) -> Layout:
    if params is not None:
        for key in params - set(keys):
            raise InputError(f"params: {key!r} is not a key of the model")
    names: dict[str, int] = {}
    layer, is_param, gram_layer = [], [], []
    for key, dtype, name in zip(keys, dtypes, layer_names or map(module_of, keys), strict=True):
        layer.append(names.setdefault(name, len(names)))
        chosen = key in params if params is not None else key.rpartition(".")[2] not in BUFFER_NAMES
        if params is not None and chosen and dtype not in FLOATING:
            raise InputError(f"params: {key!r} is {dtype}; only floating-point tensors can be parameters")
        is_param.append(chosen and dtype in FLOATING)
        gram_layer.append(layer[-1] if is_param[-1] and key not in tied else -1)
    codes = [DTYPE_CODE[dtype] for dtype in dtypes]
    numel = np.array([int(np.prod(shape, dtype=np.int64)) for shape in shapes], dtype=np.int64)
    used = [t for t, at in enumerate(gram_layer) if at >= 0]
    layer_numel = np.bincount(np.array(layer, dtype=np.int64)[used], numel[used], len(names)).astype(np.int64)
    size = numel * np.array([dtype.itemsize for dtype in dtypes], dtype=np.int64)
    return Layout(
        keys, shapes, dtypes, tuple(names), numel, size, np.array(codes, dtype=np.int32),
        np.array(layer, dtype=np.int32), np.array(is_param, dtype=bool), np.array(gram_layer, dtype=np.int32),
        layer_numel,
    )  # fmt: skip


@dataclass(eq=False)
class Table:
    """T tensors of K clients, and of the global model if there is one, where the caller keeps them."""

    layout: Layout
    device: torch.device
    clients: list[list[torch.Tensor]]  # [K][T]
    center: list[torch.Tensor] | None  # [T]
    client_address: np.ndarray  # [T, K] int64
    center_address: np.ndarray  # [T] int64; zeros without a global model
    as_numpy: tuple[bool, ...]  # [T]: results for this key are NumPy arrays, as the caller's are
    metadata: Any = None  # state_dict()'s _metadata, handed on to results
    # [first byte, past the last) of inputs that are not among the addresses: tensors that had to be copied, for one
    other_inputs: list[tuple[int, int]] = field(default_factory=list)
    client_ids: Sequence[Any] | None = None  # for messages
    positions: Sequence[int] | None = None  # where the clients were in what the caller gave, if it is not as here
    updates: bool = False  # clients are updates of the global model, and not models
    # except where these tensors are, by identity, which are of models: what updates are to be made of them with
    bases: Mapping[int, torch.Tensor] = field(default_factory=dict)
    # [T, K] bool: which tensors each client has. In the place of others are the global model's. None: all have all
    has: np.ndarray | None = None

    @property
    def K(self) -> int:
        return len(self.clients)

    @property
    def global_model(self) -> list[torch.Tensor]:
        """center, where it is known that there is one"""
        assert self.center is not None
        return self.center

    @one_thread()
    def model_tensor(self, k: int, t: int) -> torch.Tensor:
        """Of a client's model, also where its update is in the table"""
        tensor = self.clients[k][t]
        is_update = self.updates and id(tensor) not in self.bases
        return tensor.detach() + self.global_model[t].detach() if is_update else tensor.detach()

    def name(self, k: int) -> str:
        """A client in the caller's words"""
        return client_name(k if self.positions is None else self.positions[k], self.client_ids)

    def given(self, clients: Iterable[int]) -> list[int]:
        """Where these clients were in what the caller gave"""
        return [int(k) if self.positions is None else self.positions[k] for k in clients]

    def part(self, order: Sequence[int]) -> Table:
        """Some of the clients, in this order. Those left out still count as inputs, which must not be written."""
        left = np.setdiff1d(np.arange(self.K), order)
        start = self.client_address[:, left]
        extents = np.stack([start, start + self.layout.bytes[:, None]], -1).reshape(-1, 2).tolist()
        return replace(
            self,
            clients=[self.clients[k] for k in order],
            client_address=np.ascontiguousarray(self.client_address[:, order]),
            other_inputs=[*self.other_inputs, *map(tuple, extents)],
            positions=self.given(order),
            has=None if self.has is None else self.has[:, order],
        )

    def of_round(self, order: Sequence[int]) -> Table:
        """The clients of a round, in their order"""
        return self.part(order)

    def with_center_as_client(self) -> Table:
        """The same table with the global model as one more client, the last."""
        address = np.concatenate([self.client_address, self.center_address[:, None]], axis=1)
        clients, has = [*self.clients, self.global_model], self.has_and_whole()
        return replace(self, clients=clients, client_address=address, client_ids=None, has=has)

    def has_and_whole(self) -> np.ndarray | None:
        """Which tensors the clients have, and one more that has all: [T, K + 1]"""
        return None if self.has is None else np.column_stack([self.has, np.ones(self.T, dtype=bool)])

    @property
    def T(self) -> int:
        return len(self.layout.keys)


@dataclass(frozen=True)
class ParameterNames:
    """Which tensors are parameters; None: all but BUFFER_NAMES. A tied one has several names, and counts once."""

    names: frozenset[str] | None = None
    tied: frozenset[str] = frozenset()


def parameter_names(params: Iterable[str] | torch.nn.Module | ParameterNames | None) -> ParameterNames:
    if isinstance(params, ParameterNames):
        return params
    if isinstance(params, torch.nn.Module):
        names = frozenset(name for name, _ in params.named_parameters(remove_duplicate=False))
        return ParameterNames(names, names - frozenset(name for name, _ in params.named_parameters()))
    if params is None:
        return ParameterNames()
    names = frozenset(params)
    if not names:
        raise InputError("params: no names given")
    return ParameterNames(names)


def build(
    global_sd: StateDict | None,
    client_sds: Sequence[StateDict | InputError],
    *,
    params: Iterable[str] | torch.nn.Module | ParameterNames | None = None,
    layers: Callable[[str], str] | None = None,
    client_ids: Sequence[Any] | None = None,
    hints: bool = True,
    narrow: bool = False,
    partial: bool = False,
    bad: dict[int, str] | None = None,
) -> Table:
    """Checks the models against each other and returns their table. Without a global model, client 0 sets the form.

    hints   warn of what is allowed and probably a mistake: clients that are the same tensors
    narrow  clients may have NARROWER floats than the form: their tensors are in the table as they are
    partial clients may lack tensors, but not all parameters; there must be a global model
    bad     clients that do not fit are left out of the table, and what is wrong with them goes in here, by position;
            without a global model, the form that most clients have is then the right one. Default: the first one raises

    In the place of a client's model there may be an InputError that says why there is none.
    """
    if isinstance(client_sds, Mapping) or not isinstance(client_sds, Iterable):
        what = "one mapping" if isinstance(client_sds, Mapping) else f"a {type(client_sds).__name__}"
        raise InputError(f"client_sds is {what}; expected a sequence of state dicts, one per client")
    models: list[Any] = list(client_sds)
    if not models:
        raise InputError("no clients: client_sds is empty")
    some = list(range(len(models)))  # positions of the clients that fit
    for k, sd in enumerate(models):
        if not isinstance(sd, _MAPPING):
            name, fault = client_name(k, client_ids), f"a {type(sd).__name__}, expected a state dict (name -> tensor)"
            said = (
                (f"{name}: {sd}", str(sd)) if isinstance(sd, InputError) else (f"{name} is {fault}", f"it is {fault}")
            )
            leave_out(k, *said, some, bad)
    if global_sd is not None and not isinstance(global_sd, _MAPPING):
        raise InputError(f"the global model is a {type(global_sd).__name__}, expected a state dict (name -> tensor)")

    metadata = getattr(models[some[0]] if global_sd is None else global_sd, "_metadata", None)
    models = [_plain_dict(sd) if isinstance(sd, _MAPPING) else sd for sd in models]
    global_sd = None if global_sd is None else _plain_dict(global_sd)
    chosen = parameter_names(params)
    while True:
        first = some[0] if bad is None or global_sd is not None else most_usual(models, some)
        who = client_name(first, client_ids) if global_sd is None else "the global model"
        reference = models[first] if global_sd is None else global_sd
        layer_names = None if layers is None else tuple(layers(key) for key in reference)
        try:
            layout, device, as_numpy, seen = _form_of(reference, who, (chosen.names, chosen.tied, layer_names))
            break
        except InputError as error:
            if bad is None or global_sd is not None or not str(error).startswith(f"{who}: "):
                raise
            leave_out(first, str(error), str(error).removeprefix(f"{who}: "), some, bad, error)

    if partial:
        assert global_sd is not None
        used = layout.is_param & (layout.numel > 0)
        compared = [key for key, is_used in zip(layout.keys, used, strict=True) if is_used] or layout.keys
        for k in list(some):
            if not any(key in models[k] for key in compared):
                reason = f"it has no parameter of the global model{prefix_hint(models[k], layout.keys)}"
                leave_out(k, f"{client_name(k, client_ids)}: {reason}", reason, some, bad)
    K, T = len(models), len(layout.keys)
    center_address = np.zeros((T, 1), dtype=np.int64)
    center, other_inputs = None, []
    if global_sd is not None and seen is not None:
        center, center_address = seen
    elif global_sd is not None:
        [scanned] = scan([global_sd], layout, device, center_address)
        center = look_closer(global_sd, layout, device, who, center_address[:, 0], scanned, other_inputs)
    clients, fits, given = [], [], tuple(some)
    client_address = np.empty((T, len(given)), dtype=np.int64)
    all_scanned = scan([models[k] for k in given], layout, device, client_address)
    for m, (k, scanned) in enumerate(zip(given, all_scanned, strict=True)):
        if scanned[1] or len(models[k]) != T:
            name = client_name(k, client_ids)
            try:
                instead = None if not partial or center is None else (center, center_address[:, 0])
                address = client_address[:, m]
                look_closer(models[k], layout, device, name, address, scanned, other_inputs, narrow, instead)
            except InputError as error:
                for value in models[k].values():  # it may be anything, and is an input all the same
                    with suppress(TypeError, ValueError, RuntimeError):
                        other_inputs.append(extent(value))
                leave_out(k, str(error), str(error).removeprefix(f"{name}: "), some, bad, error)
                continue
        clients.append(scanned[0])
        fits.append(m)
    if len(fits) < len(given):
        client_address = np.ascontiguousarray(client_address[:, fits])
    positions = some if len(some) < K else None
    has = None
    if partial and any(len(models[k]) < T for k in some):
        has = np.array([[key in models[k] for k in some] for key in layout.keys])
    if hints:
        at = positions or range(K)
        warn_of_same_tensors(client_address, layout.numel > 0, lambda k: client_name(at[k], client_ids))
    return Table(
        layout, device, clients, center, client_address, center_address[:, 0], as_numpy, metadata, other_inputs,
        client_ids, positions, has=has,
    )  # fmt: skip


def leave_out(
    k: int, message: str, reason: str, some: list[int], bad: dict[int, str] | None, cause: Exception | None = None
) -> None:
    """Raises, or notes what is wrong with client k and removes it from some"""
    if bad is not None:
        bad[k] = reason
        some.remove(k)
    if bad is None or not some:
        raise BadClientError(message, {k: reason}) from cause


def most_usual(client_sds: Sequence[StateDict], some: Sequence[int]) -> int:
    """The first client of the form that most of them have"""

    def form(sd: StateDict) -> frozenset:
        return frozenset((key, str(getattr(v, "shape", None)), str(getattr(v, "dtype", None))) for key, v in sd.items())

    forms = [form(client_sds[k]) for k in some]
    return some[forms.index(Counter(forms).most_common(1)[0][0])]


Seen = tuple[list[torch.Tensor], np.ndarray]  # a model's tensors, and their addresses [T, 1]
Scanned = tuple[list[Any], Iterable[int]]  # a model's tensors, and the indices of those that are still None


def _form_of(reference: dict, who: str, options: tuple) -> tuple[Layout, torch.device, tuple[bool, ...], Seen | None]:
    """Layout, device, and which keys are NumPy arrays. A model like one before is recognised without a closer look, and
    its tensors are seen on the way."""
    names = tuple(reference), *options
    layout = _former.get(names)
    if layout is not None:
        device = getattr(next(iter(reference.values()), None), "device", _CPU)  # NumPy's arrays may have one, a string
        device = device if isinstance(device, torch.device) else _CPU
        address = np.empty((len(layout.keys), 1), dtype=np.int64)
        [(tensors, odd)] = scan([reference], layout, device, address)
        if not odd:
            return layout, device, (False,) * len(layout.keys), (tensors, address)
    tensors, as_numpy = _read_reference(reference, who)
    shapes, dtypes = tuple(tuple(t.shape) for t in tensors), tuple(t.dtype for t in tensors)
    layout = layout_of(names[0], shapes, dtypes, *options)
    if len(_former) >= 64:
        _former.clear()
    _former[names] = layout
    return layout, tensors[0].device if tensors else _CPU, as_numpy, None


_former: dict[tuple, Layout] = {}
_MAPPING = (dict, Mapping)  # to ask for the first is ten times faster
_CPU = torch.device("cpu")


def _plain_dict(sd: StateDict) -> dict:
    """The mapping itself where looking a key up costs nothing; else its tensors, each asked for once"""
    return sd if _is_plain_dict(sd) else {key: sd[key] for key in sd}


def _is_plain_dict(sd: StateDict) -> TypeGuard[dict]:
    return isinstance(sd, dict) and type(sd).__getitem__ is dict.__getitem__


def client_name(k: int, client_ids: Sequence[Any] | None) -> str:
    return f"client {k}" if client_ids is None or client_ids[k] == k else f"client {k} (id {client_ids[k]!r})"


def _read_reference(sd: StateDict, who: str) -> tuple[list[torch.Tensor], tuple[bool, ...]]:
    tensors = []
    for key, value in sd.items():
        if not isinstance(key, str):
            raise InputError(f"{who}: key {key!r} is a {type(key).__name__}, expected a string")
        tensor = value if type(value) in PLAIN else as_tensor(value, who, key)
        if tensor.dtype not in DTYPE_CODE:
            raise InputError(f"{who}: key {key!r} has dtype {tensor.dtype}, which cannot be aggregated")
        if tensors and tensor.device != tensors[0].device:
            raise InputError(f"{who}: key {key!r} is on {tensor.device}, other tensors are on {tensors[0].device}")
        tensors.append(tensor)
    return tensors, tuple(not isinstance(value, torch.Tensor) for value in sd.values())


def look_closer(
    sd: StateDict, layout: Layout, device, who: str, address: np.ndarray, scanned: Scanned, others: list | None = None,
    narrow: bool = False, instead: tuple[list, np.ndarray] | None = None,
) -> list:  # fmt: skip
    """The tensors of one model in the layout's order, checked where the scan left that; their addresses go to address,
    [T]. Where the caller's own memory is not the one read, it is added to others.

    instead   what stands in the place of tensors that it does not have, and their addresses [T]"""
    tensors, odd = scanned
    lacks = 0
    for t in odd:
        key = layout.keys[t]
        if key not in sd and instead is not None:
            tensors[t], address[t] = instead[0][t], instead[1][t]
            lacks += 1
            continue
        if key not in sd:
            raise InputError(f"{who}: key {key!r} is missing{prefix_hint(sd, layout.keys)}")
        given = as_tensor(sd[key], who, key)
        dtype = layout.dtypes[t]
        if narrow and given.dtype in NARROWER.get(dtype, ()):
            dtype = given.dtype
        tensors[t] = checked(given, layout.shapes[t], dtype, device, who, key)
        address[t] = tensors[t].data_ptr()
        if others is not None and tensors[t] is not sd[key]:
            others.append(extent(sd[key]))
    if len(sd) != len(layout.keys) - lacks:
        known = set(layout.keys)
        extra = next(key for key in sd if key not in known)
        raise InputError(f"{who}: key {extra!r} is not in the model it is compared with")
    return tensors


def scan(sds: Sequence[StateDict], layout: Layout, device: torch.device, address: np.ndarray) -> Sequence[Scanned]:
    """The tensors of models, natively and so fast, and the indices of those that want a closer look (None in the list).
    Their addresses go to address[:, m]."""
    if scanner.NATIVE is None or device.type not in scanner.DEVICES or not all(map(_is_plain_dict, sds)):
        return [([None] * len(layout.keys), range(len(layout.keys))) for _ in sds]
    where = scanner.DEVICES[device.type], device.index or 0
    return scanner.NATIVE.scan(cast(list[dict], list(sds)), layout.keys, layout.shapes, layout.codes, where, address)


def extent(value: Any) -> tuple[int, int]:
    """[first byte, past the last) of the memory a tensor or array looks at"""
    if isinstance(value, torch.Tensor):
        tensor = _plain(value)
        start, width = tensor.data_ptr(), tensor.element_size()
        shape, strides = tensor.shape, [width * stride for stride in tensor.stride()]
    else:
        array = np.asarray(value)
        start, width, shape, strides = array.__array_interface__["data"][0], array.itemsize, array.shape, array.strides
    if 0 in shape:
        return start, start
    reach = [(n - 1) * stride for n, stride in zip(shape, strides, strict=True)]
    return start + sum(min(r, 0) for r in reach), start + sum(max(r, 0) for r in reach) + width


def checked(tensor: torch.Tensor, shape, dtype, device, who: str, key: str) -> torch.Tensor:
    if tuple(tensor.shape) != shape:
        raise InputError(f"{who}: key {key!r} has shape {tuple(tensor.shape)}, expected {shape}")
    if tensor.dtype != dtype:
        raise InputError(f"{who}: key {key!r} has dtype {tensor.dtype}, expected {dtype}")
    if tensor.device != device:
        raise InputError(
            f"{who}: key {key!r} is on {tensor.device}, expected {device}: all models must be on one device"
        )
    check_memory(tensor, who, key)
    if tensor.is_contiguous() and not tensor.is_neg():
        return tensor
    return tensor.detach().resolve_neg().contiguous()


def check_memory(tensor: torch.Tensor, who: str, key: str) -> None:
    """A storage can be freed, or made smaller, under a tensor that keeps its shape."""
    count = tensor.numel()
    if not count:
        return
    if not tensor.is_contiguous():
        count = 1 + sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    needed = (tensor.storage_offset() + count) * tensor.element_size()
    try:
        there = tensor.data_ptr() and needed <= tensor.untyped_storage().nbytes()
    except RuntimeError:  # a wrapper, whose numbers are elsewhere
        there = False
    if not there:
        raise InputError(f"{who}: key {key!r} has no memory: its storage was freed, or is smaller than its shape")


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """What a tensor is, whatever its class says: a subclass may answer anything when asked for its shape or address"""
    if type(tensor) in PLAIN:
        return tensor
    with torch._C.DisableTorchFunctionSubclass(), torch._C._DisableTorchDispatch():
        return torch.Tensor.as_subclass(tensor, torch.Tensor)


def as_tensor(value: Any, who: str, key: str) -> torch.Tensor:
    """The value as a dense tensor over the same memory, of torch's own class."""
    if type(value) in PLAIN and value.layout is torch.strided and not (value.is_meta or value.is_nested):
        return value
    if isinstance(value, np.ndarray | np.generic):
        return _from_numpy(np.asarray(value), who, key)
    if not isinstance(value, torch.Tensor):
        raise InputError(f"{who}: key {key!r} is a {type(value).__name__}, expected a torch tensor or NumPy array")
    kind = next((kind for kind, is_kind in _UNSUPPORTED if is_kind(value)), None)
    if kind is not None:
        raise InputError(f"{who}: key {key!r} is a {kind} tensor; only ordinary dense tensors can be aggregated")
    return _plain(value)


class _Writable:
    """A NumPy array's memory without its read-only flag: torch warns about that flag, and we never write."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array  # keeps the memory alive
        self.__array_interface__ = {**array.__array_interface__, "data": (array.__array_interface__["data"][0], False)}


def _from_numpy(array: np.ndarray, who: str, key: str) -> torch.Tensor:
    if not array.dtype.isnative or any(s < 0 for s in array.strides):
        array = array.astype(array.dtype.newbyteorder("="))
    is_bfloat16 = array.dtype.name == "bfloat16"  # ml_dtypes; NumPy itself has no such dtype
    if is_bfloat16:
        array = array.view(np.uint16)
    if not array.flags.writeable:
        array = np.asarray(_Writable(array))
    try:
        tensor = torch.from_numpy(array)
    except TypeError:
        raise InputError(f"{who}: key {key!r} has NumPy dtype {array.dtype}, which cannot be aggregated") from None
    return tensor.view(torch.bfloat16) if is_bfloat16 else tensor


_UNSUPPORTED = (
    ("DTensor", lambda t: type(t).__name__ == "DTensor"),
    ("fake", lambda t: type(t).__name__ == "FakeTensor"),
    ("meta", lambda t: t.is_meta),
    ("nested", lambda t: t.is_nested),
    ("sparse", lambda t: t.layout is not torch.strided),
    (
        "wrapper",
        lambda t: type(t) not in PLAIN and is_traceable_wrapper_subclass(t),
    ),
)
