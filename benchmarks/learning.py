"""
Validation loss of a preset on the embedded corpora, for each combination of optimizer, schedule, steps, batch size,
learning rate, AdamW's beta1 and seed.

    python -m benchmarks.learning --rate_factors 0.5 1 2
    python -m benchmarks.learning --model_preset minimind2-small --max_steps 2000 --batch_sizes 64 --max_length 512

Learning rates are given as multiples of the one that pretraining would choose (`default_learning_rate`).
`--validation_percent 2` validates on the second percent of the documents, which no default was chosen by.

The script prints the final validation loss of each run and appends it to `benchmarks/results/learning-<preset>.json`.
To compare Muon with AdamW at fewer tokens, start a run with fewer `--max_steps`. Do not read the loss from the middle
of a longer run, because its learning rate has not decayed yet.
"""

import argparse
import itertools
import json
import tempfile
import time
from typing import Any

import torch

from benchmarks.bench import ROOT, git_commit, machine
from hf_pretrain import MaskedLossTrainer, MiniMindConfig, MiniMindForCausalLM
from hf_pretrain.data.documents import load_documents
from hf_pretrain.loading.model_arguments import parse_fields
from hf_pretrain.model.presets import PRESETS
from hf_pretrain.rows.collators import DataCollatorForPackedRows
from hf_pretrain.rows.packing import prepare_rows
from hf_pretrain.rows.reading import Reading
from hf_pretrain.tokenizer.training import train_tokenizer
from hf_pretrain.training.training_arguments import LMTrainingArguments, default_learning_rate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model_preset", default="tiny", choices=list(PRESETS))
    parser.add_argument("--optim_presets", nargs="+", default=["adamw", "muon"])
    parser.add_argument("--config_overrides", help="Fields of the config, as for the recipes.")
    parser.add_argument("--rate_factors", nargs="+", type=float, default=[1.0])
    parser.add_argument("--lr_scheduler_types", nargs="+", default=["cosine_with_min_lr"])
    parser.add_argument("--adam_beta1s", nargs="+", type=float, default=[LMTrainingArguments.adam_beta1])
    parser.add_argument("--max_steps", nargs="+", type=int, default=[550])
    parser.add_argument("--seeds", nargs="+", type=int, default=[42])
    parser.add_argument("--batch_sizes", nargs="+", type=int, default=[8])
    parser.add_argument("--max_length", type=int, default=256)
    parser.add_argument(
        "--validation_percent", type=int, default=1, help="The percent of the documents to validate on."
    )
    args = parser.parse_args()
    made_by = {"machine": machine(), "commit": git_commit()}

    # A hash sorts the documents, so the validation set of a fraction holds that of a smaller one.
    percent = args.validation_percent
    train, validation = load_documents(["embedded"], Reading(validation_fraction=percent / 100))
    if percent > 1:
        earlier = set(load_documents(["embedded"], Reading(validation_fraction=(percent - 1) / 100))[1]["text"])
        validation = validation.filter(lambda text: text not in earlier, input_columns="text")
    tokenizer = train_tokenizer(train["text"][:])
    rows, eval_rows = (prepare_rows(part, tokenizer, max_length=args.max_length)[0] for part in (train, validation))
    path = ROOT / f"benchmarks/results/learning-{args.model_preset}.json"
    fields = PRESETS[args.model_preset] | parse_fields(args.config_overrides or "", flag="--config_overrides")
    names = (
        "optim_preset",
        "lr_scheduler_type",
        "adam_beta1",
        "max_steps",
        "per_device_train_batch_size",
        "rate_factor",
        "seed",
    )
    values = (
        args.optim_presets,
        args.lr_scheduler_types,
        args.adam_beta1s,
        args.max_steps,
        args.batch_sizes,
        args.rate_factors,
        args.seeds,
    )
    config = MiniMindConfig(**fields)
    for combination in itertools.product(*values):
        settings = dict(zip(names, combination, strict=True))
        rate = default_learning_rate(settings["optim_preset"], fields["hidden_size"])
        settings["learning_rate"] = settings.pop("rate_factor") * rate
        record = run(config, rows, eval_rows, tokenizer, settings)
        record |= {"config_overrides": args.config_overrides, "config": fields, "max_length": args.max_length}
        record["validation_percent"] = percent
        # Write after each run, so that an interrupted search keeps its results.
        records: list[dict[str, Any]] = json.loads(path.read_text()) if path.is_file() else []
        path.write_text(json.dumps([*records, record | made_by], indent=1) + "\n", encoding="utf-8")
        print({name: record[name] for name in (*settings, "eval_loss", "seconds")}, flush=True)


def run(config: MiniMindConfig, rows, eval_rows, tokenizer, settings: dict[str, Any]) -> dict[str, Any]:
    """
    Train once, and return the settings with the validation metrics, tokens and seconds.

    Args:
        config ([`MiniMindConfig`]): shape of the model.
        settings (`dict`): training arguments.
    """
    # All settings start from the same random draws.
    torch.manual_seed(settings["seed"])
    model = MiniMindForCausalLM(config)
    model.set_attn_implementation("packed")
    with tempfile.TemporaryDirectory() as directory:
        trainer = MaskedLossTrainer(
            model=model,
            args=LMTrainingArguments(
                output_dir=directory,
                eval_strategy="no",
                save_strategy="no",
                report_to=[],
                disable_tqdm=True,
                **settings,
            ),
            data_collator=DataCollatorForPackedRows(tokenizer.pad_token_id),
            train_dataset=rows,
            eval_dataset=eval_rows,
            processing_class=tokenizer,
        )
        start = time.perf_counter()
        trainer.train()
        seconds = time.perf_counter() - start
        metrics = trainer.evaluate()
    return settings | {
        "eval_loss": metrics["eval_loss"],
        "eval_bits_per_byte": metrics["eval_bits_per_byte"],
        "num_tokens": trainer.state.num_input_tokens_seen,
        "seconds": seconds,
    }


if __name__ == "__main__":
    main()
