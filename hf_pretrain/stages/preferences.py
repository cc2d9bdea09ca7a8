"""
Preference training with TRL's trainers, and with this package's router loss, saving and pushing.

| `--algorithm` | |
|---|---|
| `dpo` | direct preference optimization, https://arxiv.org/abs/2305.18290, and its `--loss_type`s |
| `kto` | Kahneman-Tversky optimization, https://arxiv.org/abs/2402.01306: single answers, liked or disliked |
| `orpo` | odds ratio preference optimization, https://arxiv.org/abs/2403.07691, without a reference model |
| `simpo` | simple preference optimization, https://arxiv.org/abs/2405.14734, without a reference model |

DPO and SimPO average over pairs. Every global batch is complete: the last pairs of an epoch that do not fill a batch
are left out (different pairs in each epoch). So accumulation and world size change nothing. Within the batch of one
device, KTO estimates its KL and ORPO averages its likelihood, so for these two the batch size matters.
"""

import argparse
import sys
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from datasets import Dataset
from transformers import PreTrainedModel
from transformers.utils import logging

from ..data.padding_rows import EpochSampler, PaddedDataset
from ..runtime.errors import MissingExtraError, UserError
from ..runtime.installation import install_command
from ..runtime.names import check_word
from ..training.arguments import LMTrainingArguments
from ..training.row_source import RowSource
from ..training.run_trainer import RunTrainer
from .trl_support import RouterLossMixin


try:
    from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer
    from trl.experimental.cpo import CPOConfig, CPOTrainer
    from trl.experimental.orpo import ORPOConfig, ORPOTrainer
except ImportError as error:
    raise MissingExtraError(f"Preference training needs TRL: {install_command('trl')}") from error

logger = logging.get_logger(__name__)


@dataclass
class PreferenceTrainingArguments(LMTrainingArguments):
    """Arguments that all algorithms share. TRL's configs add the others."""

    help_title: ClassVar[str] = "Preference algorithm"
    default_optim_preset = "adamw"
    output_dir: str | None = field(default="out/dpo", metadata={"help": "Directory of the run."})
    algorithm: str = field(
        default="dpo", metadata={"help": "dpo, kto, orpo or simpo.", "choices": ("dpo", "kto", "orpo", "simpo")}
    )
    learning_rate: float = field(default=1e-6, metadata={"help": "Peak learning rate."})
    max_length: int = field(default=512, metadata={"help": "Tokens of prompt and answer; longer ones are truncated."})
    gradient_checkpointing: bool = field(
        default=False, metadata={"help": "Recompute activations in the backward pass to save memory."}
    )
    eval_on_start: bool = field(default=True, metadata={"help": "Evaluate before the first step."})

    @property
    def has_reference(self) -> bool:
        return self.algorithm in ("dpo", "kto")

    @property
    def needs_reference(self) -> bool:
        """True if training needs a frozen copy of the initial model."""
        return self.has_reference and not self.precompute_ref_log_probs

    @property
    def loss_depends_on_micro_batch(self) -> bool:
        return self.algorithm in ("kto", "orpo")


@dataclass
class DPOTrainingArguments(PreferenceTrainingArguments, DPOConfig):
    """
    TRL's `DPOConfig`. Here and in the classes below, flags that other recipes also have keep this package's defaults.
    """


@dataclass
class KTOTrainingArguments(PreferenceTrainingArguments, KTOConfig):
    """TRL's `KTOConfig`."""

    train_sampling_strategy: str = field(
        default="sequential", metadata={"help": "Must be sequential: the KL estimate needs a fixed order."}
    )

    def __post_init__(self):
        super().__post_init__()
        if self.per_device_train_batch_size < 2 and self.loss_type != "apo_zero_unpaired":
            raise UserError(
                f"--per_device_train_batch_size {self.per_device_train_batch_size} must be at least 2: KTO estimates "
                "its KL from the other answers in the batch of a device."
            )


@dataclass
class ORPOTrainingArguments(PreferenceTrainingArguments, ORPOConfig):
    """TRL's `ORPOConfig`."""

    pass


@dataclass
class SimPOTrainingArguments(PreferenceTrainingArguments, CPOConfig):
    """TRL's `CPOConfig` with SimPO's loss."""

    loss_type: str = field(default="simpo", metadata={"help": "simpo, or another one of CPO's."})
    cpo_alpha: float = field(default=0.0, metadata={"help": "Weight of the chosen answer's likelihood."})


class _WholeBatchesMixin(RunTrainer):
    """
    Leave out the last rows of an epoch, or of an evaluation, that do not fill a global batch.

    An evaluation warns about the rows that it leaves out, and uses smaller batches for a small validation set. Raise
    `ValueError` if the rows do not fill a single batch.
    """

    def _row_source(self, dataset, description, batch_size, sampler_fn, is_training) -> RowSource:
        """Return a source of rows whose sampler leaves out rows that do not fill a global batch."""
        num_processes = self.accelerator.num_processes
        if not is_training:
            # A small validation set would otherwise fill no batch and give no figures.
            batch_size = max(1, min(batch_size, len(dataset) // num_processes))
        multiple = batch_size * num_processes
        if is_training:
            multiple *= self.args.gradient_accumulation_steps
        elif len(dataset) % multiple:
            left_out = len(dataset) % multiple
            logger.warning_once(
                f"{description}: {left_out} of {len(dataset)} rows do not fill a batch. The run leaves them out."
            )
        # Padding rows are not possible here: unlike the loss of pretraining, a preference loss has no row weights.
        if len(dataset) < multiple:
            raise UserError(
                f"{description}: {len(dataset)} rows do not fill one batch of {multiple} (devices x batch size"
                f"{' x accumulation' if is_training else ''}). Lower the batch size or add data."
            )
        # The seed decides which rows are left out: different ones in each epoch, but the same ones on every rank.
        seed = self.args.data_seed if self.args.data_seed is not None else self.args.seed

        def whole_batches(_):
            sampler = sampler_fn(dataset) if sampler_fn is not None else None
            rows = sampler if sampler is not None else range(len(dataset))
            # Trainer calls this function later, when `reachable` below exists.
            reachable.sampler = EpochSampler(rows, seed=seed, multiple=multiple, pads=False)
            return reachable.sampler

        # NOTE: after a resume on several ranks, accelerate calls `set_epoch` only on the dataset, not on the sampler.
        reachable = PaddedDataset(dataset)
        return RowSource(reachable, batch_size, whole_batches)


class MiniMindDPOTrainer(_WholeBatchesMixin, RouterLossMixin, DPOTrainer):
    """TRL's [`~trl.DPOTrainer`] for pairs of [`~data.preferences.prepare_pairs`]."""

    def _prepare_dataset(self, dataset: Dataset, *args: Any) -> Dataset:
        """Return the dataset unchanged: its rows are tokenized already."""
        return dataset


class MiniMindKTOTrainer(_WholeBatchesMixin, RouterLossMixin, KTOTrainer):
    """TRL's [`~trl.KTOTrainer`]. The chosen answer of a pair counts as liked, the other one as disliked."""

    def _prepare_dataset(self, dataset: Dataset, processing_class: Any, args: KTOConfig, name: str) -> Dataset:
        """Turn pairs into single answers, and add the mismatched answers from which TRL estimates the KL."""
        # The KL needs a fixed order, so shuffle the rows once, here. NOTE: do not read the cache of `datasets`, which
        # may hold rows of an older version of these functions.
        fresh = {"batched": True, "load_from_cache_file": False}
        dataset = dataset.shuffle(seed=args.seed).map(_unpair, remove_columns=dataset.column_names, **fresh)
        if not self.calculate_KL:
            return dataset
        # Answers to other prompts of the same batch, from which TRL estimates the KL.
        return dataset.map(_mismatch, batch_size=args.per_device_train_batch_size, **fresh)


def _unpair(batch: dict[str, list]) -> dict[str, list]:
    """
    Return chosen and rejected answers alternately. Neighbours answer different prompts, as `_mismatch` requires.
    """
    rows: dict[str, list] = {"prompt_ids": [], "completion_ids": [], "label": []}
    num_pairs = len(batch["prompt_ids"])
    for number in range(num_pairs):
        # Take the rejected answer from the pair half a batch further on, which has a different prompt.
        for index, name in ((number, "chosen_ids"), ((number + num_pairs // 2) % num_pairs, "rejected_ids")):
            rows["prompt_ids"].append(batch["prompt_ids"][index])
            rows["completion_ids"].append(batch[name][index])
            rows["label"].append(name == "chosen_ids")
    return rows


def _mismatch(batch: dict[str, list]) -> dict[str, list]:
    """Give each prompt the answer of its neighbour in the batch."""
    return {"KL_completion_ids": batch["completion_ids"][-1:] + batch["completion_ids"][:-1]}


class _ReferenceFreeTrainer(_WholeBatchesMixin, RouterLossMixin):
    """Adapter for TRL's ORPO and CPO trainers, which have other names for some attributes."""

    def __init__(self, *args: Any, ref_model: PreTrainedModel | None = None, **kwargs: Any):
        # The recipe passes a reference model to every trainer; these algorithms need none, so it is None here.
        super().__init__(*args, **kwargs)

    @property
    def router_aux_loss_coef(self) -> float:
        """`aux_loss_coef` under the name that [`RouterLossMixin`] reads."""
        return self.aux_loss_coef

    @property
    def _metrics(self) -> dict[str, dict[str, list]]:
        """`_stored_metrics` under the name that [`RouterLossMixin`] writes to."""
        return self._stored_metrics

    def _track_num_input_tokens(self, inputs: dict[str, Any]) -> None:
        """Count the tokens of both answers. Trainer looks for `input_ids`."""
        parts = ("input_ids", "attention_mask")
        answers = ("chosen", "rejected")
        super()._track_num_input_tokens(
            {part: torch.cat([inputs[f"{answer}_{part}"].flatten() for answer in answers]) for part in parts}
        )

    def tokenize_row(self, feature: dict[str, Any], model: PreTrainedModel | None = None) -> dict[str, list[int]]:
        """Return the columns that TRL's collator reads."""
        prompt, columns = feature["prompt_ids"], {"prompt_input_ids": feature["prompt_ids"]}
        columns["prompt_attention_mask"] = [1] * len(prompt)
        for name in ("chosen", "rejected"):
            ids = (prompt + feature[f"{name}_ids"])[: self.max_length]
            columns[f"{name}_input_ids"] = ids
            columns[f"{name}_attention_mask"] = [1] * len(ids)
            # The loss covers the answer, not the prompt.
            columns[f"{name}_labels"] = [-100] * len(prompt) + ids[len(prompt) :]
        return columns


class MiniMindORPOTrainer(_ReferenceFreeTrainer, ORPOTrainer):
    """TRL's `ORPOTrainer`."""


class MiniMindSimPOTrainer(_ReferenceFreeTrainer, CPOTrainer):
    """TRL's `CPOTrainer`, by default with `--loss_type simpo`."""


ALGORITHMS: dict[str, tuple[type[PreferenceTrainingArguments], type[RouterLossMixin]]] = {
    "dpo": (DPOTrainingArguments, MiniMindDPOTrainer),
    "kto": (KTOTrainingArguments, MiniMindKTOTrainer),
    "orpo": (ORPOTrainingArguments, MiniMindORPOTrainer),
    "simpo": (SimPOTrainingArguments, MiniMindSimPOTrainer),
}


def preference_arguments(argv: list[str] | None = None) -> type[PreferenceTrainingArguments]:
    """
    Return the arguments class of the algorithm that `--algorithm` names.

    The parser needs the class before it can parse the other flags, so this function reads one flag by itself.

    Raises:
        `ValueError`: for an unknown algorithm.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--algorithm", default="dpo")
    algorithm = parser.parse_known_args(sys.argv[1:] if argv is None else argv)[0].algorithm
    check_word("--algorithm", algorithm, ALGORITHMS)
    return ALGORITHMS[algorithm][0]


__all__ = ["ALGORITHMS", "preference_arguments"]
