"""
The model card of a run or of a conversion: metadata for the Hub, and the measured figures.

All content of a card comes from the config, the arguments, the trainer's log and the counts of the data. A card states
each figure once, and leaves out figures that the run did not measure.
"""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData
from transformers import PreTrainedModel, TrainerState
from transformers.trainer_pt_utils import get_model_param_count

from ..model.configuration_minimind import MiniMindConfig
from ..runtime.metrics import METRICS, NATS, find_evaluations
from ..runtime.names import DatasetName, is_path, split_hub_name
from ..weights.adapters import is_adapted
from ..weights.layouts import LAYOUTS


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
        eval_datasets (`list[str]`): names of the validation data, if they are not a part of `datasets`.
    """

    stage: str = "training"
    recipe: str = "pretrain"
    datasets: list[str] = field(default_factory=list)
    data: list[str] = field(default_factory=list)
    base_model: str | None = None
    unigram_loss: float | None = None
    loss_unit: str = NATS
    data_kind: str = "text"
    eval_datasets: list[str] = field(default_factory=list)

    @property
    def data_name(self) -> str:
        """The names of the datasets, without the directories of this machine."""
        return ", ".join(map(public_name, self.datasets)) or "unnamed"

    @property
    def hub_datasets(self) -> list[str]:
        """The Hub ids among the datasets, for the card's metadata."""
        names = [DatasetName.parse(name) for name in self.datasets if not _is_local(name)]
        return [name.repo_id for name in names if not name.is_embedded]


def _is_local(name: str) -> bool:
    """Return whether a dataset or model name is a path or a glob on this machine."""
    # A split stands in brackets, too.
    repo_id = DatasetName.parse(name).repo_id
    return "://" not in name and (is_path(name) or any(mark in repo_id for mark in "*?["))


def _hub_id(name: str | None) -> str | None:
    """Return the Hub id of a model, without the file that its name may contain; `None` for a local path."""
    return split_hub_name(name)[0] if name and not _is_local(name) else None


def public_name(name: str) -> str:
    """Return a name that does not show the directories of this machine."""
    return Path(name).name if _is_local(name) else name


def format_run_card(
    model: PreTrainedModel,
    state: TrainerState,
    facts: RunFacts,
    *,
    repo_id: str,
    training: list[tuple[str, str]],
    language: list[str] | None = None,
    license: str | None = None,
) -> str:
    """
    Return the card of a training run, with the figures that it has measured so far.

    Args:
        model ([`~transformers.PreTrainedModel`]): the model, or an adapter around it.
        state ([`~transformers.TrainerState`]): the state whose log holds the evaluations.
        facts (`RunFacts`): the facts that the recipe knows.
        repo_id (`str`): the repository that receives the card.
        training (`list` of pairs of `str`): rows of the table "Training".
        language (`list[str]`, *optional*): ISO codes of the data.
        license (`str`, *optional*): the licence of the model.
    """
    evaluations = find_evaluations(state.log_history)
    # The last evaluation measures the model that the card describes.
    results = validation_results(evaluations[-1] if evaluations else {}, facts)
    rows = [(result.metric_name, f"{result.metric_value:.4f}") for result in results]
    if results and facts.unigram_loss is not None:
        rows.append((f"validation loss of a unigram model ({NATS})", f"{facts.unigram_loss:.4f}"))
    tables = {"Results": rows} if rows else {}
    metadata = {"language": language, "datasets": facts.hub_datasets or None}
    base_model = facts.base_model
    if is_adapted(model):
        # peft reads the base model from adapter_config.json, so the card names the same one.
        base_model = model.active_peft_config.base_model_name_or_path
    start = "" if facts.base_model is None else f", from the weights of `{public_name(facts.base_model)}`,"
    return _render(
        model,
        metadata | {"eval_results": results or None, "license": license, "base_model": _hub_id(base_model)},
        repo_id=repo_id,
        format="adapter" if is_adapted(model) else "minimind",
        origin=f"{facts.stage.capitalize()}{start} reached step {state.global_step:,} of {state.max_steps:,}.",
        tables=tables | {"Training": training},
        data=[f"Datasets: {facts.data_name}", *facts.data],
    )


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
    return _render(
        model,
        {"license": license, "base_model": _hub_id(source)},
        repo_id=repo_id,
        format="stock" if format in LAYOUTS else format,
        origin=f"Converted from `{public_name(source)}`. {report}.",
        has_tokenizer=has_tokenizer,
    )


def _render(
    model: PreTrainedModel,
    metadata: dict[str, Any],
    *,
    repo_id: str,
    format: str,
    tables: dict[str, list[tuple[str, Any]]] | None = None,
    has_tokenizer: bool = True,
    **facts: Any,
) -> str:
    """Fill the template. `format` is `minimind`, `adapter`, `stock`, `upstream` or `gguf`."""
    travels = format in ("minimind", "adapter")
    # A reward model has one label.
    is_reward = model.config.num_labels == 1
    library = "peft" if format == "adapter" else "transformers"
    card_data = ModelCardData(
        library_name="gguf" if format == "gguf" else library,
        pipeline_tag="text-classification" if is_reward else "text-generation",
        tags=[*TAGS, "lora"] if format == "adapter" else TAGS,
        model_name=repo_id.split("/")[-1],
        **metadata,
    )
    card = ModelCard.from_template(
        card_data,
        template_path=str(Path(__file__).with_name("model_card.md.jinja")),
        title=repo_id.split("/")[-1],
        repo_id=repo_id,
        format=format,
        tables=(tables or {}) | {"Architecture": _architecture_rows(model)},
        has_tokenizer=has_tokenizer,
        travels=travels,
        library=library,
        model_class=f"Auto{'Peft' if format == 'adapter' else ''}ModelFor"
        f"{'SequenceClassification' if is_reward else 'CausalLM'}",
        # NOTE: AutoTokenizer reads the model's config first, and then asks the user whether to run the code beside it.
        tokenizer_class="PreTrainedTokenizerFast" if format == "minimind" else "AutoTokenizer",
        is_served=format == "minimind" and not is_reward,
        **facts,
    )
    return f"{card}\n"


def validation_results(metrics: dict[str, float], facts: RunFacts) -> list[EvalResult]:
    """Return the figures of an evaluation on the first validation set, as entries of a card's `model-index`."""
    facts = replace(facts, datasets=facts.eval_datasets[:1] or facts.datasets)
    return [
        EvalResult(
            task_type="text-generation",
            # The Hub requires a type, also for data that are not on the Hub.
            dataset_type=(facts.hub_datasets or ["custom"])[0],
            # The Hub groups entries by type and configuration, and shows one dataset name for each group.
            dataset_config=f"{facts.data_name}, {facts.data_kind}",
            dataset_name=f"{facts.data_name} (validation {facts.data_kind})",
            metric_type=metric.name,
            metric_name=f"{metric.label} ({unit})" if (unit := metric.unit_in(facts.loss_unit)) else metric.label,
            # Six decimals keep the metadata readable, and lie far below the noise of an evaluation.
            metric_value=round(metrics[metric.key], 6),
        )
        for metric in METRICS
        if metric.key in metrics
    ]


def _architecture_rows(model: PreTrainedModel) -> list[tuple[str, Any]]:
    """Return the sizes of a MiniMind model, without its adapter, as pairs of name and value."""
    config: MiniMindConfig = model.config
    # `get_model_param_count` counts whole parameters, even if ZeRO-3 has sharded them. Only an adapter is trainable,
    # and not the model around it.
    adapter = get_model_param_count(model, trainable_only=True) if is_adapted(model) else 0
    parameters = get_model_param_count(model) - adapter
    rows = [
        ("parameters", f"{parameters:,}"),
        ("layers", config.num_hidden_layers),
        ("width", config.hidden_size),
        ("query / key-value heads", f"{config.num_attention_heads} / {config.num_key_value_heads}"),
        ("vocabulary", f"{config.vocab_size:,}{', tied' if config.tie_word_embeddings else ', untied output head'}"),
        ("positions", f"{config.max_position_embeddings:,}"),
    ]
    if is_adapted(model):
        settings = model.active_peft_config
        rows.append(("adapter", f"{adapter:,} parameters, rank {settings.r}, alpha {settings.lora_alpha}"))
    if not config.num_experts:
        return rows
    # An expert has 3 matrices: gate_proj, up_proj and down_proj. A token is not routed to most of them.
    expert = 3 * config.hidden_size * config.moe_intermediate_size
    idle = config.num_hidden_layers * (config.num_experts - config.num_experts_per_tok) * expert
    return [
        *rows,
        ("parameters active per token", f"{parameters - idle:,}"),
        ("experts", f"{config.num_experts}, {config.num_experts_per_tok} per token"),
    ]
