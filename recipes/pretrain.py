"""
Pretrain a MiniMind model, from random weights or from the weights of a checkpoint.

    hf-pretrain pretrain --preset tiny
    hf-pretrain pretrain --model_preset minimind2 --dataset_name my/*.jsonl --output_dir out/mine
    torchrun --standalone --nproc_per_node 4 recipes/pretrain.py --config recipes/minimind2-small/pretrain.yaml
    accelerate launch --config_file recipes/accelerate_configs/fsdp2.yaml recipes/pretrain.py
    deepspeed --include localhost:0,1 recipes/pretrain.py --deepspeed ds_configs/zero2.json

The flags of `TrainingArguments` work, except those that docs/launching.md lists; `--help-all` prints all flags.
Without `--config`, the YAML file of the preset gives the defaults. Flags on the command line override it.
"""

from functools import partial

from hf_pretrain import MaskedLossTrainer
from hf_pretrain.data.data_arguments import DataArguments
from hf_pretrain.data.preparation import load_rows
from hf_pretrain.runtime.command_line import one_line_errors
from hf_pretrain.stages.eval_tasks import EvalTaskArguments, task_callbacks
from hf_pretrain.tokenizer.training import load_or_train_tokenizer
from hf_pretrain.training.parsing import parse_args
from hf_pretrain.training.recipe import begin_run, train_on
from hf_pretrain.training.training_arguments import LMTrainingArguments
from hf_pretrain.weights.adapters import AdapterArguments, add_adapter
from hf_pretrain.weights.models import ModelArguments, load_model


ARGUMENTS = (ModelArguments, AdapterArguments, DataArguments, EvalTaskArguments, LMTrainingArguments)


def main(
    model_args: ModelArguments,
    adapter_args: AdapterArguments,
    data_args: DataArguments,
    task_args: EvalTaskArguments,
    training_args: LMTrainingArguments,
):
    # Lock the output directory, seed, and find the checkpoint to resume from, if any.
    checkpoint = begin_run(training_args, model_args, adapter_args, data_args, task_args)

    # The run trains a tokenizer only if no flag names one, and neither a checkpoint nor a model brings one.
    tokenizer_name = model_args.tokenizer_name_or_path or checkpoint or model_args.model_name_or_path
    train_tokenizer = partial(load_or_train_tokenizer, tokenizer_name, vocab_size=model_args.vocab_size)
    tokenizer = model_args.load_tokenizer(checkpoint) if model_args.add_tokens else train_tokenizer
    rows = load_rows(data_args, training_args, tokenizer)
    # Without --use_peft, `add_adapter` returns the model unchanged.
    model = add_adapter(
        load_model(model_args, rows.tokenizer, distributed=training_args.distributed_config), adapter_args
    )
    train_on(
        rows,
        model,
        MaskedLossTrainer,
        stage="pretraining",
        recipe="pretrain",
        checkpoint=checkpoint,
        base_model=model_args.model_name_or_path,
        training_args=training_args,
        callbacks=task_callbacks(task_args, training_args, rows),
    )


if __name__ == "__main__":
    with one_line_errors():
        main(*parse_args(*ARGUMENTS))
