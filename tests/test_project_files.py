"""Check that the files around the code agree with the code and with each other."""

import re
import subprocess
import tomllib

import pytest
import yaml

from hf_pretrain.hub.model_card import format_conversion_card
from tests.invariants.launching import ROOT


PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def load_yaml(path: str) -> dict:
    return yaml.safe_load((ROOT / path).read_text(encoding="utf-8"))


def shell_lines(workflow: str) -> list[str]:
    (job,) = load_yaml(f".github/workflows/{workflow}.yml")["jobs"].values()
    return [step["run"] for step in job["steps"] if "run" in step]


def dependencies() -> set[str]:
    """Return the names of all packages that pyproject.toml lists."""
    extras = PROJECT["project"]["optional-dependencies"].values()
    lines = [*PROJECT["project"]["dependencies"], *(line for extra in extras for line in extra)]
    return {re.match(r"[\w-]+", line)[0] for line in lines}


def test_the_workflow_is_the_ci_script_and_as_root_the_tests_that_need_root():
    script, as_root = shell_lines("ci")
    assert script == ".ci/run" and as_root.startswith("sudo ")
    # They make network namespaces, or mount file systems.
    tests = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "tests").rglob("test_*.py")
        if re.search(r"why_impossible\(\)|\[\"mount\"", path.read_text(encoding="utf-8"))
    }
    assert set(as_root.split("pytest ")[1].split()) == tests and len(tests) == 2


def test_a_workflow_builds_the_documentation():
    assert shell_lines("docs") == ["make docs"]


def test_the_scheduled_workflow_upgrades_dependencies_of_the_project():
    upgrade = next(line for line in shell_lines("newest") if "--upgrade" in line)
    upgraded = set(upgrade.split("--upgrade")[1].split())
    assert {"transformers", "accelerate", "deepspeed", "trl", "peft", "datasets", "gguf", "lm-eval"} <= upgraded
    assert upgraded <= dependencies()


def test_the_least_version_of_transformers_is_the_same_everywhere(build_model):
    """Compare pyproject.toml with the error in a checkpoint's code, the model card and both READMEs."""
    (line,) = [line for line in PROJECT["project"]["dependencies"] if line.startswith("transformers>=")]
    version = re.match(r"transformers>=([\d.]+),", line)[1]
    code = (ROOT / "hf_pretrain/model/configuration_minimind.py").read_text()
    facts = {"repo_id": "me/mine", "source": "x.pth", "format": "minimind", "license": None, "has_tokenizer": True}
    card = format_conversion_card(build_model(), "done", **facts)
    for text in (code, card, (ROOT / "README.md").read_text(encoding="utf-8")):
        assert f"needs transformers {version} or newer" in " ".join(text.split())
    assert f"transformers {version}" in (ROOT / "README_zh.md").read_text(encoding="utf-8")
    assert f"release < ({version.replace('.', ', ')})" in code


def test_pre_commit_runs_what_make_quality_runs():
    output = subprocess.run(
        ["make", "-n", "quality", "VENV=.venv"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    make = {line.removesuffix(" .") for line in output.splitlines() if re.match(r"\.venv/bin/(?!python)", line)}
    (repository,) = load_yaml(".pre-commit-config.yaml")["repos"]
    hooks = {hook["entry"].replace(" --force-exclude", "") for hook in repository["hooks"]}
    assert hooks == make


@pytest.mark.parametrize("name", ["bug", "feature"])
def test_issue_forms_are_complete(name):
    form = load_yaml(f".github/ISSUE_TEMPLATE/{name}.yml")
    assert form.keys() >= {"name", "description", "body"}
    ids = [field["id"] for field in form["body"] if field["type"] != "markdown"]
    assert len(ids) == len(set(ids)) > 0


def test_the_citation_names_this_version_and_licence():
    citation = load_yaml("CITATION.cff")
    assert citation["version"] == PROJECT["project"]["version"]
    assert citation["license"] == PROJECT["project"]["license"]


def test_the_package_says_that_it_is_typed():
    # `test_command.py` finds the file in the wheel.
    assert (ROOT / "hf_pretrain/py.typed").is_file()
