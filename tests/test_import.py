"""The import of the package changes nothing in the process, and loads pyarrow before torch on Windows."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.invariants.launching import ROOT


# Imports what the package imports, then the package, and prints what the package changed.
COMPARE = """
import ast, gc, importlib, logging, os, pkgutil, signal, sys, threading, warnings
from pathlib import Path
package = Path("hf_pretrain")
for path in package.rglob("*.py"):
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        for inner in node.body if isinstance(node, ast.With | ast.Try) else [node]:
            if isinstance(inner, ast.Import | ast.ImportFrom) and not getattr(inner, "level", 0):
                exec(compile(ast.Module([inner], []), str(path), "exec"), {})
import torch

def state():
    found = {"collector": (gc.isenabled(), gc.get_threshold(), gc.get_freeze_count()), "environment": dict(os.environ)}
    found |= {"threads": {thread.name for thread in threading.enumerate()}, "warnings": list(warnings.filters)}
    found["hooks"] = torch.get_num_threads(), sys.excepthook, sys.stdout, sys.stderr, sys.path[:]
    found |= {number: signal.getsignal(number) for number in signal.valid_signals()}
    for part in (torch.backends.cuda, torch.backends.cudnn, torch.backends.mkldnn):
        found |= {f"{part.__name__}.{name}": vars(part)[name]() for name in dir(part) if name.endswith("sdp_enabled")}
    found["precision"] = torch.get_float32_matmul_precision(), torch.backends.cudnn.enabled
    for name, logger in {"root": logging.root, **logging.root.manager.loggerDict}.items():
        if isinstance(logger, logging.Logger):
            found[f"logger {name}"] = logger.level, logger.handlers[:], logger.filters[:], logger.disabled
    libraries = ("torch", "transformers", "accelerate", "datasets", "peft", "trl", "huggingface_hub", "starlette")
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in libraries:
            classes = [value for value in list(vars(module).values()) if isinstance(value, type)]
            for owner in (module, *(part for part in classes if part.__module__ == name)):
                values = list(vars(owner).items())
                found |= {f"{name}:{owner.__name__}.{key}": id(value) for key, value in values if callable(value)}
    return found

before = state()
import hf_pretrain
for module in pkgutil.walk_packages(hf_pretrain.__path__, "hf_pretrain."):
    importlib.import_module(module.name)
after = state()
print([name for name in before if before[name] != after[name]])
"""
# Ends at the first import of either library, before either is loaded.
WINDOWS = """
import sys
class Finder:
    def find_spec(name, path, target=None):
        if name in ("torch", "pyarrow"):
            raise SystemExit(name)
sys.meta_path.insert(0, Finder)
sys.platform = "win32"
import hf_pretrain
"""


def run(code: str, **environment: str) -> subprocess.CompletedProcess:
    root = Path(__file__).parents[1]
    words = [sys.executable, "-c", code]
    environment |= {name: value for name, value in os.environ.items() if name != "GOMP_SPINCOUNT"}
    return subprocess.run(words, capture_output=True, text=True, cwd=root, env=environment)


def test_the_import_changes_nothing_in_the_process():
    # As under a launcher.
    result = run(COMPARE, TORCHELASTIC_RUN_ID="1")
    assert (result.returncode, result.stdout) == (0, "[]\n"), result.stderr[-3000:]


@pytest.mark.parametrize("module", ["hf_pretrain", "hf_pretrain.runtime.devices"])
def test_windows_loads_pyarrow_before_torch(module):
    """The other order ends processes there without a message (MiniMind's issue 771)."""
    result = run(WINDOWS.replace("import hf_pretrain", f"import {module}"))
    assert result.stderr == "pyarrow\n", result.stderr


@pytest.mark.parametrize("recipe", sorted((ROOT / "recipes").glob("*.py")), ids=lambda path: path.stem)
def test_a_recipe_imports_the_package_first(recipe):
    """The package sets what Ctrl-C does. Libraries imported before it would print their traceback."""
    imports = [node for node in ast.parse(recipe.read_text()).body if isinstance(node, ast.Import | ast.ImportFrom)]
    names = [getattr(node, "module", None) or node.names[0].name for node in imports]
    others = [name for name in names if name.partition(".")[0] not in sys.stdlib_module_names]
    assert others[0].startswith("hf_pretrain")
