"""
Training on preferences by TRL's trainers, with this package's router loss, saving and pushing:

| `--algorithm` | |
|---|---|
| `dpo` | direct preference optimization, https://arxiv.org/abs/2305.18290, and its `--loss_type`s |
| `kto` | Kahneman-Tversky optimization, https://arxiv.org/abs/2402.01306: each answer by itself, liked or not |
| `orpo` | odds ratio preference optimization, https://arxiv.org/abs/2403.07691, without a reference model |
| `simpo` | simple preference optimization, https://arxiv.org/abs/2405.14734, without a reference model |

DPO and SimPO are means over pairs, and every global batch is a whole one: the pairs that do not fill the last one of an
epoch are left out of it (each epoch draws anew), so that accumulation and world size change nothing. KTO estimates its
KL, and ORPO averages its likelihood, within the batch of a device: there its size matters.
"""

import argparse
import itertools
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from datasets import Dataset
from transformers import PreTrainedModel
from transformers.utils import logging
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer
from trl.experimental.cpo import CPOConfig, CPOTrainer
from trl.experimental.orpo import ORPOConfig, ORPOTrainer

from ..data.padding_rows import PaddedDataset, PaddedSampler
from ..training.arguments import LMTrainingArguments
from ..training.row_source import RowSource
from ..training.run_trainer import RunTrainer
from .trl_support import RouterLossMixin


logger = logging.get_logger(__name__)


@dataclass
class PreferenceTrainingArguments(LMTrainingArguments):
    """What the algorithms share; the rest is TRL's."""

    output_dir: str | None = field(default="out/dpo", metadata={"help": "Where the run goes."})
    algorithm: str = field(default="dpo", metadata={"help": "dpo, kto, orpo or simpo."})
    learning_rate: float = field(default=1e-6, metadata={"help": "Peak learning rate."})
    max_length: int = field(default=512, metadata={"help": "Tokens of prompt and answer; the rest is cut off."})
    gradient_checkpointing: bool = field(default=False, metadata={"help": "Compute activations twice to save memory."})
    eval_on_start: bool = field(default=True, metadata={"help": "Evaluate before the first step."})

    @property
    def needs_reference(self) -> bool:
        """Whether a copy of the model at the start is kept beside it."""
        return self.algorithm in ("dpo", "kto") and not self.precompute_ref_log_probs


@dataclass
class DPOTrainingArguments(PreferenceTrainingArguments, DPOConfig):
    """TRL's `DPOConfig`; what it shares with the other recipes has their defaults. So have the following."""


@dataclass
class KTOTrainingArguments(PreferenceTrainingArguments, KTOConfig):
    train_sampling_strategy: str = field(default="sequential", metadata={"help": "Must be sequential for the KL."})


@dataclass
class ORPOTrainingArguments(PreferenceTrainingArguments, ORPOConfig):
    pass


@dataclass
class SimPOTrainingArguments(PreferenceTrainingArguments, CPOConfig):
    loss_type: str = field(default="simpo", metadata={"help": "simpo, or another one of CPO's."})
    cpo_alpha: float = field(default=0.0, metadata={"help": "Weight of the likelihood of the chosen answer."})


class _WholeBatchesMixin(RunTrainer):
    """
    Leave out the rows that fill no global batch. In evaluation a warning says how many, and a small set gets smaller
    batches. `ValueError` if the rows fill no batch at all.
    """

    def _row_source(self, dataset, description, batch_size, sampler_fn, is_training) -> RowSource:
        num_processes = self.accelerator.num_processes
        if not is_training:
            batch_size = max(1, min(batch_size, len(dataset) // num_processes))
        multiple = batch_size * num_processes
        if is_training:
            multiple *= self.args.gradient_accumulation_steps
        elif len(dataset) % multiple:
            left_out = len(dataset) % multiple
            logger.warning_once(f"{description}: {left_out} of {len(dataset)} rows fill no batch and are left out.")
        if len(dataset) < multiple:
            raise ValueError(
                f"{description}: {len(dataset)} rows do not fill one batch of {multiple} (devices x batch size"
                f"{' x accumulation' if is_training else ''}). Lower the batch size or add data."
            )
        seed = self.args.data_seed if self.args.data_seed is not None else self.args.seed

        def whole_batches(_):
            sampler = sampler_fn(dataset) if sampler_fn is not None else None
            rows = sampler if sampler is not None else range(len(dataset))
            reachable.sampler = WholeBatchSampler(rows, multiple=multiple, seed=seed)
            return reachable.sampler

        # After a resume on several ranks accelerate reaches the dataset only, to tell it the epoch.
        reachable = PaddedDataset(dataset)
        return RowSource(reachable, batch_size, whole_batches)


class WholeBatchSampler(PaddedSampler):
    """The indices of another sampler, as many as fill whole batches."""

    def __len__(self) -> int:
        return self.multiple * math.floor(len(self.sampler) / self.multiple)

    def __iter__(self) -> Iterator[int]:
        yield from itertools.islice(super().__iter__(), len(self))


class MiniMindDPOTrainer(_WholeBatchesMixin, RouterLossMixin, DPOTrainer):
    """TRL's [`~trl.DPOTrainer`] over pairs of [`~data.preferences.prepare_pairs`]."""

    def _prepare_dataset(self, dataset: Dataset, *args: Any) -> Dataset:
        return dataset


class MiniMindKTOTrainer(_WholeBatchesMixin, RouterLossMixin, KTOTrainer):
    """TRL's [`~trl.KTOTrainer`]: of each pair the chosen answer is liked and the other one is not."""

    def _prepare_dataset(self, dataset: Dataset, processing_class: Any, args: KTOConfig, name: str) -> Dataset:
        # The KL needs an order that stays, so they are shuffled here, once.
        # NOTE: `datasets` would take rows from its cache that an older version of these functions made.
        fresh = {"batched": True, "load_from_cache_file": False}
        dataset = dataset.shuffle(seed=args.seed).map(_unpair, remove_columns=dataset.column_names, **fresh)
        if not self.calculate_KL:
            return dataset
        # Answers to other prompts of the batch, from which the KL is estimated.
        return dataset.map(_mismatch, batch_size=args.per_device_train_batch_size, **fresh)


def _unpair(batch: dict[str, list]) -> dict[str, list]:
    """Chosen and rejected answers in turn, of prompts that are apart: neighbours answer different ones."""
    rows: dict[str, list] = {"prompt_ids": [], "completion_ids": [], "label": []}
    num_pairs = len(batch["prompt_ids"])
    for number in range(num_pairs):
        for index, name in ((number, "chosen_ids"), ((number + num_pairs // 2) % num_pairs, "rejected_ids")):
            rows["prompt_ids"].append(batch["prompt_ids"][index])
            rows["completion_ids"].append(batch[name][index])
            rows["label"].append(name == "chosen_ids")
    return rows


def _mismatch(batch: dict[str, list]) -> dict[str, list]:
    return {"KL_completion_ids": batch["completion_ids"][-1:] + batch["completion_ids"][:-1]}


class _ReferenceFreeTrainer(_WholeBatchesMixin, RouterLossMixin):
    """What TRL's ORPO and CPO need; they have other names for the same things."""

    def __init__(self, *args: Any, ref_model: PreTrainedModel | None = None, **kwargs: Any):
        super().__init__(*args, **kwargs)

    @property
    def router_aux_loss_coef(self) -> float:
        return self.aux_loss_coef

    @property
    def _metrics(self) -> dict[str, dict[str, list]]:
        return self._stored_metrics

    def tokenize_row(self, feature: dict[str, Any], model: PreTrainedModel | None = None) -> dict[str, list[int]]:
        """The columns that their collator takes."""
        prompt, columns = feature["prompt_ids"], {"prompt_input_ids": feature["prompt_ids"]}
        columns["prompt_attention_mask"] = [1] * len(prompt)
        for name in ("chosen", "rejected"):
            ids = (prompt + feature[f"{name}_ids"])[: self.max_length]
            columns[f"{name}_input_ids"] = ids
            columns[f"{name}_attention_mask"] = [1] * len(ids)
            columns[f"{name}_labels"] = [-100] * len(prompt) + ids[len(prompt) :]
        return columns


class MiniMindORPOTrainer(_ReferenceFreeTrainer, ORPOTrainer):
    """TRL's `ORPOTrainer`."""


class MiniMindSimPOTrainer(_ReferenceFreeTrainer, CPOTrainer):
    """TRL's `CPOTrainer`, with `--loss_type simpo` unless another one is given."""


ALGORITHMS: dict[str, tuple[type[PreferenceTrainingArguments], type[RouterLossMixin]]] = {
    "dpo": (DPOTrainingArguments, MiniMindDPOTrainer),
    "kto": (KTOTrainingArguments, MiniMindKTOTrainer),
    "orpo": (ORPOTrainingArguments, MiniMindORPOTrainer),
    "simpo": (SimPOTrainingArguments, MiniMindSimPOTrainer),
}


def preference_arguments(argv: list[str] | None = None) -> type[PreferenceTrainingArguments]:
    """
    The arguments of the algorithm that `--algorithm` on the command line names, which have to be known to parse the rest.

    Raises:
        `ValueError`: if there is no such algorithm.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--algorithm", default="dpo")
    algorithm = parser.parse_known_args(sys.argv[1:] if argv is None else argv)[0].algorithm
    if algorithm not in ALGORITHMS:
        raise ValueError(f"--algorithm {algorithm} is unknown; use one of {', '.join(ALGORITHMS)}.")
    return ALGORITHMS[algorithm][0]


__all__ = ["ALGORITHMS", "preference_arguments"]
