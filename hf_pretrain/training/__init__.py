"""
Training: how a run is configured, trained, saved, resumed and reported.

`training_arguments` and `parsing` define and parse the flags. `masked_loss_trainer` holds `MaskedLossTrainer`, whose
loss has the same meaning at any batch size and world size. Its base class, in `base_trainer`, adds signals,
checkpoints and pushes to transformers' `Trainer`. It connects plain parts: `measurements`, `stopping`, `resume_check`,
`deepspeed_support` and `optimizers`. `run` holds the steps that all recipes share; it uses `resuming`, `callbacks` and
`reporting`. `dry_run` makes the plan of a run.
"""
