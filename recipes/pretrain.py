"""
Pretrain a MiniMind model, from random weights or from the weights of a checkpoint.

    hf-pretrain pretrain --preset tiny
    hf-pretrain pretrain --preset minimind2 --dataset_name my/*.jsonl --output_dir out/mine
    torchrun --standalone --nproc_per_node 4 recipes/pretrain.py --preset minimind2-small
    accelerate launch --config_file recipes/accelerate_configs/fsdp2.yaml recipes/pretrain.py
    deepspeed --include localhost:0,1 recipes/pretrain.py --deepspeed ds_configs/zero2.json

The flags of `TrainingArguments` work, except those that docs/launching.md lists; `--help-all` prints all flags.
Without `--config`, the YAML file of the preset gives the defaults. Flags on the command line override it.
"""

from functools import partial

from hf_pretrain import MaskedLossTrainer
from hf_pretrain.loading.adapters import AdapterArguments, add_adapter
from hf_pretrain.loading.model import load_model
from hf_pretrain.loading.model_arguments import ModelArguments
from hf_pretrain.rows.data_arguments import DataArguments
from hf_pretrain.rows.preparation import load_rows
from hf_pretrain.runtime.command_line import one_line_errors
from hf_pretrain.tokenizer.training import load_or_train_tokenizer
from hf_pretrain.training.evaluation_arguments import EvalTaskArguments
from hf_pretrain.training.parsing import parse_args
from hf_pretrain.training.run import begin_run, train
from hf_pretrain.training.training_arguments import LMTrainingArguments


ARGUMENTS = (ModelArguments, AdapterArguments, DataArguments, EvalTaskArguments, LMTrainingArguments)


def main(
    model_args: ModelArguments,
    adapter_args: AdapterArguments,
    data_args: DataArguments,
    task_args: EvalTaskArguments,
    training_args: LMTrainingArguments,
):
    # Lock the output directory, find the checkpoint to resume from, if any, and seed.
    run = begin_run("pretrain", training_args, model_args, adapter_args, data_args, task_args)

    # The run trains a tokenizer only if no flag names one, and neither a checkpoint nor a model brings one.
    train_tokenizer = partial(load_or_train_tokenizer, vocab_size=model_args.vocab_size)
    is_named = model_args.tokenizer_name(run.checkpoint) or model_args.add_tokens
    tokenizer = model_args.load_tokenizer(run.checkpoint) if is_named else train_tokenizer
    rows = load_rows(data_args, training_args, tokenizer)
    # Without --use_peft, `add_adapter` returns the model unchanged.
    model = add_adapter(
        load_model(model_args, rows.tokenizer, distributed=training_args.distributed_config), adapter_args
    )
    run.callbacks += task_args.callbacks(training_args, rows)
    train(run, rows, model, MaskedLossTrainer)


if __name__ == "__main__":
    with one_line_errors():
        main(*parse_args(*ARGUMENTS))
