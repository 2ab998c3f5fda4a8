"""Every option of a simulated run, where it can be read from (command line, TOML, a former run), and its checks."""

from __future__ import annotations

import dataclasses
import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

from fastagg._engine.checks import check_choice, check_integer, check_number, suggest
from fastagg._engine.regular import open_regular
from fastagg._engine.terminal import key_value
from fastagg.sim.choices import (
    ATTACK_DIRECTIONS,
    ATTACK_KNOWS,
    ATTACK_STRENGTHS,
    ATTACKS,
    ATTACKS_WITHOUT_STRENGTH,
    DATASETS,
    KINDS,
    MODELS,
    PIXELS,
    PROXY_FROM,
    PROXY_SPLITS,
)

if TYPE_CHECKING:  # torch is imported when a Config is made, not to print help
    from fastagg._engine.aggregator import Aggregator
    from fastagg.sim.local import Algorithm
    from fastagg.sim.train import Local

# Names for what is a method of the registry with options, or with another client algorithm
ALIASES: dict[str, dict[str, Any]] = {
    "fedawa-l": {"method": "fedawa", "options": {"layerwise": True}},
    "fedawa-cos": {"method": "fedawa", "options": {"variant": "cos"}},
    "fedprox": {"method": "fedavg", "algorithm": "fedprox"},
    "feddyn": {"method": "fedavg", "algorithm": "feddyn"},
    "scaffold": {"method": "fedavg", "algorithm": "scaffold"},
    "moon": {"method": "fedavg", "algorithm": "moon"},
}


ROLES = ("module", "head", "loss")  # of options that the run itself sets; see fastagg.extend.SetBy
# Options that name something, in whose place a user may have something of their own: an object in Python (objects.py),
# `package.module:attribute` everywhere
NAMES = ("method", "data", "model", "partition", "attack", "algorithm", "loss", "metric")


def option(default: Any, shown: str) -> Any:
    """A field with what --help shows of it"""
    return field(default=default, metadata={"help": shown})


@dataclass(frozen=True, kw_only=True)
class Config:
    """One run: a method, a seed, and everything else that its curve depends on."""

    method: str = option(
        "fedavg",
        f"aggregation method, as listed by `fastagg methods`, or {', '.join(ALIASES)}, or package.module:Class",
    )
    options: dict[str, Any] = field(
        default_factory=dict, metadata={"help": "option of the method, key=value; repeatable"}
    )
    data: str = option("digits", f"data set: {', '.join(DATASETS)}; or package.module:function, which returns one")
    data_dir: str | None = option(
        None, "folder with the files of the data set, the only one searched; default: FASTAGG_DATA"
    )
    pixels: str = option(
        "standard",
        "standard (mean 0, deviation 1); unit (0 to 1), FedLAW: Fashion-MNIST; half (-1 to 1), FedAWA: CIFAR",
    )
    samples: int | None = option(None, "number of training samples to use")
    partition: str = option(
        "dirichlet", f"how samples are split over clients: {', '.join(KINDS)}; or package.module:function"
    )
    alpha: float = option(0.1, "concentration of the Dirichlet split: small: clients differ, large: they are similar")
    classes_per_client: int = option(2, "classes per client in the pathological split")
    min_size: int = option(10, "minimum number of samples per client")
    long_tail: float = option(1.0, "ratio of the sizes of the most frequent and the rarest class")
    corrupted: float = option(0.0, "fraction of clients whose labels are swapped")
    clients: int = option(20, "number of clients")
    domain_clients: str | None = option(
        None, "how many of them each domain has, as 3,7,6,4; default: as equally many as can be"
    )
    participation: float = option(1.0, "fraction of clients that take part in a round")
    selection: str = option("random", "how participants are chosen: random, or window (SimProx's sliding window)")
    dropout: float = option(0.0, "probability that a participating client sends nothing")
    stragglers: float = option(0.0, "probability that a client does fewer epochs than requested")
    clock: str | None = option(
        None,
        "record simulated time. sync: a round lasts as long as its slowest client; async: clients do not wait for each "
        "other (fedbuff, fedasync). Default, with --speeds: async for these two, sync for the others",
    )
    speeds: str | None = option(
        None, "speeds of the clients: lognormal:0.5, uniform:0.2,1, or a number for each (default: all 1)"
    )
    until: float | None = option(None, "simulated time at which a run ends, if its rounds have not ended it before")
    attack: str = option("none", f"what malicious clients do: {', '.join(ATTACKS)}; or package.module:function")
    attackers: float = option(0.0, "fraction of clients that are malicious, drawn from the seed")
    attack_strength: float | None = option(
        None,
        "factor of the update that attackers send: noise, flip, scale (default 10), labels, backdoor (1); ipm: epsilon "
        "(0.5); alie: z (default: the paper's, from the number of attackers)",
    )
    attack_knows: str = option("honest", "whose updates attackers know and hide among: honest clients', or their own")
    attack_direction: str = option("unit", "of min-max and min-sum: unit, std or sign")
    attack_target: int = option(0, "class that a backdoor leads to")
    attack_share: float = option(0.5, "fraction of an attacker's images that get the trigger of a backdoor")
    model: str = option("mlp", f"network: {', '.join(MODELS)}; or package.module:factory, which returns one")
    rounds: int = option(50, "training rounds")
    epochs: int = option(3, "passes of a client over its data per round")
    batch_size: int = option(50, "samples per batch")
    lr: float = option(0.05, "learning rate of the clients")
    lr_decay: float = option(0.99, "factor applied to the learning rate after each round")
    momentum: float = option(0.9, "momentum of the clients' SGD")
    weight_decay: float = option(5e-4, "weight decay of the clients' SGD")
    keep_momentum: bool = option(False, "clients keep their momentum from round to round (true, false)")
    train_share: float = option(1.0, "fraction of its samples that a client trains on")
    algorithm: str = option(
        "sgd", "what clients do: sgd, fedprox, feddyn, scaffold or moon; or package.module:function"
    )
    mu: float | None = option(None, "strength of the extra term: fedprox and feddyn (default 0.01), moon (1)")
    wdr: float = option(0.0, "strength of cwFedAvg's weight distribution regulariser")
    loss: str | None = option(None, "package.module:function of outputs and targets; default: cross-entropy")
    metric: str | None = option(None, "package.module:function of outputs and targets; default: accuracy")
    metric_best: str = option("max", "whether a large or a small metric is good: max, min")
    proxy: int = option(100, "samples that the server keeps, for methods that learn from them")
    proxy_from: str = option("train", "where these are from: train, or test, which is then tested on without them")
    proxy_split: str = option("balanced", "how many of each class: " + ", ".join(PROXY_SPLITS))
    seed: int = option(0, "seed of the split, the initial model, the batches and everything else that is random")
    ideal: bool = option(
        False, "also train on all data together in every round, and record how far updates are from that (true, false)"
    )
    threads: int = option(1, "threads per run, each with clients of its own. Parallel runs use the other cores")
    device: str = option("cpu", "where clients train: cpu, cuda, cuda:1, mps")
    precision: str = option("float32", "float32, or bfloat16 for what autocast computes in it")
    batched: bool | None = option(None, "train all clients as one computation (true, false; default: if it is faster)")

    def __post_init__(self) -> None:
        self._check_names()
        check_choice("sim", "metric_best", self.metric_best, ("max", "min"))
        check_choice("sim", "precision", self.precision, ("float32", "bfloat16"))
        check_choice("sim", "keep_momentum", self.keep_momentum, (True, False))
        check_number("sim", "train_share", self.train_share, 0, 1, strict=True)
        check_choice("sim", "selection", self.selection, ("random", "window"))
        check_choice("sim", "batched", self.batched, (None, True, False))
        check_choice("sim", "ideal", self.ideal, (True, False))
        _ = self.clients_of_domains
        check_choice("sim", "clock", self.clock, (None, "sync", "async"))
        if self.until is not None:
            check_number("sim", "until", self.until, 0, float("inf"), strict=True)
            if self.clock is None and self.speeds is None:
                raise ValueError(f"sim: until={self.until} without a clock; choose one (--clock), or --speeds")
        if self.speeds is not None:
            from fastagg.sim.pace import parsed  # with NumPy

            parsed(self.speeds)
        for name, low in (("clients", 1), ("rounds", 1), ("proxy", 0), ("seed", 0), ("min_size", 1), ("threads", 1)):
            check_integer("sim", name, getattr(self, name), low)
        for name, most in (("rounds", 10**9), ("seed", 2**62), ("threads", 1024), ("clients", 10**6)):
            check_number("sim", name, getattr(self, name), 0, most)
        if self.samples is not None:
            check_integer("sim", "samples", self.samples, 1)
        check_number("sim", "participation", self.participation, 0, 1, strict=True)
        check_number("sim", "lr_decay", self.lr_decay, 0, 1, strict=True)
        for name in ("dropout", "stragglers", "corrupted", "attackers"):
            check_number("sim", name, getattr(self, name), 0, 1)
        check_choice("sim", "pixels", self.pixels, PIXELS)
        check_choice("sim", "proxy_from", self.proxy_from, PROXY_FROM)
        check_choice("sim", "proxy_split", self.proxy_split, tuple(PROXY_SPLITS))
        self._check_attack()
        if self.dropout == 1:
            raise ValueError("sim: dropout=1 leaves nobody; expected a number below 1")
        _ = self.local  # its own checks
        if not isinstance(self.options, dict):
            raise ValueError(f"sim: options={self.options!r}; expected a table of the method's options")
        if not is_own(self.method):
            self.check_method(self.aggregator_class)

    def _check_attack(self) -> None:
        if self.attack_strength is not None:
            check_number("sim", "attack_strength", self.attack_strength, 0, float("inf"))
            if self.attack in ATTACKS_WITHOUT_STRENGTH:
                raise ValueError(
                    f"sim: attack_strength={self.attack_strength} with {self.attack}, which finds its own; leave it out"
                )
        check_choice("sim", "attack_knows", self.attack_knows, ATTACK_KNOWS)
        check_choice("sim", "attack_direction", self.attack_direction, ATTACK_DIRECTIONS)
        check_integer("sim", "attack_target", self.attack_target, 0)
        check_number("sim", "attack_share", self.attack_share, 0, 1, strict=True)
        if self.attackers and self.attack == "none":
            raise ValueError(f"sim: attackers={self.attackers} without an attack; choose one: {', '.join(ATTACKS[1:])}")

    @property
    def clients_of_domains(self) -> list[int] | None:
        """How many clients each domain has, if that is said"""
        if self.domain_clients is None:
            return None
        try:
            return [int(number) for number in self.domain_clients.split(",")]
        except (AttributeError, ValueError):
            raise ValueError(
                f"sim: domain_clients={self.domain_clients!r}; expected a number for each domain, as a text: 3,7,6,4"
            ) from None

    @property
    def strength(self) -> float | None:
        """Of the attack, in effect; None: the attack finds it"""
        return ATTACK_STRENGTHS.get(self.attack) if self.attack_strength is None else self.attack_strength

    def _check_names(self) -> None:
        known = {"data": DATASETS, "partition": tuple(KINDS), "model": MODELS, "attack": ATTACKS}
        for name in NAMES:
            value = getattr(self, name)
            if not isinstance(value, str) and not (value is None and name in ("loss", "metric")):
                raise ValueError(f"sim: {name}={value!r}; expected a name, or package.module:attribute")
            if value is not None and ":" not in value and name in (*known, "loss", "metric"):
                check_choice("sim", name, value, (*known.get(name, ()), "package.module:attribute"))

    def check_method(self, cls: type[Aggregator]) -> None:
        """That this method takes the options, and that it can be combined with the clients' algorithm"""
        from fastagg._engine import registry

        if taken := sorted(self.options.keys() & {"layers", "group", *options_of_the_model(cls, *ROLES)}):
            raise ValueError(f"sim: the simulator sets {', '.join(taken)} itself")
        server = registry.make(cls, self.options)  # raises where an option is unknown or out of range
        if ":" not in self.algorithm:
            check_combination(self.local.rule, self.method, server.produces)

    @property
    def aggregator_class(self) -> type[Aggregator]:
        from fastagg._engine.aggregator import Aggregator
        from fastagg._engine.registry import registry

        known = registry()
        if self.method in known:
            return known[self.method]
        if ":" not in self.method:
            names = [*sorted(known), *ALIASES]
            raise ValueError(f"no method {self.method!r}{suggest(self.method, names)}; there are {', '.join(names)}")
        from fastagg.sim.imports import resolve

        found = resolve(self.method)
        if not isinstance(found, type) or not issubclass(found, Aggregator):
            raise ValueError(f"{self.method} is a {type(found).__name__}; expected a class of fastagg.Aggregator")
        return found

    @property
    def local(self) -> Local:
        from fastagg.sim.train import Local

        names = [f.name for f in dataclasses.fields(Local)]
        return Local(**{name: getattr(self, name) for name in names})

    @property
    def label(self) -> str:
        """The method in a few words, with what makes it differ from its defaults, and the attack if there is one"""
        return self._method_label + self._attack_label

    @property
    def _attack_label(self) -> str:
        if self.attack == "none":
            return ""
        strength = "" if self.attack_strength is None else f" x {self.attack_strength:g}"
        names = ("attack_knows", "attack_direction", "attack_target", "attack_share")
        changed = {name.removeprefix("attack_"): getattr(self, name) for name in names}
        changed = {k: v for k, v in changed.items() if v != getattr(type(self), f"attack_{k}")}
        return _with(f", {short(self.attack)} {100 * self.attackers:g} %{strength}", changed)

    @property
    def _method_label(self) -> str:
        for alias, means in ALIASES.items():
            rest = dict(self.options)
            named = means.get("options", {})
            same = all(rest.get(k) == v for k, v in named.items())
            if self.method == means["method"] and same and self.algorithm == means.get("algorithm", "sgd"):
                return _with(alias, {k: v for k, v in rest.items() if k not in named})
        name = short(self.method)
        return _with(name if self.algorithm == "sgd" else f"{name}+{short(self.algorithm)}", self.options)

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def options_of_the_model(cls: type[Aggregator], *roles: str) -> dict[str, str]:
    """A method's options that describe the model, which the simulator sets: name -> what it is"""
    from fastagg._engine.options import options_of

    return {name: o.role for name, o in options_of(cls).items() if o.role in roles}


def is_own(text: str | None) -> bool:
    """The option is an object that exists only in the process that made it: see objects.py"""
    return text is not None and text.startswith("own:")


def short(text: str) -> str:
    """`package.module:Name` and `own:Name` in a label"""
    return text.rpartition(":")[2].rpartition("<locals>.")[2]


def check_combination(algorithm: Algorithm, method: str, produces: str) -> None:
    if algorithm.corrects and produces != "global":
        raise ValueError(
            f"sim: algorithm={algorithm.name} corrects one global model, and {method} has several; "
            "choose another algorithm (sgd, fedprox, moon) or a method with one model"
        )


def _with(name: str, options: dict[str, Any]) -> str:
    return name + (f" ({', '.join(f'{k}={v}' for k, v in sorted(options.items()))})" if options else "")


def from_dict(values: dict[str, Any], where: str = "") -> Config:
    """A Config of plain values; aliases of methods are replaced by what they stand for."""
    names = [f.name for f in dataclasses.fields(Config)]
    if not isinstance(values, dict) or not isinstance(values.get("options", {}), dict):
        raise ValueError(f"{where or 'sim'}: expected options by name, and those of the method in a table of their own")
    if not isinstance(values.get("method", ""), str):
        raise ValueError(f"{where or 'sim'}: method={values['method']!r}; expected a name")
    for unknown in values.keys() - set(names):
        raise ValueError(f"{where or 'sim'}: no option {unknown!r}{suggest(unknown, names)}")
    values = dict(values)
    if (alias := values.get("method")) in ALIASES:
        means = ALIASES[alias]
        given, own = values.get("algorithm", "sgd"), means.get("algorithm", "sgd")
        if "sgd" not in (given, own) and given != own:
            raise ValueError(
                f"{where or 'sim'}: {alias} is {means['method']} with algorithm={own}, and algorithm={given} was given "
                f"too; choose {means['method']}, or leave it out"
            )
        values |= {k: v for k, v in means.items() if k != "options"}
        values["options"] = {**means.get("options", {}), **values.get("options", {})}
    return Config(**values)


def is_method(text: str) -> bool:
    """Whether this names a method, and not a folder that happens to be called like one"""
    from fastagg._engine.registry import registry

    name, _ = name_and_options(text)
    return name in {*ALIASES, *registry()} or ":" in name


def name_and_options(text: str) -> tuple[str, str]:
    """`fedawa:steps=5` and `package.module:Class:steps=5` without and with the options"""
    name, _, options = text.rpartition(":")
    return (name, options) if "=" in options else (text, "")


def with_options(text: str) -> tuple[str, dict[str, Any]]:
    """The same, the options as a method takes them"""
    name, given = name_and_options(text)
    options: dict[str, Any] = {}
    for pair in filter(None, given.split(",")):
        options |= key_value(pair)
    return name, options


def read_toml(path: str | Path) -> dict[str, Any]:
    """The options in a TOML file, by their names; [options] is the method's table."""
    try:
        with open(path, "rb") as file:
            return tomllib.load(file)
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:  # TOMLDecodeError is a ValueError, and so is a wrong encoding
        raise ValueError(f"{path} is not a TOML file: {error}") from error


def read_json(path: Path) -> Config:
    """The configuration a run was made with"""
    try:
        with open_regular(path) as file:
            return from_dict(json.loads(file.read().decode()), str(path))
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"{path}: not the configuration of a run ({error})") from error
