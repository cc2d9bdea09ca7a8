"""
The model card of a run or of a conversion: metadata for the Hub, and the measured figures.

All content of a card comes from the config, the arguments, the trainer's log and the counts of the data. A card states
each figure once, and leaves out figures that the run did not measure.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData
from transformers import PreTrainedModel, TrainerState
from transformers.trainer_pt_utils import get_model_param_count

from ..data.corpora import LANGUAGES
from ..data.hub_files import parse_hub_file
from ..model.configuration_minimind import MiniMindConfig
from ..runtime.metrics import METRICS, NATS, find_evaluations
from ..runtime.names import MODELSCOPE, DatasetName, is_path, split_hub_name
from ..weights.adapters import is_adapted
from ..weights.exporting import CARD_NAME, unsupported_feature
from ..weights.gguf import FILE_NAME, gguf_layout


CURVE_NAME = "loss_curve.png"
TAGS = ["minimind", "hf_pretrain"]


@dataclass
class RunFacts:
    """
    Facts about a run that only its recipe knows.

    Args:
        stage (`str`): the kind of training, such as `pretraining`.
        recipe (`str`): the file in `recipes/`, without its ending.
        datasets (`list[str]`): the dataset names on the command line.
        data (`list[str]`): sentences with the counts of documents, tokens and rows.
        base_model (`str`, *optional*): the model that the run started from; a Hub id goes into the card's metadata.
        unigram_loss (`float`, *optional*): the loss of a unigram model on the same validation set, in nats per token.
        loss_unit (`str`): the unit of the loss.
        data_kind (`str`): kind of the validation data, such as `text`. A card lists figures of each kind separately.
    """

    stage: str = "training"
    recipe: str = "pretrain"
    datasets: list[str] = field(default_factory=list)
    data: list[str] = field(default_factory=list)
    base_model: str | None = None
    unigram_loss: float | None = None
    loss_unit: str = NATS
    data_kind: str = "text"

    @property
    def public_datasets(self) -> list[str]:
        """The dataset names, without the directories of this machine."""
        return [_public(name) for name in self.datasets]

    @property
    def languages(self) -> list[str] | None:
        """The languages of the embedded corpora. The languages of a user's files are unknown."""
        return LANGUAGES if any(DatasetName.parse(name).is_embedded for name in self.datasets) else None

    @property
    def hub_datasets(self) -> list[str]:
        """The Hub ids among the datasets, for the card's metadata."""
        elsewhere = [name for name in self.datasets if not _is_local(name) and not name.startswith(MODELSCOPE)]
        names = [parse_hub_file(name) or DatasetName.parse(name) for name in elsewhere]
        return [name.repo_id for name in names if not name.is_embedded]


def _is_local(name: str) -> bool:
    """Return whether a dataset or model name is a path or a glob on this machine."""
    return "://" not in name and (is_path(name) or any(mark in name for mark in "*?["))


def _hub_id(name: str | None) -> str | None:
    """Return the Hub id of a model, without the file that its name may contain; `None` for a local path."""
    return split_hub_name(name)[0] if name and not _is_local(name) else None


def _public(name: str) -> str:
    """Return a name that does not show the directories of this machine."""
    return Path(name).name if _is_local(name) else name


def format_run_card(
    model: PreTrainedModel,
    state: TrainerState,
    facts: RunFacts,
    *,
    repo_id: str,
    training: list[tuple[str, str]],
    command: str,
    language: list[str] | None = None,
    license: str | None = None,
    has_curve: bool = False,
) -> str:
    """
    Return the card of a training run, with the figures that it has measured so far.

    Args:
        model ([`~transformers.PreTrainedModel`]): the model, or an adapter around it.
        state ([`~transformers.TrainerState`]): the state whose log holds the evaluations.
        facts (`RunFacts`): the facts that the recipe knows.
        repo_id (`str`): the repository that receives the card.
        training (`list` of pairs of `str`): rows of the table "Training".
        command (`str`): the command that continues the run from this repository.
        language (`list[str]`, *optional*): ISO codes; by default the languages of the embedded corpora, if used.
        license (`str`, *optional*): the licence of the model.
        has_curve (`bool`): whether the loss curve lies beside the card.
    """
    evaluations = find_evaluations(state.log_history)
    # The last evaluation measures the model that the card describes.
    results = validation_results(evaluations[-1] if evaluations else {}, facts)
    rows = [(result.metric_name, f"{result.metric_value:.4f}") for result in results]
    if facts.unigram_loss is not None:
        rows.append((f"validation loss of a unigram model ({NATS})", f"{facts.unigram_loss:.4f}"))
    data_name = ", ".join(facts.public_datasets) or "unnamed"
    adapter = model.active_peft_config if is_adapted(model) else None
    # peft reads the base model from adapter_config.json, so the card names the same one.
    base_name = facts.base_model if adapter is None else adapter.base_model_name_or_path
    start = "" if facts.base_model is None else f", from the weights of `{_public(facts.base_model)}`,"
    metadata = ModelCardData(
        language=language or facts.languages,
        license=license,
        library_name="transformers" if adapter is None else "peft",
        pipeline_tag="text-generation",
        tags=TAGS if adapter is None else [*TAGS, "lora"],
        datasets=facts.hub_datasets or None,
        base_model=_hub_id(base_name),
        model_name=repo_id.split("/")[-1],
        eval_results=results or None,
    )
    progress = f"ended at step {state.global_step:,} of {state.max_steps:,}"
    sections = [
        _front(metadata, repo_id, f"{facts.stage.capitalize()}{start} {progress}."),
        _table(rows) if results else "",
        "" if adapter is None else "## Adapter\n\n" + _table(_adapter_rows(model)),
        "## Architecture\n\n" + _table(architecture_rows(model)),
        "## Data\n\n" + "\n".join(f"- {line}" for line in [f"Datasets: {data_name}", *facts.data]),
        "## Training\n\n" + (f"![Loss over tokens]({CURVE_NAME})\n\n" if has_curve else "")
        + _table(training),
        _usage(repo_id, model.config) if adapter is None else _adapter_usage(repo_id),
        f"## Continue\n\n```bash\n{command}\n```",
    ]  # fmt: skip
    return _join(sections)


def validation_results(metrics: dict[str, float], facts: RunFacts) -> list[EvalResult]:
    """Return the figures of an evaluation on the validation set, as entries of a card's `model-index`."""
    data_name = ", ".join(facts.public_datasets) or "unnamed"
    return [
        EvalResult(
            task_type="text-generation",
            # The Hub requires a type, also for data that are not on the Hub.
            dataset_type=(facts.hub_datasets or ["custom"])[0],
            # The Hub groups entries by type and configuration, and shows one dataset name for each group.
            dataset_config=f"{data_name}, {facts.data_kind}",
            dataset_name=f"{data_name} (validation {facts.data_kind})",
            metric_type=metric.name,
            metric_name=f"{metric.label} ({unit})" if (unit := metric.unit_in(facts.loss_unit)) else metric.label,
            # Six decimals keep the metadata readable, and lie far below the noise of an evaluation.
            metric_value=round(metrics[metric.key], 6),
        )
        for metric in METRICS
        if metric.key in metrics
    ]


def add_results(card: ModelCard, results: list[EvalResult], *, model_name: str) -> None:
    """Add results to the `model-index` of a card. They replace older results of the same metric and data."""
    old_results = card.data.eval_results or []
    # Keep results of other tasks and data, which an earlier evaluation has written.
    kept = [old for old in old_results if not any(new.is_equal_except_value(old) for new in results)]
    # The Hub shows `model-index` only together with a name.
    card.data.model_name = card.data.model_name or model_name
    card.data.eval_results = kept + results


def format_conversion_card(
    model: PreTrainedModel,
    report: str,
    *,
    repo_id: str,
    source: str,
    format: str,
    license: str | None,
    has_tokenizer: bool,
) -> str:
    """
    Return the card of a converted checkpoint: its source, and its difference from the source.

    Args:
        model ([`~transformers.PreTrainedModel`]): the source.
        report (`str`): the comparison of the two, as [`~weights.comparing.ExportReport`] prints it.
        repo_id (`str`): the repository that receives the card.
        source (`str`): the name of the source as the user gave it.
        format (`str`): one of `EXPORT_FORMATS`.
        license (`str`, *optional*): the licence of the model.
        has_tokenizer (`bool`): whether a tokenizer lies beside the weights.
    """
    metadata = ModelCardData(
        license=license,
        library_name="gguf" if format == "gguf" else "transformers",
        pipeline_tag="text-generation",
        tags=TAGS,
        base_model=_hub_id(source),
    )
    sections = [
        _front(metadata, repo_id, f"Converted from `{_public(source)}`."),
        f"## Conversion\n\n{report}.",
        "## Architecture\n\n" + _table(architecture_rows(model)),
        _usage(repo_id, model.config, format=format, has_tokenizer=has_tokenizer),
    ]
    return _join(sections)


def _join(sections: list[str]) -> str:
    """Join the sections that are not empty."""
    return "\n\n".join(section for section in sections if section) + "\n"


def _front(metadata: ModelCardData, repo_id: str, sentence: str) -> str:
    """Return the metadata, the title and the first paragraph of a card."""
    return (
        f"---\n{metadata.to_yaml().strip()}\n---\n\n# {repo_id.split('/')[-1]}\n\nA language model of the "
        f"[MiniMind](https://github.com/jingyaogong/minimind) architecture, made with hf_pretrain. {sentence}"
    )


def _table(rows: Iterable[tuple[str, str]]) -> str:
    """Return pairs of name and value as a Markdown table without a header."""
    # Markdown requires a header row, so write an empty one.
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows)])


def architecture_rows(model: PreTrainedModel) -> list[tuple[str, str]]:
    """Return the sizes of a MiniMind model, without its adapter, as pairs of name and value."""
    config: MiniMindConfig = model.config
    # `get_model_param_count` counts whole parameters, even if ZeRO-3 has sharded them.
    parameters = get_model_param_count(model)
    if is_adapted(model):
        # Only the adapter is trainable, so the rest is the base model.
        parameters -= get_model_param_count(model, trainable_only=True)
    rows = [("parameters", f"{parameters:,}")]
    if config.num_experts:
        # An expert has 3 matrices: gate_proj, up_proj and down_proj.
        expert = 3 * config.hidden_size * config.moe_intermediate_size
        # The parameters of the experts that a token is not routed to.
        idle = config.num_hidden_layers * (config.num_experts - config.num_experts_per_tok) * expert
        rows.append(("parameters active per token", f"{parameters - idle:,}"))
    rows += [
        ("layers", str(config.num_hidden_layers)),
        ("width", str(config.hidden_size)),
        ("query / key-value heads", f"{config.num_attention_heads} / {config.num_key_value_heads}"),
        ("head width", f"{config.head_dim}{', q/k norms' if config.qk_norm else ''}"),
    ]
    if config.num_experts:
        normalised = "normalised" if config.norm_topk_prob else "not normalised"
        rows += [
            ("experts", f"{config.num_experts} of width {config.moe_intermediate_size}"),
            ("experts per token", f"{config.num_experts_per_tok}, {normalised}"),
            ("shared experts", str(config.num_shared_experts)),
            ("router loss coefficient", f"{config.router_aux_loss_coef:g} ({config.router_aux_loss_level} level)"),
        ]
    else:
        rows.append(("feed-forward width", str(config.intermediate_size)))
    rope = config.rope_parameters
    return rows + [
        ("vocabulary", f"{config.vocab_size:,}{', tied' if config.tie_word_embeddings else ', untied output head'}"),
        ("positions", f"{config.max_position_embeddings:,}, rotary base {rope['rope_theta']:g} ({rope['rope_type']})"),
    ]


def _adapter_rows(model: Any) -> list[tuple[str, str]]:
    """Return the settings of a peft adapter as pairs of name and value."""
    config = model.active_peft_config
    rows = [
        ("base model", f"`{_public(config.base_model_name_or_path)}`"),
        ("method", "DoRA" if config.use_dora else "LoRA"),
        ("rank, alpha, dropout", f"{config.r}, {config.lora_alpha}, {config.lora_dropout:g}"),
        ("adapted", ", ".join([*sorted(config.target_modules), *(config.target_parameters or [])])),
        ("parameters of the adapter", f"{get_model_param_count(model, trainable_only=True):,}"),
    ]
    return rows


def _usage(repo_id: str, config: MiniMindConfig, *, format: str = "minimind", has_tokenizer: bool = True) -> str:
    """Return the card's instructions for loading a checkpoint in `format`, and for serving it with its tokenizer."""
    without = "\n\nThis repository holds no tokenizer. Use the one that these weights were trained on."
    if format == "gguf" and not has_tokenizer:
        return f"## Serve\n\nllama.cpp reads `{FILE_NAME}`.{without}"
    if format == "gguf":
        return f"## Serve\n\n```bash\nllama-cli -hf {repo_id}\n```"
    if format == "upstream":
        load = f'from hf_pretrain.weights.loading import load_upstream\n\nmodel = load_upstream("{repo_id}")'
        load = f"```python\n{load}\n```"
        load = f"## Load\n\nMiniMind's own scripts read the `.pth` file, and so does hf_pretrain:\n\n{load}"
        return load if has_tokenizer else load + without
    # NOTE: AutoTokenizer reads the model's config first, and then asks the user whether to run the code beside it.
    trust, class_name = (
        (", trust_remote_code=True", "PreTrainedTokenizerFast") if format == "minimind" else ("", "AutoTokenizer")
    )
    needs = "\n\nIts code travels with the weights and needs transformers 5.23 or newer." if trust else ""
    if not has_tokenizer:
        load = f'model = AutoModelForCausalLM.from_pretrained("{repo_id}"{trust})'
        load = f"from transformers import AutoModelForCausalLM\n\n{load}"
        return f"## Load\n\n```python\n{load}\n```{needs}{without}"
    load = f"""\
## Load

```python
from transformers import AutoModelForCausalLM, {class_name}

tokenizer = {class_name}.from_pretrained("{repo_id}")
model = AutoModelForCausalLM.from_pretrained("{repo_id}"{trust})
```{needs}"""
    if format != "minimind":
        return f"{load}\n\n## Serve\n\n```bash\nvllm serve {repo_id}\n```"
    # vLLM loads the same stock architecture that the GGUF file declares.
    stock = gguf_layout(config)
    if unsupported_feature(config, stock) is not None:
        return load
    return f"""{load}

## Serve

With hf_pretrain, for vLLM and for llama.cpp:

```bash
hf-pretrain convert --from {repo_id} --to out/served --format {stock} && vllm serve out/served
hf-pretrain convert --from {repo_id} --to out/gguf --format gguf && llama-cli -m out/gguf/{FILE_NAME}
```"""


def _adapter_usage(repo_id: str) -> str:
    """Return the card's instructions for loading an adapter and for merging it."""
    return f"""## Load

```python
from peft import AutoPeftModelForCausalLM
from transformers import AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("{repo_id}")
model = AutoPeftModelForCausalLM.from_pretrained("{repo_id}", trust_remote_code=True)
```

## Merge

With hf_pretrain, into a checkpoint that needs no peft:

```bash
hf-pretrain convert --from {repo_id} --to out/merged
```"""


__all__ = [
    "CARD_NAME",
    "CURVE_NAME",
    "RunFacts",
    "add_results",
    "architecture_rows",
    "format_conversion_card",
    "format_run_card",
    "validation_results",
]
