"""Every method there is: those of fastagg.methods, those that other packages announce, those registered at run time."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import sys
import threading
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points
from typing import Any, TypeVar, get_args

from fastagg._engine.aggregator import Aggregator, Buffers, ClusterAggregator, Produces, Reads
from fastagg._engine.checks import suggest
from fastagg._engine.inputs import RoundInput
from fastagg._engine.options import options_of

ENTRY_POINTS = "fastagg.methods"  # the group in which other packages announce classes, or modules that register some
SHARED = tuple(options_of(Aggregator))  # options that all methods have
C = TypeVar("C", bound=type[Aggregator])

_registered: dict[str, type[Aggregator]] = {}
_lock = threading.RLock()  # held while methods are loaded, by whoever asks first
_loaded = _loading = False


def register(cls: C) -> C:
    """Adds a method. Everything that looks up methods by name then finds it: fastagg.aggregator, the simulator, ...

    Use it as a decorator. An installed package can announce its methods in the entry-point group "fastagg.methods"
    instead, so that the commands find them too.
    """
    if not str(getattr(cls, "__module__", "")).startswith("fastagg."):
        registry()  # the names that are taken
    problem = _problem(cls)
    if problem:
        raise TypeError(f"fastagg.register: {problem}")
    for known in _registered.values():
        if _path(known) != _path(cls):
            for name in {cls.name, cls.__name__} & {known.name, known.__name__}:
                kind = "method" if name == known.name else "class"
                raise ValueError(f"there is a {kind} {name!r} already: {_path(known)}")
    _registered[cls.name] = cls
    for name in (cls.name, cls.__name__):  # of a class that was registered before, and has changed
        vars(sys.modules["fastagg"]).pop(name, None)
    return cls


def _problem(cls: Any) -> str:
    """What a class lacks to be a method"""
    if not isinstance(cls, type) or not issubclass(cls, Aggregator):
        return f"{cls!r} does not derive from GlobalAggregator, PersonalisedAggregator or ClusterAggregator"
    if not cls.name.isidentifier():
        return f"{cls.__name__}.name is {cls.name!r}, expected a name that Python can have"
    if not cls.paper:
        return f"{cls.__name__}.paper is empty; say where the method is from"
    if "__doc__" not in cls.__dict__ or not cls.__doc__ or cls.__doc__.startswith(f"{cls.__name__}("):
        return f"{cls.__name__} has no docstring; its first line describes the method, and then its options"
    if cls.name == cls.__name__:
        return f"{cls.name!r} is the name of both the class and the method; fastagg has one attribute for each"
    for name in {cls.name, cls.__name__} & _taken():
        return f"{name!r} is the name of something else in fastagg"
    for fact, allowed in (("reads", Reads), ("produces", Produces), ("buffers", Buffers)):
        if getattr(cls, fact) not in get_args(allowed):
            expected = ", ".join(map(repr, get_args(allowed)))
            return f"{cls.__name__}.{fact} is {getattr(cls, fact)!r}, expected one of {expected}"
    if cls.produces == "clusters" and getattr(cls, "clusters", None) in (None, ClusterAggregator.clusters):
        return f"{cls.__name__} has no property `clusters`, the client ids of every cluster (see ClusterAggregator)"
    try:
        declared = options_of(cls)
    except (NameError, TypeError, AttributeError) as error:
        return f"the annotations of {cls.__name__} cannot be read: {error}"
    arguments = {*declared, "global_sd", "client_sds", "sizes", "client_ids", "out"}
    for spec in cls.round_inputs:
        if spec.name in arguments or not spec.name.isidentifier():
            return f"{cls.__name__}: the round input {spec.name!r} has the name of another argument, or none"
    if cls.weigh is Aggregator.weigh and cls.combine is Aggregator.combine:
        return f"{cls.__name__} implements neither weigh() nor combine()"
    return ""


def _taken() -> set[str]:
    """Names in fastagg that do not belong to methods, including those that have not been loaded yet"""
    package = sys.modules["fastagg"]
    names = {name for some in package._EXPORTS.values() for name in some.split()}
    names |= {module.name for module in pkgutil.iter_modules(package.__path__)}
    return names | (vars(package).keys() - {name for cls in _registered.values() for name in (cls.name, cls.__name__)})


def _path(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def registry() -> dict[str, type[Aggregator]]:
    """All methods by name"""
    global _loaded, _loading
    if not _loaded:
        with _lock:
            if not _loaded and not _loading:  # a module that is being loaded may ask too
                _loading = True
                try:
                    _load_own()
                    _load_others()
                    _loaded = True
                finally:
                    _loading = False
    return _registered


def _load_own() -> None:
    package = importlib.import_module("fastagg.methods")
    for module in pkgutil.iter_modules(package.__path__, "fastagg.methods."):
        importlib.import_module(module.name)


def _load_others() -> None:
    for entry in entry_points(group=ENTRY_POINTS):
        try:
            found = entry.load()
            if isinstance(found, type):
                register(found)
        except Exception as error:  # a package that is broken must not keep all others from working
            warnings.warn(
                f"fastagg: the method {entry.name} = {entry.value} cannot be loaded: {type(error).__name__}: {error}",
                stacklevel=2,
            )


def find(name: str) -> type[Aggregator]:
    """The class of a method"""
    known = registry()
    if name not in known:
        raise ValueError(f"no method {name!r}{suggest(name, known)}; there are {', '.join(sorted(known))}")
    return known[name]


def aggregator(name: str, **options: Any) -> Aggregator:
    """Returns the method of this name with these options: an object with aggregate(), state_dict(), load_state_dict().

    >>> server = fastagg.aggregator("simprox", lam=0.7)
    >>> global_sd = server.aggregate(global_sd, client_sds, sizes)
    """
    return make(find(name), options)


def make(cls: type[Aggregator], options: dict[str, Any]) -> Aggregator:
    """A method with options by name"""
    check_known(cls, options, ())
    return cls(**options)


def check_known(cls: type[Aggregator], given: Iterable[str], inputs: Iterable[str]) -> None:
    known = [*own_options(cls), *SHARED, *inputs]
    for unknown in set(given) - set(known):
        raise TypeError(f"{cls.name}: no option {unknown!r}{suggest(unknown, known)}; it has {', '.join(known)}")


def own_options(cls: type[Aggregator]) -> list[str]:
    """The names of the options that not all methods have"""
    return [name for name in options_of(cls) if name not in SHARED]


@cache
def function_of(cls: type[Aggregator]) -> Callable[..., Any]:
    """The function of a method: name(global_sd, client_sds, sizes=None, *, options, inputs, client_ids, out)"""

    def function(global_sd, client_sds, sizes=None, *, client_ids=None, out=None, **options):
        inputs = {key: options.pop(key) for key in options.keys() - options_of(cls).keys()}
        server = cls(**options)
        check_known(cls, inputs, [spec.name for spec in server.round_inputs])
        server.warn_state_lost(inputs, f'Keep an aggregator, fastagg.aggregator("{cls.name}", ..)')
        return server.aggregate(global_sd, client_sds, sizes, client_ids, out=out, **inputs)

    function.__signature__ = signature_of(cls)  # type: ignore[attr-defined]
    function.__name__ = function.__qualname__ = cls.name
    function.__module__ = cls.__module__
    function.__doc__ = documentation(cls)
    return function


def signature_of(cls: type[Aggregator]) -> inspect.Signature:
    P = inspect.Parameter
    head = [P(name, P.POSITIONAL_OR_KEYWORD) for name in ("global_sd", "client_sds")]
    head.append(P("sizes", P.POSITIONAL_OR_KEYWORD, default=None))
    declared = options_of(cls)
    own = [P(name, P.KEYWORD_ONLY, default=declared[name].default) for name in (*own_options(cls), *SHARED)]
    inputs = [spec.name for spec in cls.round_inputs]
    extra = [P(name, P.KEYWORD_ONLY, default=None) for name in (*inputs, "client_ids", "out")]
    return inspect.Signature(head + own + extra)


def documentation(cls: type[Aggregator]) -> str:
    """What help() shows of a method's function: its class's text, and the arguments that all methods have"""
    every_round, every_method = (
        inspect.cleandoc(doc or "").split("\n\n")[1:] for doc in (Aggregator.aggregate.__doc__, Aggregator.__doc__)
    )
    shared = "Arguments of every method:\n\n" + "\n".join([every_round[0], every_method[0]])
    returns = {
        "global": "Returns a fastagg.Result: the new state dict, with .weights, .gram and .dropped.",
        "personalised": "Returns fastagg.Results: a Result for each client, with .mixing, .gram and .dropped.",
        "clusters": "Returns fastagg.Results: a Result for each cluster, with .clusters, .mixing, .gram and .dropped.",
    }
    return "\n\n".join([inspect.cleandoc(cls.__doc__ or ""), shared, returns[cls.produces]])


@dataclass(frozen=True)
class Method:
    """A description of a method.

    produces       "global": one model; "personalised": one model per client; "clusters": one model per cluster
    reads          what it needs to know about the clients: "weights", "products", "pairs" or "models" (see Aggregator)
    options        names of the options with their defaults
    round_inputs   arguments of aggregate() in a round, in addition to models and data sizes
    """

    name: str
    description: str
    paper: str
    produces: str
    reads: Reads
    options: dict[str, Any]
    round_inputs: tuple[RoundInput, ...]

    def __str__(self) -> str:
        return f"{self.name:<18} {self.description} ({self.paper})"

    def summary(self) -> str:
        """Two or three lines: what it does, its own options, its round inputs"""
        own = ", ".join(f"{name}={value!r}" for name, value in self.options.items() if name not in SHARED)
        rows = [str(self)]
        rows += [f"    options: {own}"] if own else []
        rows += (
            [f"    in each round: {', '.join(spec.name for spec in self.round_inputs)}"] if self.round_inputs else []
        )
        return "\n".join(rows)

    @property
    def help(self) -> str:
        """The full text: what it does, and every option"""
        return documentation(find(self.name))

    def text(self) -> str:
        """A page: help, and the defaults"""
        defaults = ", ".join(f"{name}={value!r}" for name, value in self.options.items() if name not in SHARED)
        head = f"{self.name} ({self.paper}), produces: {self.produces}"
        return "\n\n".join([head, self.help, f"Defaults: {defaults or 'no options of its own'}"])


def list_methods() -> list[Method]:
    """Lists all methods by name, each with a one-line description, its paper, and its options with their defaults."""
    return [
        Method(
            name,
            (cls.__doc__ or "").strip().splitlines()[0],
            cls.paper,
            cls.produces,
            cls.reads,
            {option: options_of(cls)[option].default for option in (*own_options(cls), *SHARED)},
            cls.round_inputs,
        )
        for name, cls in sorted(registry().items())
    ]
