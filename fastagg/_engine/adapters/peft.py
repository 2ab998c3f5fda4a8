"""PEFT's names and settings: which tensors of an adapter are factors, and how they are scaled.

    base_model.model.<module>.lora_A.weight, .lora_B.weight                the module's weight is W + scaling * B A
    base_model.model.<module>.lora_A.<adapter>.weight, ..                  the same, where the model itself was asked
    base_model.model.<module>.lora_embedding_A, .lora_embedding_B          W + scaling * (B A)', of an embedding

Everything else is a plain tensor: modules_to_save, and biases.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import torch

from fastagg._engine.adapters.factors import Factors
from fastagg._engine.checks import InputError
from fastagg._engine.dtypes import FLOATING
from fastagg._engine.outputs import to_numpy
from fastagg._engine.table import as_tensor, check_memory

KEY = re.compile(r"(.+)\.(?:lora_([AB])(?:\.[^.]+)?\.weight|lora_embedding_([AB])(?:\.[^.]+)?)")
DORA = "the weights of DoRA are scaled column by column after B A is added, so B A is not its update"
KASA = "KaSA multiplies with lora_diag between B and A"
MONTE = "MonteCLoRA samples around single rows of A, which new factors do not have"
# Whose updates are not B A of the factors as they are stored, by their keys and by what their configs say
KEYS_REFUSED = {
    "lora_magnitude_vector": DORA, "lora_E": "AdaLoRA multiplies with it between B and A", "lora_diag": KASA,
    "lora_monteclora_sampler": MONTE,
}  # fmt: skip
CONFIGS_REFUSED = {
    "use_dora": DORA, "kasa_config": KASA, "monteclora_config": MONTE,
    "use_bdlora": "a factor of blocks on a diagonal is stored as a narrow one, which is another",
    "target_parameters": "adapters of parameters (experts) are no single products B A",
}  # fmt: skip
FACTOR = re.compile(r"(?:.*\.)?lora[_.](?:A|B|embedding_A|embedding_B|down|up)(?:\..*)?")  # by others' names, too
BIAS = re.compile(r".+\.lora_B(?:\.[^.]+)?\.bias")  # of lora_bias: a plain tensor, which is scaled as B is
NAME = re.compile(r"\^?(?:[\w.-]|\\[^\w\s])+\$?")  # of a module, maybe escaped, maybe the whole name
PREFIX = "base_model.model."
LEAST = 1e-30  # of a scaling; the largest is 1 / LEAST. Beyond, one client would take all others out of float64
MOST_RANK = 1024  # of a module that is smaller

Scaling = float | Callable[[int], float] | None  # of all modules; or from the rank


@dataclass(frozen=True, eq=False)
class Names:
    """The keys of a module's two factors, and their shapes, which convolutions have more of"""

    A: str
    B: str
    shape_A: tuple[int, ...]  # behind [r]
    shape_B: tuple[int, ...]  # behind [out, r]: ones
    as_numpy: bool  # as the caller's are

    def for_caller(self, tensor: torch.Tensor) -> Any:
        return to_numpy(tensor) if self.as_numpy else tensor


@dataclass(frozen=True, eq=False)
class Parsed:
    """An adapter: the factors of its modules, its plain tensors, and its config if it came with one"""

    factors: dict[str, Factors]
    names: dict[str, Names]
    plain: dict[str, Any]
    config: Mapping[str, Any] | None

    @property
    def largest(self) -> int:
        """Of its ranks"""
        return max((f.rank for f in self.factors.values()), default=0)


def parse(adapter: Any, scaling: Scaling, who: str) -> Parsed:
    """Pairs the factors of an adapter. InputErrors begin with `who`.

    scaling   of an adapter without a config; default: 1
    """
    if not isinstance(adapter, Mapping):
        raise InputError(f"{who} is a {type(adapter).__name__}, expected an adapter: a state dict, or its folder")
    config = getattr(adapter, "config", None)
    if config is not None:
        check_config(config, who)
    pairs: dict[str, dict[str, str]] = {}
    plain: dict[str, Any] = {}
    for key, value in adapter.items():
        if not isinstance(key, str):
            raise InputError(f"{who}: key {key!r} is a {type(key).__name__}, expected a string")
        found = KEY.fullmatch(key)
        if found is None:
            for name, why in KEYS_REFUSED.items():
                if name in key:
                    raise InputError(f"{who}: key {key!r}: {why}")
            plain[key] = value
            continue
        other = pairs.setdefault(found[1], {}).setdefault(found[2] or found[3], key)
        if other != key:
            raise InputError(f"{who}: {other!r} and {key!r} are two adapters of one module; pass one of them")
    for key in plain:
        if FACTOR.fullmatch(key) and not BIAS.fullmatch(key):
            raise InputError(
                f"{who}: key {key!r} is no factor by PEFT's names, <module>.lora_A.weight and .lora_B.weight"
            )
    scaled = scaling_of(config) if config is not None else lambda _, rank: _given(scaling, rank)
    rank_of = _ranks(config or {})
    factors, names = {}, {}
    for module, pair in pairs.items():
        factors[module], names[module] = _pair(adapter, module, pair, scaled, who)
        found, said = factors[module].rank, rank_of(module)
        if said is not None and said != found:
            raise InputError(f"{who}: key {names[module].A!r} has rank {found}, and its config says {said}")
    return Parsed(factors, names, plain, config)


def _pair(
    adapter: Mapping, module: str, pair: dict[str, str], scaled: Callable[[str, int], float], who: str
) -> tuple[Factors, Names]:
    for side, other in ("AB", "BA"):
        if side not in pair:
            raise InputError(f"{who}: key {pair[other]!r} has no counterpart lora_{side}")
    A, B = (_tensor(adapter[pair[side]], who, pair[side]) for side in "AB")
    if min(A.dim(), B.dim()) < 2 or B.shape[1] != A.shape[0] or not A.numel() * len(B) or math.prod(B.shape[2:]) != 1:
        raise InputError(
            f"{who}: {pair['A']!r} of shape {tuple(A.shape)} and {pair['B']!r} of shape {tuple(B.shape)} are no "
            "factors B A of one rank"
        )
    if A.device != B.device:
        raise InputError(f"{who}: key {pair['B']!r} is on {B.device}, its counterpart on {A.device}")
    rank = len(A)
    if rank > max(len(B), A.numel() // rank, MOST_RANK):  # all its products would take far more memory than it does
        raise InputError(f"{who}: key {pair['A']!r} has rank {rank}, which is more than B A has rows and columns")
    s = scaled(module, rank)
    if not LEAST <= abs(s) <= 1 / LEAST:
        raise InputError(f"{who}: the scaling of module {module!r} is {s}, which leaves nothing of its update")
    as_numpy = not isinstance(adapter[pair["A"]], torch.Tensor)
    names = Names(pair["A"], pair["B"], tuple(A.shape[1:]), tuple(B.shape[2:]), as_numpy)
    return Factors(A.detach().reshape(rank, -1), B.detach().reshape(-1, rank), s), names


def _tensor(value: Any, who: str, key: str) -> torch.Tensor:
    tensor = as_tensor(value, who, key)
    if tensor.dtype not in FLOATING:
        raise InputError(f"{who}: key {key!r} is {tensor.dtype}; factors are floating-point tensors")
    check_memory(tensor, who, key)
    return tensor


def _given(scaling: Scaling, rank: int) -> float:
    return float(scaling(rank) if callable(scaling) else 1.0 if scaling is None else scaling)


def check_config(config: Any, who: str) -> None:
    """That it describes adapters W + scaling * B A, and has what their scaling is computed from"""
    if not isinstance(config, Mapping):
        raise InputError(f"{who}: its config is a {type(config).__name__}, expected what adapter_config.json has")
    kind = str(config.get("peft_type", "LORA")).rpartition(".")[2].upper()
    if kind != "LORA":
        raise InputError(f"{who}: peft_type is {kind}; only LORA adapters have updates B A")
    for name, why in CONFIGS_REFUSED.items():
        if config.get(name):
            raise InputError(f"{who}: {name}: {why}")
    if not isinstance(config.get("use_rslora"), bool | None):
        raise InputError(f"{who}: use_rslora is {repr(config['use_rslora'])[:80]}, expected true or false")
    for name in ("alpha_pattern", "rank_pattern"):
        if config.get(name) and not isinstance(config[name], Mapping):
            raise InputError(f"{who}: {name} is {repr(config[name])[:80]}, expected an object")
    alphas = [config.get("lora_alpha"), *_pattern(config, "alpha_pattern").values()]
    for alpha in alphas:
        if not _is_number(alpha):
            raise InputError(f"{who}: lora_alpha is {repr(alpha)[:80]}, expected a number")
    for rank in (config.get("r"), *_pattern(config, "rank_pattern").values()):
        if rank is not None and (not isinstance(rank, Integral) or isinstance(rank, bool)):
            raise InputError(f"{who}: r is {repr(rank)[:80]}, expected an integer")
    for pattern in _pattern(config, "alpha_pattern"):  # a stranger's regular expression may take for ever
        if not isinstance(pattern, str) or not NAME.fullmatch(pattern):
            raise InputError(f"{who}: alpha_pattern has {pattern!r}; only names of modules are understood")


def _is_number(value: Any) -> bool:
    try:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:  # an integer beyond float64
        return False


def scaling_of(config: Mapping[str, Any]) -> Callable[[str, int], float]:
    """By module and rank: alpha / r, or alpha / sqrt(r) of rsLoRA"""
    alpha_of, root = _by_module(config, "lora_alpha", "alpha_pattern"), bool(config.get("use_rslora"))
    return lambda module, rank: float(alpha_of(module)) / (math.sqrt(rank) if root else rank)


def _ranks(config: Mapping[str, Any]) -> Callable[[str], int | None]:
    """By module; None if it is not said, or said by other regular expressions than names"""
    if all(isinstance(pattern, str) and NAME.fullmatch(pattern) for pattern in _pattern(config, "rank_pattern")):
        return _by_module(config, "r", "rank_pattern")
    return lambda _: None


def _by_module(config: Mapping[str, Any], usual: str, patterns: str) -> Callable[[str], Any]:
    """What a config says of a module. The patterns have modules' own values, by their names or what these end with; the
    first that fits counts, as in PEFT."""
    own: dict[str, tuple[int, Any]] = {}  # by name, and by ^name if it is the whole name
    for at, (pattern, value) in enumerate(_pattern(config, patterns).items()):
        own.setdefault(pattern.removesuffix("$").replace("\\", ""), (at, value))

    def found(module: str) -> Any:
        name = module.removeprefix(PREFIX)
        those = [own[end] for end in (f"^{name}", name, *_ends(name)) if end in own]
        return min(those, default=(0, config.get(usual)))[1]

    return found


def targeting(config: Mapping[str, Any], modules: Iterable[str]) -> Mapping[str, Any]:
    """The config with which PEFT gives factors to these modules, too"""
    targets, names = config.get("target_modules"), [module.removeprefix(PREFIX) for module in modules]
    if isinstance(targets, str) and targets != "all-linear" and names:
        return {**config, "target_modules": "|".join([f"(?:{targets})", *map(re.escape, names)])}
    if not isinstance(targets, list | tuple | set | frozenset) or not all(isinstance(end, str) for end in targets):
        return config
    known = set() if config.get("layers_to_transform") else targets  # PEFT takes whole names in all layers
    names = [name for name in names if name not in targets and not any(end in known for end in _ends(name))]
    return {**config, "target_modules": sorted({*targets, *names})} if names else config


def config_with(config: Mapping[str, Any], ranks: Mapping[str, int], scalings: Mapping[str, float]) -> dict[str, Any]:
    """The config with which PEFT gives these modules these ranks and scalings: the usual ones, and patterns"""
    if not ranks:
        return dict(config)
    rs = bool(config.get("use_rslora"))
    alphas = {m: scalings[m] * (math.sqrt(r) if rs else r) for m, r in ranks.items()}
    alphas = {m: round(a) if math.isclose(a, round(a), rel_tol=1e-12) else a for m, a in alphas.items()}
    [(r, _)], [(alpha, _)] = (Counter(values.values()).most_common(1) for values in (ranks, alphas))
    return {
        **config,
        "r": r,
        "lora_alpha": alpha,
        "rank_pattern": _exceptions(ranks, r),
        "alpha_pattern": _exceptions(alphas, alpha),
    }


def _exceptions(values: Mapping[str, Any], usual: Any) -> dict[str, Any]:
    """The modules that have another value than the usual one, as a pattern of PEFT, which takes the first that fits: a
    longer name comes before the one that it ends with, and has to be there if that one is"""
    names = {module.removeprefix(PREFIX): value for module, value in values.items()}
    odd = {name for name, value in names.items() if value != usual}
    some = [name for name in names if name in odd or any(end in odd for end in _ends(name))]
    return {re.escape(name): names[name] for name in sorted(some, key=len, reverse=True)}


def _ends(name: str) -> Iterator[str]:
    while "." in name:
        name = name.partition(".")[2]
        yield name


def _pattern(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = config.get(name)
    return found if isinstance(found, Mapping) else {}
