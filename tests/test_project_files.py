"""The files around the code agree with it and with each other, and pyproject.toml names what the code imports."""

import ast
import re
import sys
import tomllib
from importlib.metadata import packages_distributions, requires
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

import hf_pretrain
from hf_pretrain.hub.model_card import format_conversion_card
from tests.invariants.launching import ROOT, make_output


PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_github_runs_the_ci_script_and_as_root_the_tests_that_need_root():
    (job,) = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"].values()
    script, as_root = [step["run"] for step in job["steps"] if "run" in step]
    assert script == ".ci/run" and as_root.startswith("sudo ")
    # They make network namespaces, or mount file systems.
    tests = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "tests").rglob("test_*.py")
        if re.search(r"why_impossible\(\)|\[\"mount\"", path.read_text(encoding="utf-8"))
    }
    assert set(as_root.split("pytest ")[1].split()) == tests and tests


def test_macos_and_windows_run_the_quick_tests():
    (job,) = yaml.safe_load((ROOT / ".github/workflows/systems.yml").read_text())["jobs"].values()
    (github,) = [step["run"] for step in job["steps"] if "pytest" in step.get("run", "")]
    assert (
        make_output("-n", "test-quick").rpartition("-m pytest ")[2].split()
        == github.partition("-m pytest ")[2].split()
    )


@pytest.mark.documents
def test_every_device_says_how_it_is_proven():
    section = (ROOT / "docs/launching.md").read_text(encoding="utf-8").split("## Devices and systems")[1]
    header, _, *rows = re.findall(r"^\|(.*)\|$", section.split("\n## ")[0], re.MULTILINE)
    assert header.split("|")[-1].strip() == "proven how" and len(rows) >= 8
    assert [row for row in rows if not all(cell.strip() for cell in row.split("|")) or row.count("|") != 2] == []


@pytest.mark.documents
def test_the_python_reference_has_every_public_name_and_no_other():
    page = (ROOT / "docs/python.md").read_text(encoding="utf-8")
    shown = re.findall(r"^\.\. (?:autoclass|autofunction|py:data):: hf_pretrain\.(\w+)", page, re.MULTILINE)
    assert sorted(shown) == sorted(hf_pretrain.__all__)
    members = re.findall(r"^\.\. autoclass:: hf_pretrain\.(\w+)\(.*\n   :members: (.*)", page, re.MULTILINE)
    public = [getattr(hf_pretrain, name) for name in shown if name != "PRESETS"]
    public += [vars(getattr(hf_pretrain, name))[member] for name, names in members for member in names.split(", ")]
    assert len(public) > len(shown) and all(each.__doc__ for each in public)


def test_the_least_version_of_transformers_is_the_same_everywhere(build_model):
    """The code of a checkpoint, which engines run, needs less than the package."""
    code = (ROOT / "hf_pretrain/model/configuration_minimind.py").read_text()
    version = re.search(r"release < \((\d+, \d+)\)", code)[1].replace(", ", ".")
    (line,) = [line for line in PROJECT["dependencies"] if line.startswith("transformers>=")]
    assert Version(version) <= Version(re.match(r"transformers>=([\d.]+),", line)[1])
    facts = {"repo_id": "me/mine", "source": "x.pth", "format": "minimind", "license": None, "has_tokenizer": True}
    card = format_conversion_card(build_model(), "done", **facts)
    for text in (code, card, (ROOT / "README.md").read_text(encoding="utf-8")):
        assert f"needs transformers {version} or newer" in " ".join(text.split())
    assert f"transformers {version}" in (ROOT / "README_zh.md").read_text(encoding="utf-8")


def test_make_tests_the_lower_bounds_together():
    extras = PROJECT["optional-dependencies"]
    bounds = [*PROJECT["dependencies"], *extras["trl"], *extras["peft"]]
    pattern = r"(transformers|datasets|accelerate|trl|peft)>=([\d.]+),<"
    lowest = {"==".join(found.groups()) for found in (re.match(pattern, line) for line in bounds) if found}
    assert len(lowest) == 5 and lowest <= set(make_output("-n", "test-oldest").split())


# Imports


def imported(path: Path, *, always: bool) -> set[str]:
    """Return the top-level modules that a file imports: anywhere, or only where it imports them `always`."""
    found, nodes = set(), [ast.parse(path.read_text(encoding="utf-8"))]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found.add(node.module.partition(".")[0])
        if not (always and isinstance(node, (ast.FunctionDef, ast.Try, ast.If))):
            nodes += ast.iter_child_nodes(node)
    # scipy is imported only where another package has brought it.
    return found - sys.stdlib_module_names - {"hf_pretrain", "hf_pretrain_cli", "scipy"}


def distributions(lines: list[str]) -> set[str]:
    """Return the names of the distributions of requirements; for `transformers[serving]`, also those of its extra."""
    found = set()
    for requirement in map(Requirement, lines):
        found.add(canonicalize_name(requirement.name))
        for extra in requirement.extras if requirement.name == "transformers" else ():
            own = [line for line in requires("transformers") if f"extra == {extra!r}" in line.replace('"', "'")]
            found |= {canonicalize_name(Requirement(line).name) for line in own}
    return found


def undeclared(modules: set[str], declared: set[str]) -> set[str]:
    """Return the modules that no declared distribution provides."""
    providers = packages_distributions()
    # A distribution that is not installed here must have the name of the module, or be pdfminer.six.
    names = {name: providers.get(name, [name, f"{name}.six"]) for name in modules}
    return {name for name in modules if declared.isdisjoint(map(canonicalize_name, names[name]))}


def test_pyproject_names_everything_that_is_imported():
    paths = [ROOT / "hf_pretrain_cli.py", *(ROOT / "hf_pretrain").rglob("*.py"), *(ROOT / "recipes").rglob("*.py")]
    extras = [line for lines in PROJECT["optional-dependencies"].values() for line in lines]
    declared = distributions([*PROJECT["dependencies"], *extras])
    modules = set().union(*(imported(path, always=False) for path in paths))
    assert {"torch", "trl", "lm_eval", "gguf"} <= modules and not undeclared(modules, declared)
    # What runs without an extra: every package but those of TRL, lm-eval and pages, all but the model with an adapter
    # and the tasks of reasoning-gym, and the recipe of pretraining.
    others = {"board", "stages", "evaluation", "inference", "recipes", "adapted_model.py", "reasoning_gym_tasks.py"}
    paths = [path for path in paths if others.isdisjoint(path.parts)]
    modules = set().union(*(imported(path, always=True) for path in [*paths, ROOT / "recipes/pretrain.py"]))
    # It installs on Linux only, so only functions import it.
    assert "deepspeed" not in modules
    assert not undeclared(modules, distributions(PROJECT["dependencies"]))
