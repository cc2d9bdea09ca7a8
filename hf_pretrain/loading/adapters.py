"""
Adapters through peft: LoRA (https://huggingface.co/papers/2106.09685), DoRA (https://huggingface.co/papers/2402.09353)
and QLoRA (https://huggingface.co/papers/2305.14314) on attention, MLP and stacked experts.

    model = add_adapter(load_model(model_args, tokenizer), adapter_args)

An adapter directory holds `adapter_model.safetensors` in float32, `adapter_config.json`, which names the base model,
and the `generation_config.json` of the trained model. The directory is a `--model_name_or_path` for further training,
and peft's `AutoPeftModelForCausalLM` loads it: on a base of another program, such as a published Qwen3, the files have
the rows of that base, not of this package (`weights/adapted_model.py`).
`recipes/convert.py --from ADAPTER` merges the adapter into its base model.
"""

from contextlib import nullcontext, suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from torch import nn
from transformers import GenerationConfig, PreTrainedModel
from transformers.utils import GENERATION_CONFIG_NAME, is_peft_available, logging
from transformers.utils.peft_utils import find_adapter_config_file

from ..model.modeling_minimind import MiniMindForCausalLM
from ..runtime.errors import UserError, needing_extra
from ..runtime.flags import check_flags, content_flag
from ..runtime.json_files import read_json
from ..runtime.named import load_named
from ..runtime.names import is_path, may_be_checkpoint


logger = logging.get_logger(__name__)

# peft is optional, and its import is slow.
_PEFT = "hf_pretrain.weights.adapted_model"
MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
EXPERT_PARAMETERS = ("gate_up_proj", "down_proj")


@dataclass
class AdapterArguments:
    """
    Adapter to train instead of all weights.

    TRL's `ModelConfig` has fields with the same names.
    """

    use_peft: bool = content_flag(
        False, "Train a LoRA adapter, and freeze the model's weights.", form="Adapter: Train an adapter"
    )
    lora_r: int = content_flag(
        16, "Rank of the adapter, also for each stacked expert.", bounds="at least 1", form="Adapter: Rank"
    )
    lora_alpha: int = content_flag(
        32, "The adapter's output is multiplied by lora_alpha / lora_r.", bounds="at least 1"
    )
    lora_dropout: float = content_flag(
        0.0, "Dropout on the adapter's input; 0 with stacked experts.", bounds="at least 0 and below 1"
    )
    lora_target_modules: list[str] | None = content_flag(
        None, f"One or more of {', '.join(dict.fromkeys(MODULES + EXPERT_PARAMETERS))}; by default all."
    )
    use_dora: bool = content_flag(False, "With --use_peft, train DoRA instead of LoRA; not for stacked experts.")
    load_in_4bit: bool = content_flag(
        False, "Keep frozen linear layers in 4 bits (QLoRA); needs CUDA and bitsandbytes."
    )

    def __post_init__(self):
        if self.load_in_4bit and not self.use_peft:
            raise UserError("--load_in_4bit freezes the model, so nothing would be trained: add --use_peft.")


@dataclass
class KeepingArguments:
    """What an adapter keeps of its base model."""

    kl_to_base: float = content_flag(
        0.0,
        "With an adapter, the share of KL(base model || model) in the loss: it keeps what the labels do not train, "
        "prompts and answers with a weight below 1 (docs/stages.md).",
        bounds="at least 0 and below 1",
    )

    def __post_init__(self):
        check_flags(self)


def is_adapted(model: nn.Module) -> bool:
    """Return whether `model` is a `PeftModel`."""
    if not is_peft_available():
        return False
    from peft import PeftModel

    return isinstance(model, PeftModel)


def base_model_of(model: Any) -> PreTrainedModel:
    """Return the model without peft's wrapper. Its layers may still hold adapters."""
    return model.get_base_model() if is_adapted(model) else model


def add_adapter(model: MiniMindForCausalLM, args: AdapterArguments) -> Any:
    """
    Add an adapter to a model and freeze the other weights.

    Without `--use_peft`, return the model unchanged. Also return it unchanged if it already has an adapter; the run
    then trains that adapter further. The initial weights of a new adapter depend only on the seed.

    Args:
        model ([`MiniMindForCausalLM`]): the model, or a [`~peft.PeftModel`] around it.
        args ([`AdapterArguments`]): description of the adapter.

    Returns:
        [`~peft.PeftModelForCausalLM`] with the adapter in float32, or `model`.

    Raises:
        `UserError`: if peft is missing; for a model without a name, because a saved adapter could not find it again;
            for a model sharded by FSDP; for targets that the model lacks, or that peft cannot adapt; for
            `--load_in_4bit` without CUDA.
    """
    if is_adapted(model):
        logger.warning(
            "Training the loaded adapter further: its adapter_config.json replaces the --lora flags, and what earlier "
            "runs taught it is forgotten, unless --dataset_name names their data as well."
        )
        return model
    if not args.use_peft:
        return model
    with needing_extra("peft", "--use_peft needs peft"):
        new_adapter = load_named(f"{_PEFT}:new_adapter")
    return new_adapter(model, args)


def adapter_base(path: str | Path | None) -> str | None:
    """
    Return the name of the base model of the adapter at `path`, a directory or Hub id; `None` if there is no adapter.

    Raises:
        `UserError`: if the adapter does not name its base model.
    """
    # `find_adapter_config_file` queries the Hub, so call it only for directories and names of the form owner/name.
    is_name = path and may_be_checkpoint(path) and (Path(path).is_dir() or "/" in str(path))
    config_file = find_adapter_config_file(str(path)) if is_name else None
    if config_file is None:
        return None
    with needing_extra("peft", f"{path} is an adapter, which needs peft"):
        import_module("peft")
    base = read_json(Path(config_file)).get("base_model_name_or_path")
    # Earlier versions of this package wrote the text "None".
    if base in (None, "", "None"):
        raise UserError(f"{path}/adapter_config.json does not name its base: set base_model_name_or_path in it.")
    if base == str(path) or (is_path(base) and Path(base).resolve() == Path(path).resolve()):
        raise UserError(f"The adapter {path} names itself as its base model. Correct its adapter_config.json.")
    if is_path(base) and not Path(base).exists():
        fix = "Start the command where it was trained, or correct base_model_name_or_path in its adapter_config.json"
        raise UserError(f"The adapter {path} names the base model {base}, which is not here. {fix}.")
    return base


def load_adapter(model: PreTrainedModel, path: str | Path) -> Any:
    """
    Load the adapter at `path`, a directory or Hub id, onto its base model. Return a [`~peft.PeftModelForCausalLM`].

    Raises:
        `UserError`: if its weights cannot be read, or if it is no LoRA that this model can hold.
    """
    adapted = load_named(f"{_PEFT}:read_adapted")(model, path)
    # Adapters of other programs have no such file. One that is there and damaged is an error.
    with nullcontext() if Path(path, GENERATION_CONFIG_NAME).is_file() else suppress(OSError):
        model.generation_config = GenerationConfig.from_pretrained(str(path))
    return adapted


def merge_adapter(adapted: Any) -> MiniMindForCausalLM:
    """
    Merge an adapter into its base model, in place, and return the model.

    Raises:
        `UserError`: if peft cannot merge this kind of adapter, or if a merged weight is not finite.
    """
    base = adapted.get_base_model()
    # NOTE: peft would merge the LoRA of the embedding or of the head into the matrix that both share.
    names = " ".join(name for name, _ in base.named_parameters())
    if base.config.tie_word_embeddings and ("embed_tokens.lora_" in names or "lm_head.lora_" in names):
        raise UserError("An adapter of the embedding or of the head cannot be merged if they share their matrix.")
    try:
        return adapted.merge_and_unload(safe_merge=True)
    # peft cannot merge a bias of LoRA into a layer without a bias.
    except (RuntimeError, ValueError) as error:
        raise UserError(f"The adapter cannot be merged: {error}") from error
