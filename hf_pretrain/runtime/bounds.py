"""The bounds of all numeric flags. The parser checks them before anything is read, and arguments made in Python do."""

import operator
import re
from collections.abc import Mapping
from typing import Any

from .errors import UserError


# All other numbers must be at least 0. NumPy's generators take no larger seeds.
_TABLE = """
finite: loss_weights reward_weights
at least -1: local_rank max_steps
at least 1: batch_size dataloader_prefetch_factor dataset_num_proc ddp_bucket_cap_mb ddp_timeout dp_replicate_size
at least 1: early_stopping_patience ep_size eval_accumulation_steps fsdp_size generation_batch_size lora_alpha lora_r
at least 1: gradient_accumulation_steps max_completion_length max_new_tokens num_generations_eval num_iterations
at least 1: num_proc per_device_eval_batch_size per_device_train_batch_size precompute_ref_batch_size tp_size
at least 1: ref_model_sync_steps steps_per_generation torch_empty_cache_steps
at least 2: num_generations profile_interval
at least 8: max_length
above 0: dataset_weights eval_steps eval_tasks_limit hours limit logging_steps max_minutes minutes repetition_penalty
above 0: save_steps tokens_per_parameter
at least 0 and at most 0.5: label_smoothing
at least 0 and at most 1: add_system_ratio ce_weight empty_think_ratio label_smoothing_factor ld_alpha min_p
at least 0 and at most 1: max_rejected_ratio near_duplicates ref_model_mixup_alpha thinking_ratio top_entropy_quantile
at least 0 and below 1: adam_beta1 adam_beta2 lora_dropout validation_fraction
above 0 and at most 1: top_p train_fraction
at least 0 and at most 4294967295: data_seed seed
at least 0 and at most 65535: port web_port
"""
_LINES = (line.partition(": ") for line in _TABLE.splitlines())
BOUNDS = {name: words for words, _, names in _LINES for name in names.split()}
_TESTS = {"at least": operator.ge, "above": operator.gt, "at most": operator.le, "below": operator.lt}


def check_bounds(values: Mapping[str, Any]) -> None:
    """Raise `UserError` for a number, or one in a list, that is not finite or out of its bounds."""
    for name, value in values.items():
        words = BOUNDS.get(name, "at least 0")
        limits = re.findall(rf"({'|'.join(_TESTS)}) (\S+)", words)
        for number in value if isinstance(value, list) else [value]:
            # Comparisons with NaN are false.
            if isinstance(number, int | float) and not (
                -(2**63) < number < 2**63 and all(_TESTS[test](number, float(limit)) for test, limit in limits)
            ):
                raise UserError(f"--{name} {number} must be {words}. Give another value, or leave the flag out.")
