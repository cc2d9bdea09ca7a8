"""
Fine-tune a MiniMind model on conversations, with the loss on the assistant's messages.

    hf-pretrain sft --model_name_or_path out/pretrain-tiny
    hf-pretrain sft --model_name_or_path me/mine --dataset_name my/chats.jsonl embedded --output_dir out/chat
    hf-pretrain sft --model_name_or_path out/pretrain-tiny --preview 3
    hf-pretrain sft --model_name_or_path out/sft-tiny --use_peft --dataset_name my/chats.jsonl --output_dir out/a
    torchrun --standalone --nproc_per_node 4 recipes/sft.py --config recipes/minimind3/sft.yaml
    deepspeed --include localhost:0,1 recipes/sft.py --config recipes/tiny/sft.yaml --deepspeed ds_configs/zero2.json

The fields of a record determine its format: `conversations` (MiniMind, ShareGPT), `messages`, `prompt` with
`completion`, or `instruction` with `output`. The flags of `TrainingArguments` work, except those that
docs/launching.md lists; `--help-all` prints all flags.
"""

from hf_pretrain import MaskedLossTrainer
from hf_pretrain.data.chat_arguments import ChatArguments
from hf_pretrain.data.preparation import load_rows
from hf_pretrain.runtime.command_line import one_line_errors
from hf_pretrain.stages.eval_tasks import EvalTaskArguments, task_callbacks
from hf_pretrain.training.end_report import format_preview
from hf_pretrain.training.parsing import parse_args
from hf_pretrain.training.recipe import begin_run, train_on
from hf_pretrain.training.training_arguments import SFTTrainingArguments
from hf_pretrain.weights.adapters import AdapterArguments, add_adapter
from hf_pretrain.weights.models import ModelArguments, load_model


ARGUMENTS = (ModelArguments, AdapterArguments, ChatArguments, EvalTaskArguments, SFTTrainingArguments)


def main(
    model_args: ModelArguments,
    adapter_args: AdapterArguments,
    data_args: ChatArguments,
    task_args: EvalTaskArguments,
    training_args: SFTTrainingArguments,
):
    # A preview trains nothing, so it must not touch the output directory.
    checkpoint = (
        None if data_args.preview else begin_run(training_args, model_args, adapter_args, data_args, task_args)
    )
    tokenizer = model_args.load_tokenizer(checkpoint)
    rows = load_rows(data_args, training_args, tokenizer, keep_rejected=not data_args.preview)
    if data_args.preview:
        print(format_preview(rows.train, tokenizer, num_rows=data_args.preview))
        return
    # Without --use_peft, `add_adapter` returns the model unchanged.
    model = add_adapter(load_model(model_args, tokenizer, distributed=training_args.distributed_config), adapter_args)
    train_on(
        rows,
        model,
        MaskedLossTrainer,
        stage="fine-tuning on conversations",
        recipe="sft",
        checkpoint=checkpoint,
        base_model=model_args.model_name_or_path,
        training_args=training_args,
        callbacks=task_callbacks(task_args, training_args, rows),
    )


if __name__ == "__main__":
    with one_line_errors():
        main(*parse_args(*ARGUMENTS, stage="sft"))
