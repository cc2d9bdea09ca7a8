"""
The model card of a run or of a conversion: metadata for the Hub, and the measured figures.

All content of a card comes from the config, the arguments, the trainer's log and the counts of the data. A card states
each figure once, and leaves out figures that the run did not measure.
"""

import re
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData, SpaceCardData, metadata_load
from huggingface_hub.constants import REPOCARD_NAME
from transformers import PreTrainedModel, TrainerState
from transformers.trainer_pt_utils import get_model_param_count
from yaml import YAMLError

from ..loading.adapters import is_adapted
from ..model.configuration_minimind import MiniMindConfig
from ..run_directory.directory import RunDirectory
from ..run_directory.facts import RunFacts
from ..run_directory.metrics import METRICS, NATS, find_evaluations
from ..runtime.embedded import LICENCES, embedded_in
from ..runtime.modelscope import PREFIX
from ..runtime.names import is_local, public_name
from ..weights.layouts import LAYOUTS
from ..weights.package_models import PACKAGE_MODELS, hub_id


TAGS = ["minimind", "hf_pretrain"]


def _origin(name: str | None, license: str | None) -> dict[str, Any]:
    """
    Return the metadata of a model that was made from the model `name`: the published model that it derives from, as
    the cards and records of the directories between tell, and the given licence, or that of the published model; and
    the embedded corpora and models that it was trained on or begins with.
    """
    seen: set[str] = set()
    embedded: set[str] = set()
    while name is not None and hub_id(name) is None and name not in seen:
        seen.add(name)
        # A checkpoint lies in the directory of its run, and a file beside its card.
        is_part = Path(name).name.startswith("checkpoint-") or Path(name).is_file()
        places = [Path(name), *([Path(name).parent] if is_part else [])]
        for path in (place / REPOCARD_NAME for place in places):
            with suppress(OSError, ValueError, YAMLError):
                if found := metadata_load(path):
                    base = found.get("base_model")
                    # peft writes paths of this machine into its cards.
                    base = hub_id(base) if isinstance(base, str) else base
                    embedded |= embedded_in(re.findall(r"embedded:\w+", str(found.get("embedded"))))
                    return {"license": license or found.get("license"), "base_model": base, "embedded": embedded}
        launches = [launch for place in places for launch in RunDirectory(place).launches if "arguments" in launch]
        for each in launches:
            embedded |= embedded_in(each.get("data", {}).get("names", []), each.get("recipe", ""))
        launch = ([{"arguments": {}}] + launches)[-1]
        base = launch["arguments"].get("model_name_or_path")
        name = str(Path(launch.get("directory", ""), base)) if base and is_local(base) else base
    known = {model.hub_id: LICENCES[f"embedded:{key}"].licence.lower() for key, model in PACKAGE_MODELS.items()}
    embedded |= embedded_in([str(name)])
    return {"license": license or known.get(hub_id(name)), "base_model": hub_id(name), "embedded": embedded}


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
    # The last evaluation measures the model that the card describes.
    *_, metrics = {}, *find_evaluations(state.log_history)
    results = validation_results(metrics, facts)
    figures = [(result.metric_name, f"{result.metric_value:.4f}") for result in results]
    if results and facts.unigram_loss is not None:
        figures.append((f"validation loss of a unigram model ({NATS})", f"{facts.unigram_loss:.4f}"))
    # peft reads the base model from adapter_config.json, so the card names the same one.
    base_model = model.active_peft_config.base_model_name_or_path if is_adapted(model) else facts.base_model
    metadata = {"language": language, **_origin(base_model, license)}
    metadata["embedded"] |= embedded_in(facts.datasets, facts.recipe)
    # `capitalize` would lower the capitals of names.
    method = facts.method[:1].upper() + facts.method[1:]
    start = "" if facts.base_model is None else f", from the weights of `{public_name(facts.base_model)}`,"
    return _render(
        model,
        metadata | {"datasets": facts.hub_datasets or None, "eval_results": results or None},
        repo_id=repo_id,
        format="adapter" if is_adapted(model) else "minimind",
        origin=f"{method}{start} reached step {state.global_step:,} of {state.max_steps:,}.",
        tables=({"Results": figures} if figures else {}) | {"Training": training},
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
        _origin(source, license),
        repo_id=repo_id,
        format="stock" if format in LAYOUTS else format,
        origin=f"Converted from `{public_name(source)}`. {report}.",
        has_tokenizer=has_tokenizer,
    )


def format_page_card(title: str, report: str, *, source: str, license: str | None) -> str:
    """Return the card of a page (`convert --format web`): a static Space, with the headers that threads need."""
    origin = _origin(source, license)
    policies = {"cross-origin-opener-policy": "same-origin", "cross-origin-embedder-policy": "require-corp"}
    models = [origin["base_model"]] if origin["base_model"] else None
    data = SpaceCardData(title=title, sdk="static", license=origin["license"], models=models, custom_headers=policies)
    about = f"{title} runs in the browser of the reader, by llama.cpp for WebAssembly."
    return f"---\n{data.to_yaml()}\n---\n\n{about} Converted from `{public_name(source)}`. {report}.\n"


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
    # A reward model has one label.
    is_reward = model.config.num_labels == 1
    name = repo_id.split("/")[-1]
    # Cards of models that are made from this one read it.
    metadata |= {"embedded": sorted(metadata["embedded"]) or None}
    card_data = ModelCardData(
        library_name={"gguf": "gguf", "adapter": "peft"}.get(format, "transformers"),
        pipeline_tag="text-classification" if is_reward else "text-generation",
        tags=[*TAGS, "lora"] if format == "adapter" else TAGS,
        model_name=name,
        **metadata,
    )
    facts["licences"] = {each: LICENCES[each] for each in metadata["embedded"] or []}
    facts |= {"title": name, "tables": (tables or {}) | {"Architecture": _architecture(model)}}
    if repo_id.startswith(PREFIX):
        # Programs that know the Hub alone read the directory into which the card downloads.
        facts["modelscope_id"], repo_id = repo_id.removeprefix(PREFIX), name
    facts |= {"repo_id": repo_id, "format": format, "is_reward": is_reward, "has_tokenizer": has_tokenizer}
    template = Path(__file__).with_name("model_card.md.jinja")
    return f"{ModelCard.from_template(card_data, template_path=str(template), **facts)}\n"


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


def _architecture(model: PreTrainedModel) -> list[tuple[str, Any]]:
    """Return the sizes of a MiniMind model, without its adapter, as pairs of name and value."""
    config: MiniMindConfig = model.config
    # `get_model_param_count` counts whole parameters, even if ZeRO-3 has sharded them. Only an adapter is trainable,
    # and not the model around it.
    adapter = get_model_param_count(model, trainable_only=True) if is_adapted(model) else 0
    parameters = get_model_param_count(model) - adapter
    sizes = [
        ("parameters", f"{parameters:,}"),
        ("layers", config.num_hidden_layers),
        ("width", config.hidden_size),
        ("query / key-value heads", f"{config.num_attention_heads} / {config.num_key_value_heads}"),
        ("vocabulary", f"{config.vocab_size:,}{', tied' if config.tie_word_embeddings else ', untied output head'}"),
        ("positions", f"{config.max_position_embeddings:,}"),
    ]
    if is_adapted(model):
        settings = model.active_peft_config
        sizes.append(("adapter", f"{adapter:,} parameters, rank {settings.r}, alpha {settings.lora_alpha}"))
    if config.num_experts:
        # An expert has 3 matrices: gate_proj, up_proj and down_proj. A token is not routed to most of them.
        expert = 3 * config.hidden_size * config.moe_intermediate_size
        idle = config.num_hidden_layers * (config.num_experts - config.num_experts_per_tok) * expert
        sizes.append(("parameters active per token", f"{parameters - idle:,}"))
        sizes.append(("experts", f"{config.num_experts}, {config.num_experts_per_tok} per token"))
    return sizes
