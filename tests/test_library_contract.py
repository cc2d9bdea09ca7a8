"""
The private and undocumented names of libraries that this package uses, and the public ones that it replaces, stand in
docs/architecture.md. The private ones still mean the same.
"""

import ast
import importlib
import inspect
import pkgutil
import re
import sys
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest
import torch
from transformers import Trainer, TrainingArguments

import hf_pretrain


ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
TABLE, _, REPLACED = PAGE.partition("## Private names of other")[2].partition("## Public names")
# `os._exit`, what authors of models set in every class of transformers, and what Python's and torch's metaclasses add.
DOCUMENTED = {
    *("_exit", "_init_weights", "_no_split_modules", "_tied_weights_keys", "_keys_to_ignore_on_save"),
    *("_can_record_outputs", "_can_compile_fullgraph", "_skip_keys_device_placement", "_supports_attention_backend"),
    *("_supports_flash_attn", "_supports_flex_attn", "_supports_sdpa", "_fsdp_plan", "_tp_plan"),
    *("_abc_impl", "_asdict", "_backward_cls", "_is_protocol"),
}
UNDOCUMENTED = PAGE.partition("## Public names that are not documented")[2].partition("\n## ")[0]
# Modules whose names the documentation of these libraries explains, beside those of their top level.
DOCUMENTED_MODULES = re.compile(
    r"transformers\.initialization|transformers\.(activations|generation\.streamers|hf_argparser|integrations(\.moe)?|modeling_(layers|outputs|utils)|"
    r"processing_utils|trainer_callback|training_args|utils)\.\w+|transformers\.masking_utils\.create_causal_mask|"
    r"transformers\.trainer_utils\.[A-Z]\w+|accelerate\.utils\.\w+|peft\.tuners\.lora\.LoraLayer|"
    r"deepspeed\.(utils\.safe_\w+|runtime\.zero\.GatheredParameters)"
)
# Attributes of DeepSpeed's objects that torch, Trainer, or other objects of this package also have.
COMMON = set(
    "arange clear complete config empty linear loss_scale lr_scheduler module num_experts optimizer param_groups "
    "partition rank state tensor tp_size wait zeros".split()
)
# The arguments that our code passes by position or by name.
SIGNATURES = {
    "_get_dataloader": ["dataset", "description", "batch_size", "sampler_fn", "is_training"],
    "_get_grad_norm": ["model", "grad_norm"],
    "_get_output_dir": ["trial"],
    "_save_checkpoint": ["model", "trial"],
    "_save_optimizer_and_scheduler": ["output_dir"],
    "_prepare_for_training": ["max_steps", "train_dataloader", "resume_from_checkpoint"],
    "_load_from_checkpoint": ["resume_from_checkpoint", "model"],
    "_push_from_checkpoint": ["checkpoint_folder"],
    "_prepare_input": ["data"],
    "_evaluate": ["trial", "ignore_keys_for_eval"],
    "_determine_best_metric": ["metrics", "trial"],
    "_load_best_model": [],
}
# The source of each method contains these calls in this order.
ORDERS = {
    "_run_epoch": ["get_batch_samples(", "_get_grad_norm(", "optimizer.step()", "on_step_end(", "_maybe_log_save"],
    "_save_checkpoint": ["_get_output_dir(", "save_model(output_dir, _internal_call=True)", "_save_optimizer_and"],
    "_inner_training_loop": ["_init_training_state(", "_prepare_for_training(", "on_train_begin(", "eval_on_start"],
    "_maybe_log_save_evaluate": ["should_log", "self._evaluate(", "_save_checkpoint(", "on_save("],
}


def is_private(name: str) -> bool:
    return re.fullmatch(r"_[A-Za-z]\w*", name) is not None


@cache
def trees() -> dict[Path, ast.Module]:
    """Return the code of the package, the recipes and the command."""
    paths = [*ROOT.glob("hf_pretrain/**/*.py"), *ROOT.glob("recipes/*.py"), ROOT / "hf_pretrain_cli.py"]
    return {path: ast.parse(path.read_text(encoding="utf-8")) for path in paths}


def used_names() -> dict[str, str]:
    """Return the private attributes and imports that the package uses and does not define, each with a place."""
    nodes = [(path, node) for path, tree in trees().items() for node in ast.walk(tree)]
    own = set()
    for _, node in nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            own.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            own.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
            own.add(node.attr)
    found = {}
    for path, node in nodes:
        names: list[str] = []
        if isinstance(node, ast.Attribute):
            names = [node.attr]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [*node.module.split("."), *(alias.name for alias in node.names)]
        found |= {name: f"{path}:{node.lineno}" for name in names if is_private(name) and name not in own}
    return found


@cache
def modules() -> list[ModuleType]:
    found = pkgutil.walk_packages(hf_pretrain.__path__, "hf_pretrain.")
    return [importlib.import_module(info.name) for info in found]


def overridden_names() -> dict[str, str]:
    """Return the private methods and attributes of libraries' classes that classes of the package replace."""
    # Python would parse the file of a class again for the source of each.
    sources = {
        (path.stem, node.name): ast.get_source_segment(text, node)
        for path, tree in trees().items()
        for text in [path.read_text(encoding="utf-8")]
        for node in tree.body
        if isinstance(node, ast.ClassDef)
    }
    classes = {cls for module in modules() for cls in vars(module).values() if isinstance(cls, type)}
    found = {}
    for cls in (cls for cls in classes if cls.__module__.startswith("hf_pretrain")):
        ours = [base for base in cls.__mro__ if base.__module__.startswith("hf_pretrain")]
        theirs = {name for base in cls.__mro__ if base not in ours for name in vars(base)}
        for base in ours:
            source = sources.get((base.__module__.rpartition(".")[2], base.__name__), "")
            written = {*vars(base), *re.findall(r"\bself\.(_[a-z]\w*)", source)}
            found |= {name: f"{base.__module__}.{base.__name__}" for name in filter(is_private, written & theirs)}
    return found


def replaced_names() -> dict[str, str]:
    """
    Return the public names of libraries to which the package assigns, each with a place: what it puts into a module or
    class that it imports, in the place of a method of such a class, and what it assigns as a lambda or a partial.
    """
    found = {}
    for module in modules():
        parts = {name: value for name, value in vars(module).items() if isinstance(value, type | ModuleType)}
        origins = {name: getattr(value, "__module__", value.__name__).split(".")[0] for name, value in parts.items()}
        imported = [name for name in parts if origins[name] not in {"hf_pretrain", *sys.stdlib_module_names}]
        bases = [base for name in imported if isinstance(parts[name], type) for base in parts[name].__mro__[:-1]]
        methods = {name for base in bases for name, value in vars(base).items() if inspect.isfunction(value)}
        for node in (node for node in ast.walk(trees()[Path(module.__file__)]) if isinstance(node, ast.Assign)):
            for target in (target for target in node.targets if isinstance(target, ast.Attribute)):
                owner = ast.unparse(target.value)
                is_within = owner.partition(".")[0] in imported and not isinstance(node.value, ast.Constant)
                is_method = target.attr in methods and owner != "self"
                is_function = isinstance(node.value, ast.Lambda) or ast.unparse(node.value).startswith("partial(")
                if is_within or is_method or is_function:
                    found[target.attr] = f"{module.__name__}:{node.lineno}"
    return found


def test_every_public_name_of_a_library_that_is_replaced_stands_in_the_table():
    cells = (line.split("|")[1] for line in REPLACED.partition("\n## ")[0].splitlines() if line.startswith("| "))
    listed = {name for cell in cells for name in re.findall(r"`(?:\w+\.)*(\w+)`", cell)}
    found = replaced_names()
    assert {name: place for name, place in found.items() if name not in listed} == {}
    assert listed - found.keys() == set(), "The table lists names that nothing replaces."


def test_every_private_name_of_a_library_stands_in_the_table():
    for extra in ("trl", "peft", "gradio"):
        pytest.importorskip(extra)
    found = used_names() | overridden_names()
    listed = set(re.findall(r"`(?:\w+\.)*(_[A-Za-z]\w*)`", TABLE))
    assert {name: place for name, place in found.items() if name not in listed | DOCUMENTED} == {}
    assert listed - found.keys() == set(), "The table lists names that nothing uses."
    assert len(listed) <= 36


def stored_names(path: Path, owner: str = "") -> set[str]:
    """Return the attributes that a file assigns to `owner`; without it, all of them and the functions."""
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    stored = [node for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)]
    names = {node.attr for node in stored if ast.unparse(node.value) == owner or not owner}
    return names if owner else names | {node.name for node in nodes if isinstance(node, ast.FunctionDef)}


def undocumented_imports() -> set[str]:
    """Return the names that the package imports from modules that a library does not document."""
    found = set()
    for node in (node for tree in trees().values() for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)):
        library = (node.module or "").partition(".")[0]
        if not node.level and library in ("transformers", "trl", "accelerate", "deepspeed", "peft"):
            public = dir(importlib.import_module(library))
            names = {alias.name for alias in node.names} - {*public}
            found |= {name for name in names if not DOCUMENTED_MODULES.fullmatch(f"{node.module}.{name}")}
    return found


def undocumented_attributes() -> set[str]:
    """Return the attributes of DeepSpeed's objects and of TRL's trainers that the package reads."""
    from trl import DPOConfig, GRPOConfig

    deepspeed, trl = (Path(importlib.import_module(name).__file__).parent for name in ("deepspeed", "trl"))
    parts = ("engine", "zero/stage_1_and_2", "zero/stage3", "zero/partition_parameters", "fp16/loss_scaler")
    of_deepspeed = set().union(*(stored_names(deepspeed / f"runtime/{part}.py") for part in parts)) - COMMON
    classes = (torch.nn.Module, torch.optim.Optimizer, torch.Tensor, torch.amp.GradScaler, Trainer, TrainingArguments)
    of_deepspeed -= {name for cls in classes for name in dir(cls)}
    trainers = ("dpo", "grpo", "rloo", "reward")
    of_trl = set().union(*(stored_names(trl / f"trainer/{name}_trainer.py", "self") for name in trainers))
    # Flags are documented, and so is the attribute of a model.
    of_trl -= {field for config in (DPOConfig, GRPOConfig) for field in dir(config)}
    of_trl -= {"tools", "chat_template", "generation_config"}
    of_trl -= stored_names(Path(inspect.getfile(Trainer)), "self")
    found = set()
    for path, tree in trees().items():
        is_of_deepspeed, is_of_trl = (
            "deepspeed" in path.read_text(encoding="utf-8").lower(),
            path.parent.name == "stages",
        )
        for node in ast.walk(tree):
            names = [node.attr] if isinstance(node, ast.Attribute) else []
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr"):
                names = [node.args[1].value] if isinstance(node.args[1], ast.Constant) else []
            found |= {
                name for name in names if (is_of_deepspeed and name in of_deepspeed) or (is_of_trl and name in of_trl)
            }
    return {name for name in found if not is_private(name)}


@pytest.mark.slow
def test_every_undocumented_name_of_a_library_stands_in_the_table():
    for extra in ("trl", "peft", "deepspeed"):
        pytest.importorskip(extra)
    found = undocumented_imports() | undocumented_attributes()
    cells = (line.split("|")[1].partition(": ")[2] for line in UNDOCUMENTED.splitlines() if line.startswith("| `"))
    listed = {name for cell in cells for name in re.findall(r"`(\w+)`", cell)}
    assert found - listed == set()
    assert listed - found == set(), "The table lists names that nothing uses."


def row(name: str) -> str:
    return next(line for line in TABLE.splitlines() if f"{name}`" in line)


@pytest.mark.parametrize("name", SIGNATURES)
def test_trainer_takes_the_arguments_that_we_pass(name):
    found = list(inspect.signature(getattr(Trainer, name)).parameters)[1:]
    assert found[: len(SIGNATURES[name])] == SIGNATURES[name], row(name)


@pytest.mark.parametrize("name", ORDERS)
def test_trainer_calls_our_hooks_in_the_order_that_we_need(name):
    source = inspect.getsource(getattr(Trainer, name))
    places = [source.find(words) for words in ORDERS[name]]
    assert -1 not in places and places == sorted(places), f"Trainer.{name} has another order of {ORDERS[name]} now."
