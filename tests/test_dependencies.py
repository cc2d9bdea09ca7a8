"""pyproject.toml names the distribution of every module that the package and the recipes import."""

import ast
import sys
import tomllib
from collections.abc import Iterable, Iterator
from functools import cache
from importlib.metadata import packages_distributions, requires
from importlib.util import resolve_name
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.invariants.launching import ROOT


PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
OURS = {"hf_pretrain", "hf_pretrain_cli"}
# Imported only where another package has brought it.
GUESTS = {"scipy"}


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


SOURCES = [ROOT / "hf_pretrain_cli.py", *(ROOT / "hf_pretrain").rglob("*.py"), *(ROOT / "recipes").rglob("*.py")]
FILES = {module_name(path): path for path in SOURCES}


@cache
def parse(module: str) -> ast.Module:
    return ast.parse(FILES[module].read_text(encoding="utf-8"))


def at_once(nodes: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements that run whenever a module is imported: not those of functions, `try` and `if`."""
    for node in nodes:
        yield node
        if isinstance(node, (ast.With, ast.ClassDef)):
            yield from at_once(node.body)


def imports(module: str, nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Yield the full names that nodes of a module import; of `from a import b`, both `a` and `a.b`."""
    package = module if FILES[module].name == "__init__.py" else module.rpartition(".")[0]
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = resolve_name("." * node.level + (node.module or ""), package)
            yield from (base, *(f"{base}.{alias.name}" for alias in node.names))


def others(names: Iterable[str]) -> set[str]:
    """Return the top-level modules among full names that belong neither to Python nor to this repository."""
    return {name.partition(".")[0] for name in names} - sys.stdlib_module_names - OURS - GUESTS


def imported_at_once() -> set[str]:
    """Return the recipes, the command, and the modules of this package that their imports always import."""
    found: set[str] = set()
    remaining = [name for name in FILES if not name.startswith("hf_pretrain.")]
    while remaining:
        module = remaining.pop()
        if module in FILES and module not in found:
            found.add(module)
            # The import of a module imports its packages first.
            remaining += [module.rpartition(".")[0], *imports(module, at_once(parse(module).body))]
    return found


def distributions(lines: Iterable[str]) -> set[str]:
    """Return the names of the distributions of requirements; of `transformers[serving]`, also those of its extra."""
    found: set[str] = set()
    for requirement in map(Requirement, lines):
        found.add(canonicalize_name(requirement.name))
        for extra in requirement.extras if requirement.name == "transformers" else ():
            of_extra = [line for line in requires("transformers") if f"extra == {extra!r}" in line.replace('"', "'")]
            found |= {canonicalize_name(Requirement(line).name) for line in of_extra}
    return found


def undeclared(modules: dict[str, set[str]], declared: set[str]) -> dict[str, list[str]]:
    """Return the imported modules that no declared distribution provides, each with the modules that import it."""
    missing: dict[str, list[str]] = {}
    providers = packages_distributions()
    for importer, names in modules.items():
        for name in names:
            # A distribution that is not installed here must have the name of the module.
            if declared.isdisjoint(map(canonicalize_name, providers.get(name, [name]))):
                missing.setdefault(name, []).append(importer)
    return missing


def test_the_dependencies_hold_everything_that_recipes_always_import():
    modules = {module: others(imports(module, at_once(parse(module).body))) for module in imported_at_once()}
    # The closure follows relative imports: the recipes reach these through others.
    assert {"hf_pretrain.data.formats", "hf_pretrain.runtime.activity"} <= modules.keys()
    assert {"torch", "numpy", "transformers"} <= set().union(*modules.values())
    # It installs on Linux only, so only functions import it.
    assert "deepspeed" not in set().union(*modules.values())
    assert [line for line in PROJECT["dependencies"] if line.startswith("deepspeed") and "== 'linux'" in line]
    assert not undeclared(modules, distributions(PROJECT["dependencies"]))


def test_the_extras_hold_everything_else_that_is_imported():
    modules = {module: others(imports(module, ast.walk(parse(module)))) for module in FILES}
    assert {"trl", "lm_eval", "gguf"} <= set().union(*modules.values())
    extras = [line for lines in PROJECT["optional-dependencies"].values() for line in lines]
    assert not undeclared(modules, distributions([*PROJECT["dependencies"], *extras]))
