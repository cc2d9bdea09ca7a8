"""
Write checkpoints for other programs: MiniMind's own generations, stock transformers architectures (and so vLLM), GGUF.

[`export`] writes one format, reads it back, and compares the logits with the model's. It refuses a model that a format
cannot hold before it writes anything.
"""

import copy
import json
import math
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast
from transformers.utils import CONFIG_NAME, logging

from ..loading.native import check_finite
from ..model.configuration_minimind import MiniMindConfig
from ..model.modeling_minimind import MiniMindForCausalLM
from ..runtime.errors import UserError
from ..runtime.named import load_named
from ..runtime.writing import LOCK_NAME, check_empty, written_whole
from ..tokenizer.control_tokens import set_stop_tokens
from ..tokenizer.pretrained import check_tokenizer, save_tokenizer
from .comparing import ExportReport, compare
from .foreign_configs import write_stock_fields, write_upstream_fields
from .gguf import GGUF_TYPES, write_gguf
from .gguf_tokenizer import find_text_split
from .importing import load_upstream
from .layouts import (
    GGUF_LACKS,
    LAYOUTS,
    describe_layout,
    find_features,
    is_rotated,
    stock_layout,
    to_half_split,
    upstream_layout,
)


logger = logging.get_logger(__name__)

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def to_state_dict(model: MiniMindForCausalLM, layout: str) -> dict[str, torch.Tensor]:
    """Return the weights of `model` with the names and shapes of `layout`, contiguous. Tied weights share memory."""
    target = LAYOUTS[layout]
    state_dict = {
        name: part.contiguous()
        for ours, tensor in model.state_dict().items()
        for name, part in target.split(ours, tensor, model.config)
    }
    if model.config.tie_word_embeddings:
        # Put the same tensor under both names: `torch.save` then stores it once.
        state_dict[target.name("lm_head.weight")] = state_dict[target.name("model.embed_tokens.weight")]
    return state_dict


def to_stock_model(model: MiniMindForCausalLM, layout: str) -> PreTrainedModel:
    """
    Return the model as `LlamaForCausalLM`, `Qwen3ForCausalLM`, `Qwen3MoeForCausalLM` or `Ernie4_5_MoeForCausalLM`.
    """
    config = AutoConfig.for_model(layout, **write_stock_fields(model.config, layout))
    stock = AutoModelForCausalLM.from_config(config, dtype=model.dtype)
    # transformers stacks experts in memory as this package does, and splits them only when it saves them.
    state_dict = model.state_dict()
    for name in filter(is_rotated, state_dict) if LAYOUTS[layout].half_split else ():
        state_dict[name] = to_half_split(state_dict[name], model.config.head_dim)
    # Ernie adds these biases to the router's scores; MiniMind has none.
    biases = (name for name in stock.state_dict() if name.endswith(".moe_statics.e_score_correction_bias"))
    state_dict |= {name: torch.zeros(1, model.config.num_experts, dtype=model.dtype) for name in biases}
    # Load strictly: if a new version of transformers renames a tensor, it must not keep its random values.
    stock.load_state_dict(state_dict, strict=True)
    stock.generation_config = model.generation_config
    return stock.to(model.dtype).eval()


@dataclass(frozen=True)
class ExportFormat:
    """
    A format that [`export`] writes: this one is the package's own, which holds every model.

    Args:
        layout (`str`): a key of `LAYOUTS`, or the format's own name.
        lacks (`frozenset[str]`): the features of [`~weights.layouts.find_features`] that it cannot hold.
    """

    layout: str = "minimind"
    lacks: frozenset[str] = frozenset()
    dtypes: ClassVar[Collection[str]] = DTYPES
    has_tokenizer_files: ClassVar[bool] = True

    def write(self, model: MiniMindForCausalLM, directory: Path, **_: Any) -> PreTrainedModel:
        """
        Write config and weights, and return the model that was read back. Further arguments are the `tokenizer`,
        `dtype`, `model_name` and `stage` of [`export`].
        """
        model.save_pretrained(directory)
        return self.read_back(directory)

    def read_back(self, directory: Path) -> PreTrainedModel:
        """Read the files as a user would, with the Auto class."""
        return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)


class StockFormat(ExportFormat):
    """An architecture of transformers."""

    def write(self, model: MiniMindForCausalLM, directory: Path, **_: Any) -> PreTrainedModel:
        to_stock_model(model, self.layout).save_pretrained(directory)
        _add_older_names(directory / CONFIG_NAME)
        return self.read_back(directory)


class UpstreamFormat(ExportFormat):
    """A generation of MiniMind."""

    def write(self, model: MiniMindForCausalLM, directory: Path, **names: Any) -> PreTrainedModel:
        # MiniMind's own scripts read only a pickled state dict, not safetensors.
        torch.save(to_state_dict(model, self.layout), directory / upstream_file_name(model.config, names["stage"]))
        fields = json.dumps(write_upstream_fields(model.config, self.layout), indent=2)
        (directory / CONFIG_NAME).write_text(fields + "\n", encoding="utf-8")
        return load_upstream(directory, dtype=torch.float32)


class GGUFFormat(ExportFormat):
    """A GGUF file with its tokenizer. It rounds each tensor itself, and leaves norms and routers in float32."""

    dtypes = GGUF_TYPES
    has_tokenizer_files = False

    def write(self, model: MiniMindForCausalLM, directory: Path, **names: Any) -> PreTrainedModel:
        options = {"name": names["model_name"], "tokenizer": names["tokenizer"], "dtype": names["dtype"]}
        path = write_gguf(model, directory, **options)
        return load_upstream(path, dtype=torch.float32)


class WebFormat(GGUFFormat):
    """A page that runs the GGUF file in a browser tab."""

    def write(self, model: MiniMindForCausalLM, directory: Path, **names: Any) -> PreTrainedModel:
        written = super().write(model, directory, **names)
        load_named("hf_pretrain.weights.browser:write_page")(
            directory, model, names["tokenizer"], model_name=names["model_name"]
        )
        return written


def make_format(name: str, config: MiniMindConfig) -> ExportFormat:
    """Return the format of this name for a model."""
    is_gguf = issubclass(EXPORT_FORMATS[name], GGUFFormat)
    layout = stock_layout(config) if is_gguf else upstream_layout(config) if name == "upstream" else name
    lacks = LAYOUTS[layout].lacks if layout in LAYOUTS else frozenset()
    return EXPORT_FORMATS[name]("gguf", lacks | GGUF_LACKS) if is_gguf else EXPORT_FORMATS[name](layout, lacks)


EXPORT_FORMATS: dict[str, type[ExportFormat]] = {
    "minimind": ExportFormat,
    "upstream": UpstreamFormat,
    **dict.fromkeys(("llama", "qwen3", "qwen3_moe", "ernie4_5_moe"), StockFormat),
    "gguf": GGUFFormat,
    "web": WebFormat,
}


def choose_format(config: MiniMindConfig, format: str, *, dtype: str) -> ExportFormat:
    """
    Return a format for a model.

    Raises:
        `UserError`: for an unknown format, a dtype that it lacks, or a model that it cannot hold; the message then
            names the feature and the formats that hold it.
    """
    if format not in EXPORT_FORMATS:
        raise UserError(f"The format {format!r} is unknown; use one of {', '.join(EXPORT_FORMATS)}.")
    chosen = make_format(format, config)
    if dtype not in chosen.dtypes:
        raise UserError(f"--dtype {dtype} is not possible for {format}; use {', '.join(chosen.dtypes)}.")
    features = [name for name, is_there in find_features(config).items() if is_there]
    if lacking := next((feature for feature in features if feature in chosen.lacks), None):
        fitting = [name for name in EXPORT_FORMATS if make_format(name, config).lacks.isdisjoint(features)]
        fix = f"Formats that can hold this model: {', '.join(fitting)}"
        raise UserError(f"{describe_layout(chosen.layout)} cannot hold {lacking.format(config.hidden_act)}. {fix}.")
    return chosen


def export(
    model: MiniMindForCausalLM,
    output_dir: str | Path,
    format: str,
    *,
    tokenizer: PreTrainedTokenizerFast | None = None,
    dtype: str | None = None,
    model_name: str = "MiniMind",
    stage: str = "full_sft",
) -> ExportReport:
    """
    Write `model` in another format, read it back, and compare the logits.

    Args:
        model ([`MiniMindForCausalLM`]): the model.
        output_dir (`str` or `Path`): must not exist, or be empty. After an error it is as it was before.
        format (`str`): one of `EXPORT_FORMATS`.
        tokenizer ([`PreTrainedTokenizerFast`], *optional*): written beside the weights, or into a GGUF file. The
            written config gets its special tokens.
        dtype (`str`, *optional*): `float32`, `float16` or `bfloat16`, and `q8_0`, `q5_1` and `q4_0` for GGUF; by
            default the model's.
        model_name (`str`, *optional*): the name of the model in a GGUF file.
        stage (`str`, *optional*): for `upstream`, the name of the training stage in the file's name.

    Returns:
        [`ExportReport`]: how far the written model is from `model`.

    Raises:
        `UserError`: if the format cannot hold the model (naming the feature and the formats that can); for an unknown
            format or dtype, weights that overflow `dtype`, or a directory that is in use, not empty, or inside a
            checkpoint.
        `OSError`: if a disk refuses a write.
        `RuntimeError`: if the written model has the dtype of `model` but not its logits, or logits that are not
            finite.
    """
    source_dtype = str(model.dtype).removeprefix("torch.")
    if dtype is None and format == "web":
        # Beside quantized weights, llama.cpp rounds activations to 8 bits, which changes answers of small models.
        dtype = "float16" if 2 * model.num_parameters() <= 500_000_000 else "q8_0"
    dtype = dtype or source_dtype
    check_empty(output_dir, "--to")
    target = choose_format(model.config, format, dtype=dtype)
    if not target.has_tokenizer_files and tokenizer is not None:
        # Refuse a tokenizer before the weights are converted.
        find_text_split(tokenizer)

    converted = _cast(model, DTYPES[dtype] if target.has_tokenizer_files else torch.float32)
    if tokenizer is None:
        logger.warning(
            "The weights are exported without a tokenizer, and mean nothing without the one that they were trained "
            "on. Those of MiniMind's generations differ: of 6,400 ids, 9 mean the same in v1/v2 and in v3."
        )
    else:
        # Other programs read the special tokens from the config, so copy them from the tokenizer.
        check_tokenizer(tokenizer, vocab_size=model.config.vocab_size, name=tokenizer.name_or_path)
        for config in (converted.config, converted.generation_config):
            config.bos_token_id, config.pad_token_id = tokenizer.bos_token_id, tokenizer.pad_token_id
        converted.config.eos_token_id = tokenizer.eos_token_id
        set_stop_tokens(converted, tokenizer)
    with written_whole(output_dir, lock=LOCK_NAME) as aside:
        # Another process may have written here since the first check.
        check_empty(output_dir, "--to")
        options = {"tokenizer": tokenizer, "dtype": dtype, "model_name": model_name, "stage": stage}
        written = target.write(converted, aside, **options)
        # Compare in float32 on both sides, so that the difference shows only the rounding of the weights.
        names = {"path": output_dir, "format": target.layout, "dtype": dtype}
        report = compare(_cast(model, torch.float32), written.eval(), **names, is_exact=dtype == source_dtype)
        # Its weights are mapped from the files, and Windows renames no file that is mapped.
        del written
        if tokenizer is not None and target.has_tokenizer_files:
            save_tokenizer(tokenizer, aside)
    return report


def upstream_file_name(config: MiniMindConfig, stage: str) -> str:
    """Return the name that MiniMind's scripts look for, such as `full_sft_512.pth` or `pretrain_640_moe.pth`."""
    return f"{stage}_{config.hidden_size}{'_moe' if config.num_experts else ''}.pth"


def _add_older_names(config_file: Path) -> None:
    """
    Add the fields of a stock config.json under the names that transformers 4 reads.

    Without these names, transformers 4 and programs based on it would silently rotate with the architecture's default
    base.
    """
    # transformers 5 has already written the fields under its own names.
    fields = json.loads(config_file.read_text(encoding="utf-8"))
    scaling = fields["rope_parameters"]
    if "attention_factor" in scaling:
        # vLLM multiplies this factor by 0.1 ln(factor) + 1, and does not read `attention_factor`.
        scaling["attn_factor"] = scaling["attention_factor"] / (0.1 * math.log(scaling["factor"]) + 1)
    scaling = dict(scaling)
    fields["rope_theta"] = scaling.pop("rope_theta")
    if scaling["rope_type"] != "default":
        fields["rope_scaling"] = scaling
    if "num_local_experts" in fields:
        fields["num_experts"] = fields["num_local_experts"]
    config_file.write_text(json.dumps(fields, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _cast(model: MiniMindForCausalLM, dtype: torch.dtype) -> MiniMindForCausalLM:
    """Return a copy of a model on the CPU, in `dtype` and eval mode; raise `UserError` if a value overflows."""
    model = copy.deepcopy(model).to("cpu", dtype).eval()
    # NOTE: after a training in half precision, accelerate leaves a `forward` with autocast on the instance.
    model.__dict__.pop("forward", None)
    check_finite(model, f"--dtype {str(dtype).removeprefix('torch.')}")
    return model
