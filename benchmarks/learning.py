"""
Validation loss of a preset on the embedded corpora, for each combination of optimizer, schedule, steps and learning
rate.

    python -m benchmarks.learning --learning_rates 2e-3 4e-3 8e-3 --optim_presets adamw muon
    python -m benchmarks.learning --model_preset minimind2-small --max_steps 2000 --batch_size 64 --max_length 512

The script prints the final validation loss of each run and appends it to `benchmarks/results/learning-<preset>.json`.
To compare Muon with AdamW at fewer tokens, start a run with fewer `--max_steps`. Do not read the loss from the middle
of a longer run, because its learning rate has not decayed yet.
"""

import argparse
import json
import tempfile
import time
from typing import Any

import torch

from benchmarks.bench import ROOT, git_commit, machine
from hf_pretrain import MaskedLossTrainer, MiniMindConfig, MiniMindForCausalLM
from hf_pretrain.data.collators import DataCollatorForPackedRows
from hf_pretrain.data.loading import load_documents
from hf_pretrain.data.packing import prepare_rows
from hf_pretrain.model.presets import PRESETS
from hf_pretrain.tokenizer.training import train_tokenizer
from hf_pretrain.training.arguments import LMTrainingArguments


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model_preset", default="tiny", choices=list(PRESETS))
    parser.add_argument("--optim_presets", nargs="+", default=["adamw", "muon"])
    parser.add_argument("--learning_rates", nargs="+", type=float, default=[2e-3, 4e-3, 8e-3])
    parser.add_argument("--lr_scheduler_types", nargs="+", default=["cosine_with_min_lr"])
    parser.add_argument("--max_steps", nargs="+", type=int, default=[550])
    parser.add_argument("--batch_size", type=int, default=8)
    parser.add_argument("--max_length", type=int, default=256)
    args = parser.parse_args()
    # Ask git first: writing the records changes the work tree, and the commit would become `-dirty`.
    made_by = {"machine": machine(), "commit": git_commit()}

    train, validation = load_documents(["embedded"], validation_fraction=0.01)
    tokenizer = train_tokenizer(train["text"][:])
    rows, eval_rows = (prepare_rows(part, tokenizer, max_length=args.max_length)[0] for part in (train, validation))
    path = ROOT / f"benchmarks/results/learning-{args.model_preset}.json"
    records: list[dict[str, Any]] = json.loads(path.read_text()) if path.is_file() else []
    for optim_preset in args.optim_presets:
        for schedule in args.lr_scheduler_types:
            for max_steps in args.max_steps:
                for learning_rate in args.learning_rates:
                    settings = {
                        "optim_preset": optim_preset,
                        "lr_scheduler_type": schedule,
                        "max_steps": max_steps,
                        "learning_rate": learning_rate,
                        "per_device_train_batch_size": args.batch_size,
                    }
                    record = run(args.model_preset, rows, eval_rows, tokenizer, settings)
                    record |= {"max_length": args.max_length, **made_by}
                    records.append(record)
                    # Write after each run, so that an interrupted search keeps its results.
                    path.write_text(json.dumps(records, indent=1) + "\n", encoding="utf-8")
                    print({name: record[name] for name in (*settings, "eval_loss", "seconds")}, flush=True)


def run(preset: str, rows, eval_rows, tokenizer, settings: dict[str, Any]) -> dict[str, Any]:
    """Train once, and return the settings with the validation metrics, tokens and seconds."""
    # All settings start from the same weights.
    torch.manual_seed(42)
    model = MiniMindForCausalLM(MiniMindConfig(**PRESETS[preset]))
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
