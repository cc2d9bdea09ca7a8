"""Check that the installed libraries have the private names that docs/architecture.md lists."""

import inspect
import re
from pathlib import Path

import pytest
from accelerate.utils import other as accelerate_other
from torch.distributed import distributed_c10d
from transformers import Trainer

from hf_pretrain.training.run_trainer import RunTrainer
from hf_pretrain.training.trainer import MaskedLossTrainer


trl = pytest.importorskip("trl")
TABLE = (Path(__file__).parents[1] / "docs/architecture.md").read_text(encoding="utf-8")
# The arguments that our code passes by position or by name.
SIGNATURES = {
    "_get_dataloader": ["dataset", "description", "batch_size", "sampler_fn", "is_training"],
    "_maybe_log_save_evaluate": ["tr_loss", "grad_norm", "model", "trial", "epoch"],
    "_get_grad_norm": ["model", "grad_norm"],
    "_get_output_dir": ["trial"],
    "_save_checkpoint": ["model", "trial"],
    "_save": ["output_dir", "state_dict"],
    "_save_optimizer_and_scheduler": ["output_dir"],
    "_load_optimizer_and_scheduler": ["checkpoint"],
    "_load_from_checkpoint": ["resume_from_checkpoint", "model"],
    "_issue_warnings_after_load": ["load_result"],
    "_push_from_checkpoint": ["checkpoint_folder"],
    "_set_signature_columns_if_needed": [],
    "_get_num_items_in_batch": ["batch_samples", "device"],
    "_prepare_input": ["data"],
    "_evaluate": ["trial", "ignore_keys_for_eval", "skip_scheduler"],
    "_determine_best_metric": ["metrics", "trial"],
    "_load_best_model": [],
    "_init_training_state": ["max_steps", "num_update_steps_per_epoch", "num_train_epochs", "resume_from_checkpoint"],
    "_track_num_input_tokens": ["inputs"],
}
# The source of each method contains these calls in this order.
ORDERS = {
    "_run_epoch": ["get_batch_samples(", "_get_grad_norm(", "optimizer.step()", "_maybe_log_save_evaluate("],
    "_save_checkpoint": ["_get_output_dir(", "save_model(output_dir, _internal_call=True)", "_save_optimizer_and"],
    "_inner_training_loop": ["_init_training_state(", "_prepare_for_training(", "on_train_begin(", "on_epoch_begin("],
    "_maybe_log_save_evaluate": ["should_log", "self._evaluate(", "_save_checkpoint("],
}


def row(name: str) -> str:
    lines = [line for line in TABLE.splitlines() if line.startswith("| `") and f"{name}`" in line]
    assert lines, f"docs/architecture.md has no row for {name}"
    return f"look at this row of docs/architecture.md: {lines[0]}"


@pytest.mark.parametrize("name", SIGNATURES)
def test_trainer_takes_the_arguments_that_we_pass(name):
    method = getattr(Trainer, name, None)
    assert method is not None, f"Trainer.{name} is gone; {row(name)}"
    found = list(inspect.signature(method).parameters)[1:]
    assert found[: len(SIGNATURES[name])] == SIGNATURES[name], f"Trainer.{name} takes {found} now; {row(name)}"
    row(name)


@pytest.mark.parametrize("name", ORDERS)
def test_trainer_calls_our_hooks_in_the_order_that_we_need(name):
    source = inspect.getsource(getattr(Trainer, name))
    places = [source.find(words) for words in ORDERS[name]]
    assert -1 not in places and places == sorted(places), f"Trainer.{name} has another order of {ORDERS[name]} now."


def test_trainer_still_sums_the_loss_where_we_skip_a_step():
    source = inspect.getsource(Trainer)
    for name in ("_tr_loss", "_globalstep_last_logged", "_signature_columns"):
        assert f"self.{name}" in source, f"Trainer.{name} is gone; {row(name)}"


def test_trl_and_torch_have_the_names_that_we_use():
    for trainer, names in {
        trl.DPOTrainer: ["_prepare_dataset", "_send_telemetry"],
        trl.GRPOTrainer: ["_get_train_sampler", "_track_num_input_tokens", "_send_telemetry"],
        trl.RLOOTrainer: ["_get_train_sampler"],
    }.items():
        for name in names:
            assert hasattr(trainer, name), f"{trainer.__name__}.{name} is gone; {row(name)}"
    assert hasattr(distributed_c10d, "_get_default_store"), row("_get_default_store")


def test_accelerate_asks_for_deepspeed_only_to_recognize_its_engine():
    calls = re.findall(r"if is_deepspeed_available\(\):\n +(.*)", inspect.getsource(accelerate_other))
    assert calls == ["from deepspeed import DeepSpeedEngine"], row("is_deepspeed_available")


def test_every_private_name_that_we_override_stands_in_the_table():
    trainers = [RunTrainer, MaskedLossTrainer, *_stage_trainers()]
    bases = {name for base in (Trainer, trl.DPOTrainer, trl.GRPOTrainer) for name in dir(base)}
    for trainer in trainers:
        for cls in trainer.__mro__:
            if not cls.__module__.startswith("hf_pretrain"):
                continue
            for name in vars(cls):
                if re.match(r"_[a-z]", name) and name in bases and not name.startswith("_abc"):
                    row(name)


def _stage_trainers() -> list[type]:
    from hf_pretrain.stages import distillation, preferences, reinforcement

    return [
        distillation.DistillationTrainer,
        preferences.MiniMindDPOTrainer,
        *reinforcement.ALGORITHMS.values(),
    ]
