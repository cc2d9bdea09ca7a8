"""
Validation loss of a preset on the embedded corpora, for each combination of optimizer, schedule, steps, batch size,
learning rate and seed.

    python -m benchmarks.learning --rate_factors 0.5 1 2
    python -m benchmarks.learning --model_preset minimind2-small --max_steps 2000 --batch_sizes 64 --max_length 512
    python -m benchmarks.learning --optim_presets muon --leave_out all --candidates all --seeds 0 1 2

Learning rates are given as multiples of the one that pretraining would choose (`default_learning_rate`).

The script prints the final validation loss of each run and appends it to `benchmarks/results/learning-<preset>.json`.
`--leave_out all` also trains without each of the default's ingredients, and `--candidates all` with each of the ideas
that the default does not use, one at a time.
To compare Muon with AdamW at fewer tokens, start a run with fewer `--max_steps`. Do not read the loss from the middle
of a longer run, because its learning rate has not decayed yet.
"""

import argparse
import itertools
import json
import tempfile
import time
from contextlib import ExitStack
from typing import Any
from unittest import mock

import torch

from benchmarks.bench import ROOT, git_commit, machine
from benchmarks.variants import CANDIDATES, INGREDIENTS, OptimizerFollower, Variant
from hf_pretrain import MaskedLossTrainer, MiniMindConfig, MiniMindForCausalLM
from hf_pretrain.data.collators import DataCollatorForPackedRows
from hf_pretrain.data.loading import load_documents
from hf_pretrain.data.packing import prepare_rows
from hf_pretrain.model.presets import PRESETS
from hf_pretrain.tokenizer.training import train_tokenizer
from hf_pretrain.training.arguments import LMTrainingArguments
from hf_pretrain.training.optimizers import default_learning_rate
from hf_pretrain.weights.model_arguments import parse_fields


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model_preset", default="tiny", choices=list(PRESETS))
    parser.add_argument("--optim_presets", nargs="+", default=["adamw", "muon"])
    parser.add_argument("--config_overrides", help="Fields of the config, as for the recipes.")
    parser.add_argument("--rate_factors", nargs="+", type=float, default=[1.0])
    parser.add_argument("--lr_scheduler_types", nargs="+", default=["cosine_with_min_lr"])
    parser.add_argument("--max_steps", nargs="+", type=int, default=[550])
    parser.add_argument("--seeds", nargs="+", type=int, default=[42])
    parser.add_argument("--leave_out", nargs="*", default=[], choices=["all", *INGREDIENTS])
    parser.add_argument("--candidates", nargs="*", default=[], choices=["all", *CANDIDATES])
    parser.add_argument("--batch_sizes", nargs="+", type=int, default=[8])
    parser.add_argument("--max_length", type=int, default=256)
    args = parser.parse_args()
    made_by = {"machine": machine(), "commit": git_commit()}

    train, validation = load_documents(["embedded"], validation_fraction=0.01)
    tokenizer = train_tokenizer(train["text"][:])
    rows, eval_rows = (prepare_rows(part, tokenizer, max_length=args.max_length)[0] for part in (train, validation))
    path = ROOT / f"benchmarks/results/learning-{args.model_preset}.json"
    fields = PRESETS[args.model_preset] | parse_fields(args.config_overrides or "", flag="--config_overrides")
    names = ("optim_preset", "lr_scheduler_type", "max_steps", "per_device_train_batch_size", "rate_factor", "seed")
    values = (
        args.optim_presets,
        args.lr_scheduler_types,
        args.max_steps,
        args.batch_sizes,
        args.rate_factors,
        args.seeds,
    )
    left_out = INGREDIENTS if "all" in args.leave_out else args.leave_out
    candidates = CANDIDATES if "all" in args.candidates else args.candidates
    variants: list[tuple[dict[str, str | None], Variant]] = [
        ({"left_out": None}, Variant()),
        *(({"left_out": name}, INGREDIENTS[name]) for name in left_out),
        *(({"left_out": None, "candidate": name}, CANDIDATES[name]) for name in candidates),
    ]
    for combination in itertools.product(*values):
        for description, variant in variants:
            settings = dict(zip(names, combination, strict=True)) | variant.settings
            rate = default_learning_rate(settings["optim_preset"], fields["hidden_size"])
            settings["learning_rate"] = settings.pop("rate_factor") * rate
            changed = fields | variant.fields(fields["hidden_size"])
            config = MiniMindConfig(**changed)
            record = run(config, rows, eval_rows, tokenizer, settings, variant)
            record |= {"config_overrides": args.config_overrides, "config": changed, **description}
            record |= {"max_length": args.max_length, **made_by}
            # Write after each run, so that an interrupted search keeps its results.
            records: list[dict[str, Any]] = json.loads(path.read_text()) if path.is_file() else []
            path.write_text(json.dumps([*records, record], indent=1) + "\n", encoding="utf-8")
            print({name: record[name] for name in (*settings, *description, "eval_loss", "seconds")}, flush=True)


def run(
    config: MiniMindConfig, rows, eval_rows, tokenizer, settings: dict[str, Any], variant: Variant
) -> dict[str, Any]:
    """
    Train once, and return the settings with the validation metrics, tokens and seconds.

    Args:
        config ([`MiniMindConfig`]): shape of the model.
        settings (`dict`): training arguments.
        variant ([`Variant`]): changes of the model, of the package and of the optimizer.
    """
    # All settings start from the same random draws.
    torch.manual_seed(settings["seed"])
    model = MiniMindForCausalLM(config)
    variant.prepare_model(model)
    model.set_attn_implementation("packed")
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        for name, value in variant.replacements.items():
            stack.enter_context(mock.patch(name, value))
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
            callbacks=[OptimizerFollower(variant.follow_optimizer)] if variant.follow_optimizer else [],
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
