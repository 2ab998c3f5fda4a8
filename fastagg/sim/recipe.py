"""A table of a paper as a TOML file: its protocol, its methods and settings, and the numbers it prints.

title, paper, table     what it is, and where it is printed
about                   the protocol: what the paper states, what it does not, and what was taken then
differs                 what is not as in the paper, if anything
takes                   how long it is
score                   which of report.SCORES the paper prints
seeds, seed             how many, and the first (default: 0)
ours                    methods that are not the paper's
[options]               of all runs
[methods]               by the paper's name: "fedawa:variant=released", or a table with that as `method` and options
                        of its runs
[[settings]]            name, options of its runs, and in `paper` the numbers by method, in percent: 61.04,
                        "60.68 ± 0.84"
[quick]                 says what is scaled, takes, and what replaces the above: seeds, options, names of the
                        methods and settings that are kept
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastagg._engine.checks import suggest
from fastagg.sim import config
from fastagg.sim.command import one_run
from fastagg.sim.report.scores import SCORES

if TYPE_CHECKING:  # torch is imported to make runs, not to list recipes
    from fastagg.sim.jobs import Job

FOLDER = Path(__file__).parent / "recipes"
TEXTS = ("title", "paper", "table", "about", "takes", "score")
FIELDS: dict[str, type] = dict.fromkeys((*TEXTS, "differs"), str) | {
    "seeds": int, "seed": int, "ours": list, "options": dict, "methods": dict, "settings": list, "quick": dict,
}  # fmt: skip
OPTIONAL = ("differs", "seed", "ours", "options")
IN_QUICK: dict[str, type] = {
    "says": str, "takes": str, "seeds": int, "options": dict, "methods": list, "settings": list,
}  # fmt: skip
IN_SETTING: dict[str, type] = {"name": str, "options": dict, "paper": dict}
KINDS = {str: "text", int: "an integer", list: "a list", dict: "a table"}
PRINTED = re.compile(r"(\d+(?:\.\d+)?)(?: ± (\d+(?:\.\d+)?))?")


@dataclass(frozen=True)
class Setting:
    name: str
    options: dict[str, Any] = field(default_factory=dict)
    paper: dict[str, float | int | str] = field(default_factory=dict)


@dataclass(frozen=True)
class Method:
    """spec: name and options, as for `fastagg compare`; options: of its runs"""

    spec: str
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Recipe:
    file: Path
    title: str
    paper: str
    table: str
    about: str
    differs: str
    takes: str
    score: str
    seeds: int
    seed: int
    ours: Sequence[str]
    options: dict[str, Any]
    methods: dict[str, Method]
    settings: list[Setting]
    quick: dict[str, Any]
    scaled: str = ""  # what a quick one says of itself

    @property
    def name(self) -> str:
        return self.file.stem

    @property
    def data(self) -> list[str]:
        """The data sets that are needed"""
        usual = self.options.get("data", config.Config.data)
        return list(dict.fromkeys(setting.options.get("data", usual) for setting in self.settings))

    def scaled_down(self) -> Recipe:
        """What --quick makes of it"""
        q = self.quick
        return replace(
            self, takes=q["takes"], scaled=q["says"], seeds=q.get("seeds", self.seeds),
            options=self.options | q.get("options", {}),
            methods={name: self.methods[name] for name in q.get("methods", self.methods)},
            settings=[each for each in self.settings if each.name in q.get("settings", [each.name])],
        )  # fmt: skip

    def jobs(self, out: Path, more: Mapping[str, Any] | None = None) -> Iterator[tuple[Setting, str, Job]]:
        """Every run with its setting and method; more: options that no curve depends on, such as data_dir"""
        from fastagg.sim import comparison
        from fastagg.sim.jobs import Job

        for setting in self.settings:
            for name, method in self.methods.items():
                values = {**self.options, **setting.options, **method.options, **(more or {})}
                for seed in range(self.seed, self.seed + self.seeds):
                    try:
                        made = one_run(method.spec, values, seed)
                    except (ValueError, TypeError) as error:
                        raise ValueError(f"{self.file}: {setting.name}, {name}: {error}") from error
                    yield setting, name, Job(made, comparison.place(out, made, setting.options))

    def commands(self, out: Path) -> list[str]:
        """The same as calls of `fastagg compare`: for every setting, one for the methods whose runs have its options"""
        lines = []
        for setting in self.settings:
            together: dict[str, list[Method]] = {}
            for method in self.methods.values():
                together.setdefault(str(method.options), []).append(method)
            for methods in together.values():
                options = {k: v for k, v in (self.options | methods[0].options).items() if k not in setting.options}
                options |= {"seed": self.seed, "seeds": self.seeds, "out": out}
                words = ["fastagg", "compare", *(method.spec for method in methods)]
                for key, value in setting.options.items():
                    words += ["--grid", f"{key}={written(value)}"]
                for key, value in options.items():
                    words += [f"--{key.replace('_', '-')}", written(value)]
                lines.append(shlex.join(words))
        return lines


def written(value: Any) -> str:
    """An option as it is typed"""
    return str(value).lower() if isinstance(value, bool) else str(value)


def printed(value: float | str) -> tuple[float, str]:
    """A number of a paper, and as it is shown"""
    if isinstance(value, str):
        match = PRINTED.fullmatch(value)
        assert match  # checked when it was read
        return float(match[1]), value
    return float(value), f"{value:.2f}"


def recipes() -> list[Path]:
    return sorted(FOLDER.glob("*.toml"))


def find(name: str) -> Recipe:
    """The recipe of that name, or in that file"""
    if name.endswith(".toml"):
        return read(Path(name))
    known = {path.stem: path for path in recipes()}
    if name not in known:
        there = ", ".join(known)
        raise ValueError(f"no recipe {name!r}{suggest(name, known)}; there are {there}, or a file of your own: a.toml")
    return read(known[name])


def read(path: Path) -> Recipe:
    """A recipe, checked; ValueError names the file and the field. Options of runs are checked by jobs()."""
    try:
        return checked(path, config.read_toml(path))
    except Wrong as error:
        raise ValueError(f"{path}: {error}") from None


class Wrong(ValueError):
    """What is wrong with a field"""


def checked(path: Path, given: dict[str, Any]) -> Recipe:
    check_fields("", given, FIELDS, [name for name in FIELDS if name not in OPTIONAL])
    if given["score"] not in SCORES:
        raise Wrong(f"score = {given['score']!r}; expected one of {', '.join(SCORES)}")
    methods = {name: method_of(f"methods.{name}", value) for name, value in given["methods"].items()}
    if not methods or not given["settings"]:
        raise Wrong(f"{'settings' if methods else 'methods'}: there is none")
    ours = given.get("ours", [])
    check_names("ours", ours, methods)
    settings = [setting_of(f"settings[{i}]", value, methods, ours) for i, value in enumerate(given["settings"], 1)]
    names = [setting.name for setting in settings]
    if twice := {name for name in names if names.count(name) > 1}:
        raise Wrong(f"settings: {min(twice)!r} is there twice")
    quick = given["quick"]
    check_fields("quick.", quick, IN_QUICK, ["says", "takes"])
    for field_, known in (("methods", methods), ("settings", names)):
        check_names(f"quick.{field_}", quick.get(field_, []), known)
        if quick.get(field_) == []:
            raise Wrong(f"quick.{field_}: there is none")
    for option in quick.get("options", {}):
        for owner in (*settings, *methods.values()):
            if option in owner.options:
                raise Wrong(f"quick.options.{option}: settings or methods set this option themselves")
    for name, where in (("seeds", given), ("seeds", quick), ("seed", given)):
        if where.get(name, 1) < (name == "seeds"):
            raise Wrong(f"{'quick.' if where is quick else ''}{name} = {where[name]}; expected a larger number")
    plain = {name: given[name] for name in (*TEXTS, "seeds", "quick")}
    return Recipe(
        file=path, **plain, differs=given.get("differs", ""), seed=given.get("seed", 0), ours=ours,
        options=given.get("options", {}), methods=methods, settings=settings,
    )  # fmt: skip


def check_fields(where: str, given: Any, fields: Mapping[str, type], needed: Sequence[str]) -> None:
    if not isinstance(given, dict):
        raise Wrong(f"{where.rstrip('.')} = {given!r}; expected a table")
    for name, value in given.items():
        if name not in fields:
            raise Wrong(f"{where}{name}: there is no such field{suggest(name, fields)}")
        if not isinstance(value, fields[name]) or isinstance(value, bool):
            raise Wrong(f"{where}{name} = {value!r}; expected {KINDS[fields[name]]}")
    for name in needed:
        if name not in given:
            raise Wrong(f"{where}{name} is missing")


def check_names(where: str, names: Sequence[Any], known: Any) -> None:
    for name in names:
        if name not in known:
            raise Wrong(f"{where}: no {name!r}{suggest(str(name), known)}; there are {', '.join(known)}")


def method_of(where: str, given: Any) -> Method:
    if isinstance(given, str):
        return Method(given)
    if not isinstance(given, dict) or not isinstance(given.get("method"), str):
        raise Wrong(f"{where} = {given!r}; expected a method, or a table with one as `method`")
    return Method(given["method"], {key: value for key, value in given.items() if key != "method"})


def setting_of(where: str, given: Any, methods: Mapping[str, Method], ours: Sequence[str]) -> Setting:
    check_fields(f"{where}.", given, IN_SETTING, ["name"])
    for method, value in given.get("paper", {}).items():
        check_names(f"{where}.paper", [method], [name for name in methods if name not in ours])
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number and not (isinstance(value, str) and PRINTED.fullmatch(value)):
            raise Wrong(f'{where}.paper.{method} = {value!r}; expected a number in percent, or "60.68 ± 0.84"')
        if not 0 <= printed(value)[0] <= 100:
            raise Wrong(f"{where}.paper.{method} = {value!r}; expected a number in percent, from 0 to 100")
    return Setting(**given)
