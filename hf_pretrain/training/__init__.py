"""
Training: how a run is configured, trained, saved, resumed and reported.

`arguments` and `parsing` hold the flags. `trainer` has `MaskedLossTrainer`, whose loss means the same at any batch
size and world size; `run_trainer` has its base, which adds checkpoints, signals and pushes to transformers' `Trainer`
and connects plain parts: `meter`, `nonfinite`, `row_source`, `data_position`, `run_description`, `deepspeed_support`
and `optimizers`. `running` holds the steps that all recipes share; `resuming`, `resume_from_hub`, `run_log`,
`run_record`, `callbacks` and `reporting` serve them. `efficiency` counts FLOPs and memory.

In a notebook, plain arguments are enough, without a command line:

    from hf_pretrain.training import LMTrainingArguments, MaskedLossTrainer

    trainer = MaskedLossTrainer(model, LMTrainingArguments(output_dir="out/notebook"), train_dataset=rows)
    trainer.train()

Names are imported on first use, so that a module that needs the arguments alone does not wait for the trainer.
"""

from importlib import import_module


_LAZY = {
    "LMTrainingArguments": ".arguments",
    "MaskedLossTrainer": ".trainer",
    "Muon": ".optimizers",
    "RunTrainer": ".run_trainer",
    "SFTTrainingArguments": ".arguments",
    "parse_args": ".parsing",
}


def __getattr__(name: str):
    if name in _LAZY:
        return getattr(import_module(_LAZY[name], __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [*_LAZY]
