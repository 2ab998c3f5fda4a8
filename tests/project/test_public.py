"""What GitHub, PyPI and those who cite read agrees with the project."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tools import release

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))


def test_one_version():
    assert {*release.versions().values()} == {PROJECT["version"]}


def test_a_tag_of_another_version_is_refused():
    assert "pyproject.toml has version" in release.why_not("v99.0.0")


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """One that can be released"""
    for name in ("pyproject.toml", "CITATION.cff"):
        (tmp_path / name).write_text((ROOT / name).read_text())
    (tmp_path / "CHANGELOG.md").write_text(f"# Changelog\n\n## {PROJECT['version']} (2030-01-01)\n\n- A line.\n")
    monkeypatch.setattr(release, "ROOT", tmp_path)
    assert release.why_not(f"v{PROJECT['version']}") == ""
    return tmp_path


def test_an_unreleased_section_is_refused(tree):
    changes = (tree / "CHANGELOG.md").read_text()
    (tree / "CHANGELOG.md").write_text(changes.replace("2030-01-01", "unreleased"))
    assert release.why_not(f"v{PROJECT['version']}").startswith("CHANGELOG.md says (unreleased)")


def test_a_page_that_knows_of_no_release_is_refused(tree):
    (tree / "docs").mkdir()
    (tree / "docs/start.md").write_text("It is not on a package\nindex yet.\n")
    said = release.why_not(f"v{PROJECT['version']}")
    assert said == "docs/start.md says that fastagg is not on a package index yet"


def test_one_address():
    source, site = PROJECT["urls"]["Source"], PROJECT["urls"]["Documentation"]
    assert all(url.startswith(source) for url in PROJECT["urls"].values() if url != site)
    assert f"repository-code: {source}\n" in (ROOT / "CITATION.cff").read_text()
    [built_for] = re.findall(r"^site_url: (\S+)", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert f"repo_url: {source}\n" in (ROOT / "mkdocs.yml").read_text()
    assert built_for == site


def test_the_same_pythons_everywhere():
    """What the classifiers promise is built and tested"""
    prefix = "Programming Language :: Python :: 3."
    minor = [name.removeprefix(prefix) for name in PROJECT["classifiers"] if name.startswith(prefix)]
    assert PROJECT["requires-python"] == f">=3.{minor[0]}"
    wheels = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["cibuildwheel"]["build"]
    assert wheels == [f"cp3{number}-manylinux*" for number in minor]
    [tested] = re.findall(r"^ +python: \[(.*)\]$", (ROOT / ".github/workflows/ci.yml").read_text(), re.MULTILINE)
    assert tested == ", ".join(f'"3.{number}"' for number in minor)
    assert f"Python 3.{minor[0]} to 3.{minor[-1]} " in (ROOT / "README.md").read_text()
    [newest] = re.findall(r"^NEWEST \?= 3\.(\d+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert newest == minor[-1]
    assert f"| Python | 3.{minor[0]} | 3.{newest} |" in (ROOT / "docs/packaging.md").read_text()


def targets(workflow: Path) -> set[str]:
    """What a workflow calls make with; a matrix stands for its entries"""
    text = workflow.read_text()
    named = re.findall(r"- run: make (\S+)", text)
    entries = [entry for line in re.findall(r"^ +target: \[(.*)\]$", text, re.MULTILINE) for entry in line.split(", ")]
    return {name for name in named if name != "${{"} | ({*entries} if "${{" in named else set())


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_call_targets_that_there_are(workflow):
    """make -n says what it would do, or that there is no rule"""
    for target in targets(workflow):
        done = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"make {target}: {done.stderr}"


def test_ci_calls_what_runs_locally():
    calls = [line.split()[1:] for line in (ROOT / ".ci/run").read_text().splitlines() if line.startswith("make ")]
    local = {word for words in calls for word in words if not word.startswith("-")}
    assert "test" in local
    assert local <= targets(ROOT / ".github/workflows/ci.yml") | targets(ROOT / ".github/workflows/docs.yml")


def test_every_kind_of_test_is_in_a_workflow():
    """Those that the Makefile explains at its top; test-nightly is several of them"""
    explained = re.findall(r"\bmake (test[\w-]*)(?= |,)", (ROOT / "Makefile").read_text().split("\n\n")[0])
    [several] = re.findall(r"^test-nightly: (.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    called = set().union(*map(targets, WORKFLOWS))
    assert {*explained, *several.split()} - {"test-nightly"} <= called
