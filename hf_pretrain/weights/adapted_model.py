"""
A model with an adapter of peft.

In memory, the rows of queries and keys have the order of this package. In the files of an adapter they have the order
of the base model's own files, so that peft, vLLM and llama.cpp find in them what they expect, and adapters of other
programs work here. `loading.adapters` names this module by a string, because peft is optional and slow to import.
"""

from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from peft import LoraConfig, PeftConfig, PeftModelForCausalLM, set_peft_model_state_dict
from safetensors import safe_open
from safetensors.torch import load, save_file
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.integrations import is_deepspeed_zero3_enabled
from transformers.utils.peft_utils import find_adapter_config_file

from ..loading.adapters import EXPERT_PARAMETERS, MODULES, AdapterArguments, adapter_base
from ..loading.native import name_base
from ..model.modeling_minimind import MiniMindForCausalLM
from ..runtime.errors import UserError, as_user_errors
from ..runtime.json_files import read_json
from ..runtime.names import is_gguf
from ..runtime.writing import MANIFEST_NAME
from .layouts import is_rotated, to_half_split, to_interleaved
from .weight_files import read_tensors


# The fields of a LoRA that may have any value. The others must have their defaults.
_FREE = {
    *("base_model_name_or_path", "revision", "inference_mode", "auto_mapping", "peft_version", "init_lora_weights"),
    *("r", "lora_alpha", "lora_dropout", "use_rslora", "use_dora", "bias", "lora_bias", "eva_config", "loftq_config"),
    *("target_modules", "exclude_modules", "target_parameters", "rank_pattern", "alpha_pattern"),
    *("layers_to_transform", "layers_pattern", "modules_to_save", "trainable_token_indices", "ensure_weight_tying"),
}
# The other ways to begin change the base model's weights, too.
_INITS = (None, True, False, "gaussian", "eva", "orthogonal")
# In the order of precedence.
WEIGHT_FILES = ("adapter_model.safetensors", "adapter_model.safetensors.index.json", "adapter_model.bin")
# Marks files with the rows of the base model's own files, in the metadata of safetensors, which others ignore.
MARK = "hf_pretrain_half_split"


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


def read_adapted(model: PreTrainedModel, path: str | Path) -> AdaptedModel:
    """Return a model with the adapter at `path`, a directory or Hub id."""
    adapted = AdaptedModel(model, read_config(str(path)))
    adapted.load_adapter(path)
    return adapted


def read_adapter(path: str | Path, model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """
    Return the weights of the adapter at `path`, a directory or Hub id, with the order of rows of its base `model`: a
    MiniMind, or a model of transformers.

    Raises:
        `UserError`: if a file is missing or damaged, or holds anything but tensors (no code in it is run).
    """
    directory = Path(path) if Path(path).is_dir() else Path(snapshot_download(str(path), allow_patterns=["adapter_*"]))
    file = next((file for name in WEIGHT_FILES if (file := directory / name).is_file()), directory / WEIGHT_FILES[0])
    weights, is_stock = read_tensors(file), not isinstance(model, MiniMindForCausalLM)
    is_half_split = is_stock or model.half_split_adapters
    # Earlier versions of this package, which set no mark, left the rows as they train. Only this package has adapters
    # of GGUF files.
    is_ours = any((directory / name).is_file() for name in (MANIFEST_NAME, "run.json"))
    if is_half_split and (is_ours or is_gguf(str(adapter_base(str(directory))))):
        with safe_open(file, "pt") as opened:
            is_half_split = MARK in (opened.metadata() or {})
    return weights if is_half_split == is_stock else reorder_rows(weights, model, half_split=is_stock)


def reorder_rows(weights: dict[str, Any], model: PreTrainedModel, *, half_split: bool) -> dict[str, Any]:
    """Return the weights of an adapter, with the rows of what writes queries and keys reordered."""
    reorder, head_dim = to_half_split if half_split else to_interleaved, model.config.head_dim
    # The matrix A reads the hidden state.
    rotated = [name for name in filter(is_rotated, weights) if ".lora_A." not in name]
    return weights | {name: reorder(weights[name], head_dim).contiguous() for name in rotated}


def new_adapter(model: MiniMindForCausalLM, args: AdapterArguments) -> AdaptedModel:
    """Return a model with a new adapter, as [`~loading.adapters.add_adapter`] describes it."""
    if not model.name_or_path:
        fix = "Convert weights of another program first, with `hf-pretrain convert`"
        raise UserError(f"--use_peft needs --model_name_or_path, because a saved adapter names its base. {fix}.")
    # FSDP2 has sharded the model already, and peft would add unsharded matrices to shards.
    if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        raise UserError("--use_peft does not work with --fsdp_size; use DDP, or --deepspeed ds_configs/zero2.json.")
    # Check the targets before the quantization, which is slow.
    modules, parameters = _find_targets(model, args)
    if args.load_in_4bit:
        model = _quantize(model)
    # Reseed: launchers consume different amounts of randomness before this point.
    with as_user_errors(), torch.random.fork_rng():
        torch.manual_seed(torch.initial_seed())
        config = LoraConfig(
            base_model_name_or_path=model.name_or_path,
            task_type="CAUSAL_LM",
            r=args.lora_r,
            lora_alpha=args.lora_alpha,
            lora_dropout=args.lora_dropout,
            use_dora=args.use_dora,
            target_modules=modules,
            target_parameters=parameters,
        )
        return AdaptedModel(model, config)


def _find_targets(model: MiniMindForCausalLM, args: AdapterArguments) -> tuple[list[str], list[str]]:
    """Return the modules and stacked parameters to adapt, as peft expects them."""
    # Look only for names that this model has: without shared experts, a model with experts has no linear gate_proj.
    linear = {name.rpartition(".")[2] for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    stacked = EXPERT_PARAMETERS if model.config.num_experts else ()
    known = [name for name in dict.fromkeys((*MODULES, *EXPERT_PARAMETERS)) if name in linear or name in stacked]
    asked = args.lora_target_modules or known
    unknown = [name for name in asked if name not in known]
    if unknown:
        raise UserError(f"--lora_target_modules {' '.join(unknown)}: this model lacks it. It has {' '.join(known)}.")
    # peft adapts plain parameters, such as stacked experts, through `target_parameters`.
    parameters = [f"experts.{name}" for name in stacked if name in asked]
    rest = [name for name in known if name not in EXPERT_PARAMETERS]
    # NOTE: peft adds to the expert parameters before the experts run. ZeRO-3 may not have gathered them by then.
    if parameters and (args.lora_dropout or args.use_dora or is_deepspeed_zero3_enabled()):
        limits = "peft adapts stacked experts neither with --lora_dropout, nor with --use_dora, nor under ZeRO-3"
        raise UserError(f"{limits}. Leave it out, or adapt the rest with --lora_target_modules {' '.join(rest)}.")
    return [name for name in asked if name in linear], parameters


def _quantize(model: MiniMindForCausalLM) -> MiniMindForCausalLM:
    """
    Return the model with its linear layers in 4 bits. Embeddings, norms, output head and stacked experts keep their
    dtype.
    """
    if not torch.cuda.is_available() or is_deepspeed_zero3_enabled():
        raise UserError("--load_in_4bit needs CUDA, and no ZeRO-3. Without it, --use_peft trains LoRA.")
    from peft import prepare_model_for_kbit_training
    from transformers import BitsAndBytesConfig

    # bitsandbytes quantizes only while transformers loads weights, so load the model again from memory.
    quantized = type(model).from_pretrained(
        None,
        config=model.config,
        state_dict=model.state_dict(),
        attn_implementation=model.config._attn_implementation,
        dtype=torch.float32,
        # Each rank quantizes its own copy on its own GPU.
        device_map={"": torch.cuda.current_device()},
        quantization_config=BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16,
        ),
    )
    name_base(quantized, model.name_or_path, half_split=model.half_split_adapters)
    # Trainer enables activation checkpointing itself, if asked to.
    return prepare_model_for_kbit_training(quantized, use_gradient_checkpointing=False)
