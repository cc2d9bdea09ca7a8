"""
The arguments of a run that change its updates. A resumed run compares them with those of its checkpoint.

Every argument counts unless it is in a list of this module, so the comparison covers new arguments and those of
libraries.
"""

import json
from collections.abc import Iterable
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from transformers import TrainingArguments


# Arguments that change no update: where and when the run writes, evaluates and reports, and how it resumes.
_HARMLESS = {
    *("output_dir", "run_name", "project", "config", "disable_tqdm", "report_to", "profile", "profile_interval"),
    *("log_level", "log_level_replica", "log_on_each_node", "logging_strategy", "logging_steps", "logging_first_step"),
    *("logging_nan_inf_filter", "include_num_input_tokens_seen", "skip_memory_metrics", "debug", "preview", "dry_run"),
    *("trackio_space_id", "trackio_bucket_id", "trackio_static_space_id", "max_rejected_ratio", "trust_remote_code"),
    *("save_strategy", "save_steps", "save_on_each_node", "save_total_limit", "enable_jit_checkpoint"),
    *("load_best_model_at_end", "do_train", "do_eval", "do_predict", "local_rank", "generate_during_eval"),
    *("eval_on_start", "per_device_eval_batch_size", "prediction_loss_only", "eval_do_concat_batches"),
    *("eval_use_gather_object", "eval_accumulation_steps", "include_for_metrics", "batch_eval_metrics"),
    *("bf16_full_eval", "fp16_full_eval", "num_generations_eval", "precompute_ref_batch_size"),
    *("push_to_hub", "hub_token", "hub_private_repo", "hub_model_id", "hub_strategy", "hub_always_push"),
    *("hub_revision", "hub_license", "hub_language", "log_completions", "log_completions_hub_repo", "log_multimodal"),
    *("num_completions_to_print", "log_unique_prompts", "restore_callback_states_from_checkpoint"),
    *("resume_from_checkpoint", "resume_from_hub", "allow_inexact_resume", "trust_checkpoint", "on_nonfinite"),
    # Processes, devices and kernels. They change at most the rounding.
    *("use_cpu", "full_determinism", "num_proc", "dataset_num_proc", "dataloader_num_workers"),
    *("dataloader_pin_memory", "dataloader_persistent_workers", "dataloader_prefetch_factor"),
    *("dataloader_multiprocessing_context", "auto_find_batch_size", "torch_empty_cache_steps"),
    *("activation_checkpointing", "activation_checkpointing_kwargs", "gradient_checkpointing"),
    *("gradient_checkpointing_kwargs", "activation_offloading", "torch_compile", "torch_compile_backend"),
    *("torch_compile_mode", "use_liger_kernel", "liger_kernel_config", "use_cache", "attn_implementation"),
    *("cache_implementation", "ddp_find_unused_parameters", "ddp_bucket_cap_mb", "ddp_broadcast_buffers"),
    *("ddp_static_graph", "ddp_backend", "ddp_timeout", "ds3_gather_for_generation"),
    *("transformers_continuous_batching_config", "vllm_mode", "vllm_model_impl", "vllm_enable_sleep_mode"),
    *("vllm_server_base_url", "vllm_server_host", "vllm_server_port", "vllm_server_timeout", "vllm_group_port"),
    *("vllm_gpu_memory_utilization", "vllm_max_model_length", "vllm_tensor_parallel_size"),
    # Compared as the layout of the optimizer state, as the optimizer, or as the global batch. With one process,
    # transformers turns `average_tokens_across_devices` off. `generation_batch_size` says how often GRPO generates.
    *("fsdp", "fsdp_config", "fsdp_size", "tp_size", "ep_size", "dp_replicate_size", "save_only_model"),
    *("optim", "optim_preset", "per_device_train_batch_size", "gradient_accumulation_steps"),
    *("average_tokens_across_devices", "steps_per_generation"),
}
# These matter to a schedule that follows the evaluations.
_EVALUATION = {"eval_strategy", "eval_steps", "eval_delay", "metric_for_best_model", "greater_is_better"}
# Schedules that do not depend on the number of steps, unless the warmup is a share of it.
_ENDLESS_SCHEDULES = {"constant", "constant_with_warmup", "inverse_sqrt", "reduce_lr_on_plateau"}
# Arguments that act only through a content whose digest is compared. A path may be spelled otherwise, and a resume may
# leave out what the checkpoint holds. They are named if the content differs.
DATA_FLAGS = {
    *("dataset_name", "dataset_weights", "validation_fraction", "train_fraction", "streaming", "text_column"),
    *("packing_strategy", "dataset_kind", "chat_template", "enable_thinking", "train_on_inputs"),
    *("span_weights", "tokenizer_name_or_path", "vocab_size"),
}
MODEL_FLAGS = {"model_preset", "model_name_or_path", "config_overrides", "vocab_size"}
WEIGHT_FLAGS = {"model_name_or_path", "teacher_name_or_path"}
ADAPTER_FLAGS = {
    *("use_peft", "lora_r", "lora_alpha", "lora_dropout", "lora_target_modules", "use_dora", "load_in_4bit"),
}
CONTENT_FLAGS = DATA_FLAGS | MODEL_FLAGS | WEIGHT_FLAGS | ADAPTER_FLAGS
# Blocks of a DeepSpeed config that change no update. The layout has the ZeRO stage.
_DEEPSPEED_HARMLESS = {
    *("zero_optimization", "checkpoint", "activation_checkpointing", "aio", "steps_per_print", "wall_clock_breakdown"),
    *("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "comms_logger"),
    *("flops_profiler", "tensorboard", "wandb", "csv_monitor", "dump_state", "zero_allow_untested_optimizer"),
}


def describe_settings(args: TrainingArguments, others: Iterable[Any] = ()) -> dict[str, Any]:
    """
    Return all arguments of a run that change its updates, by name.

    Args:
        args ([`~transformers.TrainingArguments`]): the training arguments.
        others (dataclasses): the other arguments of the run.
    """
    values: dict[str, Any] = {}
    for part in others:
        values |= vars(part)
    values |= args.to_dict()
    schedule = values["lr_scheduler_type"]
    harmless = _HARMLESS if schedule == "reduce_lr_on_plateau" else _HARMLESS | _EVALUATION
    is_endless = schedule in _ENDLESS_SCHEDULES and (schedule == "constant" or not 0 < args.warmup_steps < 1)
    if is_endless or args.max_steps > 0:
        harmless = harmless | {"num_train_epochs"} | ({"max_steps"} if is_endless else set())
    deepspeed = args.deepspeed_plugin.deepspeed_config if args.deepspeed_plugin else {}
    values["deepspeed"] = {name: value for name, value in deepspeed.items() if name not in _DEEPSPEED_HARMLESS}
    return {
        name: plain(value) if name in CONTENT_FLAGS else _without_directories(plain(value))
        for name, value in values.items()
        if name not in harmless
    }


def plain(value: Any) -> Any:
    """Return a value as a manifest holds it."""

    def convert(part: Any) -> Any:
        if isinstance(part, set | frozenset):
            return sorted(part, key=str)
        # The text of other objects may contain their address.
        is_text = isinstance(part, Path | torch.dtype)
        return part.value if isinstance(part, Enum) else str(part) if is_text else type(part).__qualname__

    return json.loads(json.dumps(value, default=convert))


def _without_directories(value: Any) -> Any:
    """Return a value with paths of existing files shortened to their names. A user may move their directories."""
    if isinstance(value, list):
        return [_without_directories(part) for part in value]
    return Path(value).name if isinstance(value, str) and "/" in value and Path(value).exists() else value


__all__ = [
    "ADAPTER_FLAGS",
    "CONTENT_FLAGS",
    "DATA_FLAGS",
    "MODEL_FLAGS",
    "WEIGHT_FLAGS",
    "describe_settings",
    "plain",
]
