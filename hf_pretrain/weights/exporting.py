"""
Write checkpoints for other programs: MiniMind's own generations, stock transformers architectures (and so vLLM), GGUF.

[`export`] writes one format, reads it back with the program that it is meant for, and compares the logits with the
model's. [`check_fits`] refuses a model that a format cannot hold before anything is written.
"""

import copy
import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast
from transformers.utils import logging

from ..model.configuration_minimind import MiniMindConfig
from ..model.modeling_minimind import MiniMindForCausalLM
from ..runtime.names import split_hub_name
from ..runtime.writing import check_writable, written_whole
from ..tokenizer.loading import check_tokenizer, save_tokenizer
from .gguf import check_gguf, check_gguf_fields, gguf_layout, read_ernie_weights, write_gguf, write_modelfile
from .layouts import LAYOUTS, describe_layout, to_half_split
from .loading import V3_YARN, load_upstream
from .perplexity import perplexity


logger = logging.get_logger(__name__)

EXPORT_FORMATS = ("minimind", "upstream", "llama", "qwen3", "qwen3_moe", "ernie4_5_moe", "gguf")
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
GGUF_TYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "q8_0": "Q8_0", "q5_1": "Q5_1", "q4_0": "Q4_0"}
# Our names of the stages, and the names in the file names of MiniMind's scripts.
UPSTREAM_STAGES = {"pretrain": "pretrain", "sft": "full_sft", "dpo": "dpo", "distill": "full_dist", "grpo": "grpo"}
# The default of v1's `max_seq_len`, the length of its training rows.
V1_LENGTH = 8192
CARD_NAME = "README.md"
# The random input on which logits are compared.
ROWS, ROW_TOKENS = 8, 64


def unsupported_feature(config: MiniMindConfig, layout: str) -> str | None:
    """
    Return a feature of the model that `layout` (a key of `LAYOUTS`, or `"minimind"`) cannot hold, or `None` if it can
    hold the whole model.
    """
    if layout == "minimind":
        return None
    target = LAYOUTS[layout]
    parts = {
        "experts": target.has_experts is False and config.num_experts > 0,
        "dense layers (no experts)": target.has_experts is True and config.num_experts == 0,
        "q/k norms": config.qk_norm and not target.has_qk_norm,
        "attention without q/k norms": target.has_qk_norm and not config.qk_norm,
        "shared experts": layout in ("v3", "qwen3_moe") and config.num_experts and config.num_shared_experts > 0,
        "several shared experts": layout == "v1" and config.num_experts and config.num_shared_experts > 1,
    }
    if layout in ("v1", "v2"):
        # v1 and v2 never normalise at top-1, because normalising would make every weight 1.
        is_top1 = config.num_experts > 0 and config.num_experts_per_tok == 1
        parts |= {
            "an untied output head": not config.tie_word_embeddings,
            "a head_dim other than hidden_size / num_attention_heads": (
                config.head_dim * config.num_attention_heads != config.hidden_size
            ),
            "normalised top-1 routing": is_top1 and config.norm_topk_prob,
            "scaled rotary positions": config.rope_parameters["rope_type"] != "default",
            f"the activation {config.hidden_act}": layout == "v1" and config.hidden_act != "silu",
            "more than the 32,768 positions of its table": layout == "v1" and config.max_position_embeddings > 32768,
        }
    elif layout == "v3":
        rope = config.rope_parameters
        yarn = V3_YARN | {"rope_type": "yarn", "rope_theta": rope["rope_theta"], "attention_factor": 1.0}
        is_long = config.max_position_embeddings > V3_YARN["original_max_position_embeddings"]
        # v3's code has fixed constants of YaRN, and applies them only to tables longer than the original length.
        is_v3_yarn = rope == yarn and is_long
        parts["scaled rotary positions other than its own YaRN"] = rope["rope_type"] != "default" and not is_v3_yarn
    return next((part for part, is_there in parts.items() if is_there), None)


def check_fits(config: MiniMindConfig, layout: str) -> None:
    """Raise `ValueError` if `layout` cannot hold the model, naming the feature and the formats that can."""
    part = unsupported_feature(config, layout)
    if part is None:
        return
    fitting = [other for other in LAYOUTS if unsupported_feature(config, other) is None]
    generations = [other for other in fitting if LAYOUTS[other].is_generation]
    others = ["minimind", *(other for other in fitting if other not in generations)]
    if generations:
        others.append(f"upstream ({', '.join(generations)})")
    raise ValueError(
        f"{describe_layout(layout)} cannot hold {part}. Formats that can hold this model: {', '.join(others)}."
    )


def default_generation(config: MiniMindConfig) -> str:
    """
    Return the generation that `--format upstream` writes: the origin of the weights if it still fits, or else the
    newest generation that fits.
    """
    if config.upstream_generation is not None and unsupported_feature(config, config.upstream_generation) is None:
        return config.upstream_generation
    return next(
        (layout for layout in ("v3", "v2", "v1") if unsupported_feature(config, layout) is None),
        "v3" if config.qk_norm else "v2",
    )


def to_state_dict(model: MiniMindForCausalLM, layout: str) -> dict[str, torch.Tensor]:
    """Return the weights of `model` with the names and shapes of `layout`, contiguous. Tied weights share memory."""
    check_fits(model.config, layout)
    state_dict: dict[str, torch.Tensor] = {}
    for ours, tensor in model.state_dict().items():
        for name, part in LAYOUTS[layout].split(ours, tensor.detach().cpu(), model.config):
            state_dict[name] = part.contiguous()
    if model.config.tie_word_embeddings:
        # Put the same tensor under both names: `torch.save` then stores it once.
        state_dict[LAYOUTS[layout].name("lm_head.weight")] = state_dict[
            LAYOUTS[layout].name("model.embed_tokens.weight")
        ]
    return state_dict


def to_stock_model(model: MiniMindForCausalLM, layout: str) -> PreTrainedModel:
    """
    Return the model as `LlamaForCausalLM`, `Qwen3ForCausalLM`, `Qwen3MoeForCausalLM` or `Ernie4_5_MoeForCausalLM`.
    """
    check_fits(model.config, layout)
    config = AutoConfig.for_model(layout, **_write_stock_fields(model.config, layout))
    stock = AutoModelForCausalLM.from_config(config, dtype=model.dtype)
    target = LAYOUTS[layout]
    # transformers stacks experts in memory as this package does, and splits them only when it saves them.
    state_dict = {
        name: to_half_split(tensor, model.config.head_dim)
        if target.half_split and re.search(r"\.[qk]_(proj|norm)\.", name)
        else tensor
        for name, tensor in model.state_dict().items()
    }
    if layout == "ernie4_5_moe":
        # Ernie adds these biases to the router's scores; MiniMind has none.
        zeros = torch.zeros(1, model.config.num_experts, dtype=model.dtype)
        for layer in range(model.config.num_hidden_layers):
            state_dict[f"model.layers.{layer}.mlp.gate.moe_statics.e_score_correction_bias"] = zeros
    # Load strictly: if a new version of transformers renames a tensor, it must not keep its random values.
    stock.load_state_dict(state_dict, strict=True)
    stock.generation_config = model.generation_config
    return stock.to(model.dtype).eval()


def _write_stock_fields(config: MiniMindConfig, layout: str) -> dict[str, Any]:
    """Return the config fields of the transformers architecture `layout`."""
    fields = {
        name: getattr(config, name)
        for name in (
            *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
            *("head_dim", "intermediate_size", "hidden_act", "max_position_embeddings", "initializer_range"),
            *("rms_norm_eps", "rope_parameters", "tie_word_embeddings", "bos_token_id", "eos_token_id"),
            "pad_token_id",
        )
    }
    if layout != "ernie4_5_moe":
        # Ernie's config has no such field.
        fields["attention_dropout"] = config.dropout
    if layout in ("llama", "qwen3"):
        return fields
    fields["moe_intermediate_size"] = config.moe_intermediate_size
    # transformers averages the router loss over layers and does not divide by top-k; MiniMind sums and divides.
    fields["router_aux_loss_coef"] = (
        config.router_aux_loss_coef * config.num_hidden_layers / config.num_experts_per_tok
    )
    if layout == "qwen3_moe":
        return fields | {
            "num_experts": config.num_experts,
            "num_experts_per_tok": config.num_experts_per_tok,
            "norm_topk_prob": config.norm_topk_prob,
        }
    return fields | {
        "moe_num_experts": config.num_experts,
        "moe_k": config.num_experts_per_tok,
        "moe_num_shared_experts": config.num_shared_experts,
        "moe_layer_start_index": 0,
        # Ernie divides by the sum of the top-k probabilities (at most 1), but never by less than this floor. A floor
        # of 1 therefore turns the normalisation off.
        "moe_norm_min": 1e-12 if config.norm_topk_prob else 1.0,
    }


def to_upstream_fields(config: MiniMindConfig, generation: str) -> dict[str, Any]:
    """Return the config.json that MiniMind's own code of that generation writes."""
    check_fits(config, generation)
    fields: dict[str, Any] = {
        name: getattr(config, name)
        for name in (
            *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
            *("rms_norm_eps", "dropout", "bos_token_id", "eos_token_id", "hidden_act", "max_position_embeddings"),
        )
    }
    width = config.moe_intermediate_size if config.num_experts else config.intermediate_size
    fields |= {
        "model_type": "minimind",
        "intermediate_size": width,
        "rope_theta": config.rope_parameters["rope_theta"],
        "use_moe": config.num_experts > 0,
        "num_experts_per_tok": config.num_experts_per_tok,
        # v1 and v2 never normalise at top-1, whatever this field says; True is their default.
        "norm_topk_prob": config.norm_topk_prob or config.num_experts_per_tok == 1,
    }
    if generation == "v3":
        return fields | {
            "head_dim": config.head_dim,
            "tie_word_embeddings": config.tie_word_embeddings,
            "inference_rope_scaling": config.rope_parameters["rope_type"] == "yarn",
            # The config of a dense model holds the default of MiniMind's code.
            "num_experts": config.num_experts or 4,
            "moe_intermediate_size": width,
            "norm_topk_prob": config.norm_topk_prob,
            "router_aux_loss_coef": config.router_aux_loss_coef / config.num_experts_per_tok,
        }
    fields |= {
        "n_routed_experts": config.num_experts or 4,
        "n_shared_experts": config.num_shared_experts,
        "scoring_func": "softmax",
        "aux_loss_alpha": config.router_aux_loss_coef,
        "seq_aux": config.router_aux_loss_level == "sequence",
    }
    if generation == "v1":
        # v1 has at most one shared expert, and its field is a flag.
        fields["n_shared_experts"] = True if config.num_shared_experts else None
        # v1's code allocates a mask of this size squared in each layer. Its rotary table always has 32,768 positions.
        fields["max_position_embeddings"] = config.upstream_max_seq_len or min(
            config.max_position_embeddings, V1_LENGTH
        )
        theirs = {ours: name for name, ours in MiniMindConfig.attribute_map.items()}
        fields = {theirs.get(name, name): value for name, value in fields.items()}
    return fields


@dataclass
class ExportReport:
    """
    Result of [`export`]: the format that was written, and its difference from the original model.

    Args:
        format (`str`): the format that was written; for GGUF, also its architecture.
        dtype (`str`): the dtype of the weights.
        max_difference (`float`, *optional*): the largest difference of a logit on `ROWS` rows of `ROW_TOKENS` random
            ids, both sides computed in float32; `None` if no program here can run the format, in which case the
            tensors are compared.
        relative_difference (`float`, *optional*): the norm of the differences divided by the norm of the logits.
        max_weight_difference (`float`, *optional*): the largest difference of a weight, if the logits could not be
            compared.
        decisive_difference (`float`): the difference that decides whether the export is correct. If the written dtype
            is the model's, it must be rounding error. It is the difference of the weights, or of all logits. For a
            model with experts it is the difference of the second-worst row, because rounding may decide a near tie
            between two experts, and then a whole row differs.
        perplexity (`tuple[float, float]`, *optional*): the perplexity before and after, for a GGUF file and with
            documents to measure it on.
    """

    format: str
    dtype: str
    max_difference: float | None = None
    relative_difference: float | None = None
    max_weight_difference: float | None = None
    decisive_difference: float = math.nan
    perplexity: tuple[float, float] | None = None

    def __str__(self) -> str:
        if self.max_difference is None:
            difference = f"largest difference of a weight {self.max_weight_difference:.2e}"
        else:
            difference = (
                f"largest logit difference on {ROWS} rows {self.max_difference:.2e} "
                f"({self.relative_difference:.1e} of the logits' norm)"
            )
        cost = ""
        if self.perplexity is not None:
            before, after = self.perplexity
            change = f"{after / before - 1:+.2%}"
            cost = f"; perplexity on validation text {before:.3f} before, {after:.3f} after ({change})"
        return f"{self.format}, {self.dtype}: read back; {difference}{cost}"


def export(
    model: MiniMindForCausalLM,
    output_dir: str | Path,
    format: str,
    *,
    tokenizer: PreTrainedTokenizerFast | None = None,
    dtype: str | None = None,
    generation: str | None = None,
    model_name: str = "MiniMind",
    stage: str = "full_sft",
    card: Callable[[str], str] | None = None,
    overwrite: bool = False,
    documents: list[list[int]] | None = None,
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
        generation (`str`, *optional*): `v1`, `v2` or `v3`, for `upstream`; by default the generation that the weights
            came from, or the newest that fits.
        model_name (`str`, *optional*): the name of the model in a GGUF file.
        stage (`str`, *optional*): for `upstream`, the name of the training stage in the file's name.
        card (`Callable`, *optional*): returns the model card, given the report as text.
        overwrite (`bool`, *optional*): replace the model in `output_dir`.
        documents (`list[list[int]]`, *optional*): for GGUF, token ids to measure the perplexity on, before and after.

    Returns:
        [`ExportReport`]: how far the written model is from `model`.

    Raises:
        `ValueError`: if the format cannot hold the model (naming the feature and the formats that can); for an unknown
            format or dtype, a directory that is not empty, or weights that overflow `dtype`.
        `RuntimeError`: if the written model has the dtype of `model` but not its logits, or logits that are not
            finite.
    """
    output_dir = Path(output_dir)
    if format not in EXPORT_FORMATS:
        raise ValueError(f"The format {format!r} is unknown; use one of {', '.join(EXPORT_FORMATS)}.")
    source_dtype = str(model.dtype).removeprefix("torch.")
    dtype = dtype or source_dtype
    known = GGUF_TYPES if format == "gguf" else DTYPES
    if dtype not in known:
        raise ValueError(f"--dtype {dtype} is not possible for {format}; use {', '.join(known)}.")
    check_writable(output_dir, overwrite=overwrite)
    generation = generation or default_generation(model.config)
    target = {"upstream": generation, "gguf": gguf_layout(model.config)}.get(format, format)
    if format == "gguf":
        check_gguf(model.config, tokenizer)
    check_fits(model.config, target)

    if tokenizer is None:
        logger.warning(
            "The weights are exported without a tokenizer. Their ids are meaningless without the tokenizer that they "
            "were trained on. The tokenizers of MiniMind's generations are not interchangeable: of 6,400 ids, 9 mean "
            "the same in v1/v2 and in v3."
        )
    is_per_document = model.config.num_experts and model.config.router_aux_loss_level == "sequence"
    if is_per_document and target not in ("minimind", "v1", "v2"):
        logger.warning(
            f"{describe_layout(target)} computes its router loss over a whole batch, this model over each document. "
            "The logits are the same, but further training there balances the experts differently."
        )
    if format in ("qwen3_moe", "ernie4_5_moe"):
        # NOTE: with output_router_logits=True, transformers' generate() fails on padded prompts.
        logger.warning(
            f"{format} is written with output_router_logits=False, so transformers would train it without router "
            "loss. Set it to True in the config to train the model there, and back to False to generate."
        )
    # Compare in float32 on both sides, so that the difference shows only the rounding of the weights. Work on copies:
    # the caller's model keeps its dtype and its config.
    reference = copy.deepcopy(model).float().eval()
    # The GGUF writer rounds each tensor itself, and leaves norms and routers in float32.
    converted = _cast(copy.deepcopy(model), torch.float32 if format == "gguf" else DTYPES[dtype])
    if tokenizer is not None:
        # Other programs read the special tokens from the config, so copy them from the tokenizer.
        check_tokenizer(tokenizer, vocab_size=model.config.vocab_size, name=tokenizer.name_or_path)
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            setattr(converted.config, name, getattr(tokenizer, name))
            setattr(converted.generation_config, name, getattr(tokenizer, name))
    with written_whole(output_dir, overwrite=overwrite) as aside:
        if format == "gguf":
            path = write_gguf(
                converted, aside, model_name=model_name, tokenizer=tokenizer, tensor_type=GGUF_TYPES[dtype]
            )
            if tokenizer is not None and "<|im_start|>" in (tokenizer.chat_template or ""):
                write_modelfile(aside, tokenizer)
            report = _compare_gguf(reference, path, dtype, documents)
        elif format == "upstream":
            # MiniMind's own scripts read only a pickled state dict, not safetensors.
            torch.save(to_state_dict(converted, generation), aside / upstream_file_name(model.config, stage))
            fields = json.dumps(to_upstream_fields(converted.config, generation), indent=2)
            (aside / "config.json").write_text(fields + "\n", encoding="utf-8")
            report = _compare(reference, load_upstream(aside, dtype=torch.float32), target, dtype)
        else:
            if format == "minimind":
                converted.save_pretrained(aside)
            else:
                to_stock_model(converted, format).save_pretrained(aside)
                _add_older_names(aside / "config.json")
            # Read the files back as a user would, with the Auto class.
            written = AutoModelForCausalLM.from_pretrained(aside, dtype=torch.float32)
            report = _compare(reference, written, target, dtype)
        difference = report.decisive_difference
        # In the model's own dtype no weight was rounded, so only the order of float32 operations may differ.
        if not math.isfinite(difference) or (dtype == source_dtype and difference > 1e-5):
            raise RuntimeError(
                f"{output_dir} was written wrongly: what was read back is not the same model: {report}. Please report "
                "this."
            )
        if tokenizer is not None and format != "gguf":
            save_tokenizer(tokenizer, aside)
        if card is not None:
            (aside / CARD_NAME).write_text(card(str(report)), encoding="utf-8")
    return report


def upstream_file_name(config: MiniMindConfig, stage: str) -> str:
    """Return the name that MiniMind's scripts look for, such as `full_sft_512.pth` or `pretrain_640_moe.pth`."""
    return f"{stage}_{config.hidden_size}{'_moe' if config.num_experts else ''}.pth"


def upstream_stage(source: str | Path) -> str:
    """Return MiniMind's name of the stage, from the file or directory name of `source`; by default `full_sft`."""
    repo_id, file = split_hub_name(str(source))
    name = Path(file or repo_id).name
    match = re.fullmatch(r"(\w+?)_\d+(_moe)?\.pth", name)
    return match[1] if match else UPSTREAM_STAGES.get(name.partition("-")[0], "full_sft")


def _add_older_names(config_file: Path) -> None:
    """
    Add the fields of a stock config.json under the names that transformers 4 reads.

    Without these names, transformers 4 and programs based on it would silently rotate with the architecture's default
    base.
    """
    # transformers 5 has already written the fields under its own names.
    fields = json.loads(config_file.read_text(encoding="utf-8"))
    scaling = dict(fields["rope_parameters"])
    fields["rope_theta"] = scaling.pop("rope_theta")
    if scaling["rope_type"] != "default":
        fields["rope_scaling"] = scaling
    if "num_local_experts" in fields:
        fields["num_experts"] = fields["num_local_experts"]
    config_file.write_text(json.dumps(fields, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _cast(model: MiniMindForCausalLM, dtype: torch.dtype) -> MiniMindForCausalLM:
    """Convert a model to `dtype`; raise `ValueError` if a value overflows."""
    model = model.to(dtype)
    for name, parameter in model.named_parameters():
        if not parameter.isfinite().all():
            raise ValueError(f"{name} holds values that overflow {dtype}; use bfloat16 or float32.")
    return model


@torch.no_grad()
def _compare(reference: PreTrainedModel, written: PreTrainedModel, format: str, dtype: str) -> ExportReport:
    """Compare the logits of two models on the same random ids, in float32."""
    # Random ids need no tokenizer, and use rows of the embedding that text rarely uses.
    generator = torch.Generator().manual_seed(0)
    length = min(ROW_TOKENS, reference.config.max_position_embeddings)
    # Our own generator: the comparison must neither depend on the global seed nor change it.
    input_ids = torch.randint(reference.config.vocab_size, (ROWS, length), generator=generator)
    expected = reference(input_ids).logits
    difference = written.eval()(input_ids).logits - expected
    rows = difference.flatten(1).norm(dim=1) / expected.flatten(1).norm(dim=1)
    relative_difference = (difference.norm() / expected.norm()).item()
    # A NaN in a single row would hide behind a finite second-worst row. With a NaN, use the difference of all logits.
    is_tie_possible = reference.config.num_experts and math.isfinite(relative_difference)
    return ExportReport(
        format,
        dtype,
        max_difference=difference.abs().max().item(),
        relative_difference=relative_difference,
        # The second-worst row: rounding may decide a near tie of two experts in one row.
        decisive_difference=rows.topk(2).values[1].item() if is_tie_possible else relative_difference,
    )


def _compare_gguf(
    reference: MiniMindForCausalLM, path: Path, dtype: str, documents: list[list[int]] | None
) -> ExportReport:
    """
    Compare the logits through transformers' GGUF reader. It cannot read Ernie, so compare the weights there. With
    `documents`, also measure the perplexity of both models.
    """
    layout = gguf_layout(reference.config)
    name = f"GGUF ({layout})"
    check_gguf_fields(path, reference.config)
    if layout == "ernie4_5_moe":
        written, expected = read_ernie_weights(path), reference.state_dict()
        if reference.config.tie_word_embeddings:
            del expected["lm_head.weight"]
        if written.keys() != expected.keys():
            raise RuntimeError(
                f"{path} was written wrongly; these tensors are missing or unexpected: "
                f"{written.keys() ^ expected.keys()}."
            )
        differences = torch.stack([(written[key] - tensor).abs().max() for key, tensor in expected.items()])
        difference = differences.max().item()
        report = ExportReport(name, dtype, max_weight_difference=difference, decisive_difference=difference)
        written_model: PreTrainedModel = copy.deepcopy(reference)
        # A tied head has no weights of its own.
        written_model.load_state_dict(written, strict=False)
    else:
        written_model = _load_gguf(reference, path, layout)
        report = _compare(reference, written_model, name, dtype)
    if documents:
        report.perplexity = perplexity(reference, documents), perplexity(written_model.eval(), documents)
    return report


def _load_gguf(reference: MiniMindForCausalLM, path: Path, layout: str) -> PreTrainedModel:
    """Load a GGUF file with transformers, in float32."""
    # transformers reads the config from the file for llama, but not for the other architectures.
    loading: dict[str, Any] = {}
    if layout != "llama":
        loading["config"] = AutoConfig.for_model(layout, **_write_stock_fields(reference.config, layout))
    return AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32, **loading)


__all__ = [
    "DTYPES",
    "EXPORT_FORMATS",
    "GGUF_TYPES",
    "ExportReport",
    "check_fits",
    "default_generation",
    "export",
    "unsupported_feature",
    "to_state_dict",
    "to_stock_model",
    "to_upstream_fields",
    "upstream_file_name",
    "upstream_stage",
]
