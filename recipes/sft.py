"""
Fine-tune a MiniMind model on conversations, with the loss on the assistant's messages.

    hf-pretrain sft --model_name_or_path out/pretrain-tiny
    hf-pretrain sft --model_name_or_path me/mine --dataset_name my/chats.jsonl embedded --output_dir out/chat
    hf-pretrain sft --model_name_or_path out/pretrain-tiny --preview 3
    hf-pretrain sft --model_name_or_path out/sft-tiny --use_peft --dataset_name my/chats.jsonl --output_dir out/a
    torchrun --standalone --nproc_per_node 4 recipes/sft.py --preset minimind3
    deepspeed --include localhost:0,1 recipes/sft.py --preset tiny --deepspeed ds_configs/zero2.json

The fields of a record determine its format: `conversations` (MiniMind, ShareGPT), `messages`, `prompt` with
`completion`, or `instruction` with `output`. The flags of `TrainingArguments` work, except those that
docs/launching.md lists; `--help-all` prints all flags.
"""

from hf_pretrain import MaskedLossTrainer
from hf_pretrain.loading.adapters import AdapterArguments, KeepingArguments, add_adapter
from hf_pretrain.loading.model import load_model
from hf_pretrain.loading.model_arguments import ModelArguments
from hf_pretrain.rows.chat_arguments import ChatArguments
from hf_pretrain.rows.preparation import load_rows
from hf_pretrain.runtime.command_line import one_line_errors, print_result
from hf_pretrain.runtime.named import load_named
from hf_pretrain.training.evaluation_arguments import EvalQuestionArguments, EvalTaskArguments
from hf_pretrain.training.parsing import parse_args
from hf_pretrain.training.run import begin_run, train
from hf_pretrain.training.training_arguments import SFTTrainingArguments


ARGUMENTS = (
    *(ModelArguments, AdapterArguments, KeepingArguments),
    *(ChatArguments, EvalTaskArguments, EvalQuestionArguments, SFTTrainingArguments),
)


def main(
    model_args: ModelArguments,
    adapter_args: AdapterArguments,
    keeping_args: KeepingArguments,
    data_args: ChatArguments,
    task_args: EvalTaskArguments,
    question_args: EvalQuestionArguments,
    training_args: SFTTrainingArguments,
):
    others = (model_args, adapter_args, keeping_args, data_args, task_args, question_args)
    run = begin_run("sft", training_args, *others)
    tokenizer = model_args.load_tokenizer(run.checkpoint)
    rows = load_rows(data_args, training_args, tokenizer)
    # Without --use_peft, `add_adapter` returns the model unchanged.
    model = add_adapter(load_model(model_args, tokenizer, distributed=training_args.distributed_config), adapter_args)
    run.callbacks += task_args.callbacks(training_args, rows)
    questions = question_args.callbacks(tokenizer, data_args.enable_thinking)
    run.callbacks += questions
    term = None
    if keeping_args.kl_to_base:
        term = load_named("hf_pretrain.stages.kl_to_base:BaseTerm")(model, keeping_args, training_args)
    train(run, rows, model, MaskedLossTrainer, term=term)
    for each in questions if training_args.process_index == 0 else ():
        print_result(each.format_table())


if __name__ == "__main__":
    with one_line_errors():
        main(*parse_args(*ARGUMENTS, stage="sft"))
