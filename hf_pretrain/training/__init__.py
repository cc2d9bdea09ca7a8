"""
Training: how a run is configured, trained, saved, resumed and reported.

`arguments` and `parsing` define and parse the flags. `trainer` holds `MaskedLossTrainer`, whose loss has the same
meaning at any batch size and world size. Its base classes, in `run_trainer` and `saving`, add signals, checkpoints and
pushes to transformers' `Trainer`. They connect plain parts: `meter`, `stopping`, `row_source`, `run_description`,
`deepspeed_support` and `optimizers`. `running` holds the steps that all recipes share; it uses `resuming`,
`run_directory`, `callbacks` and `reporting`. `plan` makes the plan of a dry run. `efficiency` counts FLOPs and knows
peak rates and memory.

A notebook needs no command line, only plain arguments:

    from hf_pretrain.training import LMTrainingArguments, MaskedLossTrainer

    trainer = MaskedLossTrainer(model, LMTrainingArguments(output_dir="out/notebook"), train_dataset=rows)
    trainer.train()

Names are imported on first use: a module that needs only the arguments does not wait for the import of the trainer.
"""

from importlib import import_module


_LAZY = {
    "LMTrainingArguments": ".arguments",
    "MaskedLossTrainer": ".trainer",
    "Muon": ".optimizers",
    "RunTrainer": ".run_trainer",
    "SFTTrainingArguments": ".arguments",
    "DistillationTrainingArguments": ".arguments",
    "parse_args": ".parsing",
}


def __getattr__(name: str):
    if name in _LAZY:
        return getattr(import_module(_LAZY[name], __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [*_LAZY]
