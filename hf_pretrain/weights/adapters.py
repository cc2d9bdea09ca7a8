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

import torch
from huggingface_hub import snapshot_download
from safetensors import safe_open
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import GenerationConfig, PreTrainedModel
from transformers.integrations import is_deepspeed_zero3_enabled
from transformers.utils import GENERATION_CONFIG_NAME, is_peft_available, logging
from transformers.utils.peft_utils import find_adapter_config_file

from ..model.modeling_minimind import MiniMindForCausalLM
from ..runtime.errors import UserError, as_user_errors, needing_extra
from ..runtime.flags import content_flag
from ..runtime.names import is_path, may_be_checkpoint
from ..runtime.package_models import find_gguf
from ..runtime.writing import MANIFEST_NAME
from .layouts import is_rotated, to_half_split, to_interleaved
from .weight_files import read_json, read_tensors


logger = logging.get_logger(__name__)

MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
EXPERT_PARAMETERS = ("gate_up_proj", "down_proj")
# In the order of precedence.
WEIGHT_FILES = ("adapter_model.safetensors", "adapter_model.safetensors.index.json", "adapter_model.bin")
# Marks files with the rows of the base model's own files, in the metadata of safetensors, which others ignore.
MARK = "hf_pretrain_half_split"


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


def is_adapted(model: nn.Module) -> bool:
    """Return whether `model` is a `PeftModel`."""
    if not is_peft_available():
        return False
    from peft import PeftModel

    return isinstance(model, PeftModel)


def base_model_of(model: Any) -> PreTrainedModel:
    """Return the model without peft's wrapper. Its layers may still hold adapters."""
    return model.get_base_model() if is_adapted(model) else model


def name_base(model: MiniMindForCausalLM, name: str, *, half_split: bool) -> None:
    """Set the name by which an adapter of a model finds it, and the order of rows in the adapter's files."""
    # `from_pretrained(None, ...)` has set the name "None".
    model.name_or_path = model.config._name_or_path = name
    model.half_split_adapters = half_split


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
        logger.warning("Training the loaded adapter further. Its adapter_config.json replaces the --lora flags.")
        return model
    if not args.use_peft:
        return model
    # peft is optional, and its import is slow.
    with needing_extra("peft", "--use_peft needs peft"):
        from peft import LoraConfig

        from .adapted_model import AdaptedModel

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
    from .adapted_model import AdaptedModel, read_config

    adapted = AdaptedModel(model, read_config(str(path)))
    adapted.load_adapter(path)
    # Adapters of other programs have no such file. One that is there and damaged is an error.
    with nullcontext() if Path(path, GENERATION_CONFIG_NAME).is_file() else suppress(OSError):
        model.generation_config = GenerationConfig.from_pretrained(str(path))
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
    if is_half_split and (is_ours or find_gguf(str(adapter_base(str(directory)))) is not None):
        with safe_open(file, "pt") as opened:
            is_half_split = MARK in (opened.metadata() or {})
    return weights if is_half_split == is_stock else reorder_rows(weights, model, half_split=is_stock)


def reorder_rows(weights: dict[str, Any], model: PreTrainedModel, *, half_split: bool) -> dict[str, Any]:
    """Return the weights of an adapter, with the rows of what writes queries and keys reordered."""
    reorder, head_dim = to_half_split if half_split else to_interleaved, model.config.head_dim
    # The matrix A reads the hidden state.
    rotated = [name for name in filter(is_rotated, weights) if ".lora_A." not in name]
    return weights | {name: reorder(weights[name], head_dim).contiguous() for name in rotated}


def merge_adapter(adapted: Any) -> MiniMindForCausalLM:
    """
    Merge an adapter into its base model, in place, and return the model.

    Raises:
        `UserError`: if peft cannot merge this kind of adapter, or if a merged weight is not finite.
    """
    base = adapted.get_base_model()
    # NOTE: peft would merge the LoRA of the embedding into a head that shares its matrix, too.
    if base.config.tie_word_embeddings and any("embed_tokens.lora_" in name for name, _ in base.named_parameters()):
        raise UserError("An adapter of the embedding cannot be merged if the output head shares its matrix.")
    try:
        return adapted.merge_and_unload(safe_merge=True)
    # peft cannot merge a bias of LoRA into a layer without a bias.
    except (RuntimeError, ValueError) as error:
        raise UserError(f"The adapter cannot be merged: {error}") from error
