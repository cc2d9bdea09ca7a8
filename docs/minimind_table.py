"""Print the table of MiniMind's flags in from-minimind.md: `python docs/minimind_table.py`."""

import re
from collections.abc import Iterator

from hf_pretrain.runtime.minimind_flags import TABLE


# What `minimind_flags.py` does with the flags that MiniMind splits.
COLLECTED = {
    "--save_dir": "`--output_dir`, with `--save_weight` or `--lora_name` as the last part",
    "--from_weight": "`--model_name_or_path`: the run of this name in `--save_dir` (`sft` for `full_sft`), or "
    "MiniMind's file of this name; and `--config recipes/base/STAGE.yaml`, which has MiniMind's settings",
    "--from_student_weight": "as `--from_weight`",
    "--from_teacher_weight": "`--teacher_name_or_path`, found as with `--from_weight`",
    "--lora_name": "`--use_peft --lora_target_modules q_proj o_proj --lora_alpha 16`, and the name of the run",
    "--dim": "`--preset minimind2`, and the size in `--config_overrides`",
    "--hidden_size": "`--preset minimind3`, and the size in `--config_overrides`",
    "--student_hidden_size": "as `--hidden_size` and its kind",
    "--use_moe": "the preset with experts",
    "--max_gen_len": "`--max_completion_length`",
    "--batch_size": "`--per_device_train_batch_size` times `--num_generations`, because TRL counts completions",
}
SAME = {
    **dict.fromkeys(("--out_dir", "--save_weight"), "--save_dir"),
    **{"--n_layers": "--dim", "--num_hidden_layers": "--hidden_size"},
    **{"--student_num_layers": "--student_hidden_size", "--student_use_moe": "--student_hidden_size"},
    "--num_generations": "--batch_size",
}
# The same names in scripts of inference.
ANSWERS = {
    **dict.fromkeys(("--save_dir", "--out_dir"), "the directory of `--weight`"),
    "--weight": "`--model_name_or_path`, found as with `--from_weight`",
    "--load_from": "`--model_name_or_path`, without `--weight`",
    **dict.fromkeys(
        ("--lora_weight", "--lora_name"),
        "nothing for `None`; otherwise `--model_name_or_path`, with the adapter of this package in the directory of "
        "`--weight`, or with a copy of `--weight` that holds MiniMind's LoRA file",
    ),
}


# What stands in no rule: the meaning of a flag without a value of ours, and defaults that a flag of MiniMind adds.
MEANINGS = {
    ("agent", "--max_seq_len"): "nothing: MiniMind does not cut these prompts, either",
    ("agent", "--max_gen_len"): "`--max_turn_length`, and MiniMind's `--max_completion_length 2500` and "
    "`--max_tool_calling_iterations 2`",
    ("agent", "--max_total_len"): "`--max_completion_length`, in which the prompt does not count",
    ("evaluate", "--backend"): "nothing for `local`; for `api`, `--api_base_url` and `--api_model` with MiniMind's "
    "defaults",
}


def describe(rule: str | dict[str, str]) -> str:
    if isinstance(rule, dict):
        values = [f"{describe(text)} for `{value}`" for value, text in rule.items() if value != "*"]
        return ", ".join(values) or "nothing: the weights tell"
    words = rule.replace(" @steps {}", "").replace(" {} ", "`, with `").replace(" {}", "")
    scaled = ", divided by the accumulation, because MiniMind counts micro-batches" if " @steps {}" in rule else ""
    return f"`{words}`{scaled}" if words else "nothing"


def rows() -> Iterator[str]:
    for stage, rules in ((name, part) for name, part in TABLE.items() if name not in ("otherwise", "defaults")):
        groups: dict[str, list[str]] = {}
        for flag, rule in rules.items():
            if rule == "refused":
                continue
            if stage == "refused":
                text = "refused: " + re.sub(r"--\w+( rloo)?", r"`\g<0>`", rule)
                flag = f"{flag}` of `grpo" if flag in TABLE["all"] else flag
            else:
                collected = ANSWERS if stage == "answers" else COLLECTED
                text = collected.get(flag) or COLLECTED[SAME.get(flag, flag)] if rule == "collect" else describe(rule)
            text = MEANINGS.get((stage, flag), text)
            if isinstance(rule, dict) and flag in TABLE["otherwise"]:
                text += "; other values are refused: " + re.sub(r"--\w+", r"`\g<0>`", TABLE["otherwise"][flag])
            groups.setdefault(text, []).append(f"`{flag}`")
        places = {"all": "", "refused": "", "answers": " of `chat` and `serve`", "agent": " of `grpo --tools`"}
        where = places.get(stage, f" of `{stage}`")
        for text, flags in groups.items():
            yield f"| {', '.join(flags)}{where} | {text} |"


if __name__ == "__main__":
    print("\n".join(rows()))
