"""
The training stages, in the order in which a project needs them.

The command reads this file without importing the package, so it imports only the standard library.
"""

from typing import NamedTuple


class Stage(NamedTuple):
    """
    A training stage, which `recipes/<stage>.py` runs. The recipe's docstring describes it.

    Args:
        start (`str`, *optional*): the stage whose model it trains, by default; `None` for random weights.
        following (`str`, *optional*): the usual next stage.
        method (`str`): the kind of training, for the model card. `{}` stands for a detail that its flags decide.
        result_flag (`str`): the flag of the next stage that takes its model.
        loss_unit (`str`, *optional*): the unit of its loss; `None` for nats per token.
        trains_on_text (`bool`): whether its data are texts, by default, so that it gives a base model.
        teaches (`bool`): whether it teaches a published chat model more.
        figures (`tuple[str, ...]`): further figures of its evaluations.
        head (`str`): what computes its loss, for the estimate of its memory: our head (`own`), also beside a teacher
            (`teacher`), TRL's (`trl`), or one without logits (`score`).
        num_sequences (`int`): sequences of a row.
        generates (`bool`): whether it trains on completions that it generates.
        extra (`str`, *optional*): the extra of pyproject.toml that it needs.
        num_processes (`int`, *optional*): by default, `hf-pretrain` starts so many; `None` for one per GPU.
        ds_config (`str`): the file of `ds_configs/` that DeepSpeed gets by default.
    """

    start: str | None
    following: str | None
    method: str
    result_flag: str = "--model_name_or_path"
    loss_unit: str | None = None
    trains_on_text: bool = False
    teaches: bool = False
    figures: tuple[str, ...] = ()
    head: str = "own"
    num_sequences: int = 1
    generates: bool = False
    extra: str | None = None
    num_processes: int | None = None
    ds_config: str = "zero2"


STAGES = {
    "pretrain": Stage(None, "sft", "pretraining", trains_on_text=True),
    "sft": Stage("pretrain", "dpo", "fine-tuning on conversations", teaches=True),
    "dpo": Stage(
        "sft", "grpo", "tuning on preferences (DPO)", loss_unit="DPO", head="trl", num_sequences=2, extra="trl"
    ),
    "reward": Stage(
        "sft", "grpo", "reward modeling", "--rewards", loss_unit="per pair", head="score", num_sequences=2, extra="trl"
    ),
    "distill": Stage("sft", "dpo", "distillation from {}", figures=("kl",), head="teacher"),
    "grpo": Stage("sft", None, "reinforcement ({})", head="trl", generates=True, extra="trl"),
}
# Recipes that can run as several processes. lm-eval's tasks, which many evaluations run, need a single process, and
# transformers evaluates only under ZeRO-3.
LAUNCHED = STAGES | {"evaluate": Stage("pretrain", None, "evaluation", num_processes=1, ds_config="zero3")}
