"""
A model with an adapter of peft.

In memory, the rows of queries and keys have the order of this package. In the files of an adapter they have the order
of the base model's own files, so that peft, vLLM and llama.cpp find in them what they expect, and adapters of other
programs work here. Imported only where an adapter is used, because peft is optional and slow to import.
"""

from pathlib import Path
from typing import Any

from peft import LoraConfig, PeftConfig, PeftModelForCausalLM, set_peft_model_state_dict
from safetensors.torch import load, save_file
from transformers import PreTrainedModel
from transformers.utils.peft_utils import find_adapter_config_file

from ..runtime.errors import UserError, as_user_errors
from .adapters import MARK, WEIGHT_FILES, read_adapter, reorder_rows
from .weight_files import read_json


# The fields of a LoRA that may have any value. The others must have their defaults.
_FREE = {
    *("base_model_name_or_path", "revision", "inference_mode", "auto_mapping", "peft_version", "init_lora_weights"),
    *("r", "lora_alpha", "lora_dropout", "use_rslora", "use_dora", "bias", "lora_bias", "eva_config", "loftq_config"),
    *("target_modules", "exclude_modules", "target_parameters", "rank_pattern", "alpha_pattern"),
    *("layers_to_transform", "layers_pattern", "modules_to_save", "trainable_token_indices", "ensure_weight_tying"),
}
# The other ways to begin change the base model's weights, too.
_INITS = (None, True, False, "gaussian", "eva", "orthogonal")


class AdaptedModel(PeftModelForCausalLM):
    """
    A MiniMind with an adapter, or a model of transformers to compare it with.

    Raises:
        `UserError`: if the adapter does not fit the model.
    """

    def __init__(self, model: PreTrainedModel, config: LoraConfig):
        with as_user_errors():
            super().__init__(model, config)
        # In this wrapper the buffers have other names. DDP would broadcast the complex table, which some versions of
        # NCCL refuse.
        tables = {name for name, _ in self.named_buffers() if name.endswith("rotary_emb.pos_cis")}
        self._ddp_params_and_buffers_to_ignore = tables

    def save_pretrained(self, save_directory: str, **kwargs: Any) -> None:  # type: ignore[override]
        """Write the adapter as peft does, with the rows of the base model's own files."""
        base = self.get_base_model()
        # By default peft reads the config of the base, as one of ours, to see whether the embedding has its size.
        super().save_pretrained(save_directory, **{"save_embedding_layers": False} | kwargs)
        if base.half_split_adapters and kwargs.get("is_main_process", True):
            for file in Path(save_directory).glob(f"**/{WEIGHT_FILES[0]}"):
                # Loaded from bytes, because `load_file` maps the file that is written here.
                weights = reorder_rows(load(file.read_bytes()), base, half_split=True)
                save_file(weights, file, {"format": "pt", MARK: "1"})

    def load_adapter(self, model_id: str | Path, adapter_name: str = "default", *_: Any, **__: Any) -> Any:  # type: ignore[override]
        """
        Set all weights of the adapter to those of a directory or Hub id. Trainer calls this method, too.

        Raises:
            `UserError`: if a tensor is missing, unexpected or of another shape, or a file cannot be read.
        """
        try:
            # Rows of another number than the model's cannot be reordered.
            result = set_peft_model_state_dict(self, read_adapter(model_id, self.get_base_model()), adapter_name)
            odd = [name for name in result.missing_keys if ".lora_" in name] + result.unexpected_keys
            if odd:
                raise RuntimeError(f"{len(odd)} tensors are missing or unexpected: {', '.join(odd[:3])}")
        except (KeyError, RuntimeError) as error:
            raise UserError(f"The adapter {model_id} does not fit its base model: {str(error)[:400]}.") from error
        return result


def read_config(path: str) -> LoraConfig:
    """Return the config of an adapter. Raise `UserError` for a kind or an option that would compute other logits."""
    fields = read_json(Path(str(find_adapter_config_file(path))))
    defaults = LoraConfig(task_type="CAUSAL_LM").to_dict()
    # peft ignores options that it does not know.
    odd = [name for name, value in fields.items() if name not in _FREE and value and value != defaults.get(name)]
    odd += ["init_lora_weights"] if fields.get("init_lora_weights") not in _INITS else []
    if odd:
        # Other kinds have other options.
        odd = ["peft_type"] if "peft_type" in odd else odd
        limits = "Only LoRA for CAUSAL_LM works here, without this. If peft can merge it, use the merged model"
        raise UserError(f"The adapter {path} has {', '.join(f'{name} {fields[name]}' for name in odd)}. {limits}.")
    config = PeftConfig.from_pretrained(path)
    config.inference_mode = False
    return config
