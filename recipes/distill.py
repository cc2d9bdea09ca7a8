"""
Distil a teacher into a smaller MiniMind model (https://huggingface.co/papers/1503.02531).

    hf-pretrain distill --teacher_name_or_path out/sft-tiny
    hf-pretrain distill --teacher_name_or_path out/mine --kl reverse --temperature 1 --ce_weight 0
    torchrun --standalone --nproc_per_node 4 recipes/distill.py --preset minimind2-small
    deepspeed --include localhost:0,1 recipes/distill.py --deepspeed ds_configs/zero2.json --teacher_name_or_path out/a

The teacher is any causal language model with the same tokenizer. The student starts from random weights, or from
`--model_name_or_path`. The data are conversations, as in `recipes/sft.py`, or text with `--dataset_kind text`. Without
`--config`, the YAML file of the preset gives the defaults. Flags on the command line override it.
"""

from pathlib import Path

from hf_pretrain import MaskedLossTrainer
from hf_pretrain.loading.adapters import AdapterArguments, add_adapter
from hf_pretrain.loading.model import load_model
from hf_pretrain.loading.model_arguments import ModelArguments
from hf_pretrain.rows.chat_arguments import ChatArguments
from hf_pretrain.rows.preparation import load_rows
from hf_pretrain.runtime.command_line import one_line_errors
from hf_pretrain.stages.distillation import DistillationArguments, TeacherTerm, load_teacher
from hf_pretrain.training.parsing import parse_args
from hf_pretrain.training.run import begin_run, train
from hf_pretrain.training.training_arguments import DistillationTrainingArguments


ARGUMENTS = (ModelArguments, AdapterArguments, DistillationArguments, ChatArguments, DistillationTrainingArguments)


def main(
    model_args: ModelArguments,
    adapter_args: AdapterArguments,
    distillation_args: DistillationArguments,
    data_args: ChatArguments,
    training_args: DistillationTrainingArguments,
):
    teacher = Path(distillation_args.teacher_name_or_path).name
    run = begin_run("distill", training_args, model_args, adapter_args, distillation_args, data_args, detail=teacher)
    # A student with random weights gets the teacher's tokenizer.
    tokenizer = model_args.load_tokenizer(run.checkpoint, other=distillation_args.teacher_name_or_path)
    # Load the teacher before preparing the data, so that a different vocabulary is reported at once.
    teacher = load_teacher(distillation_args.teacher_name_or_path, tokenizer, is_packed=data_args.packing != "none")
    # The default vocabulary may be smaller than the teacher's.
    model_args.vocab_size = teacher.config.vocab_size
    rows = load_rows(data_args, training_args, tokenizer)
    # Without --use_peft, `add_adapter` returns the model unchanged.
    model = add_adapter(load_model(model_args, tokenizer, distributed=training_args.distributed_config), adapter_args)
    term = TeacherTerm(teacher, distillation_args, training_args)
    train(run, rows, model, MaskedLossTrainer, term=term)


if __name__ == "__main__":
    with one_line_errors():
        main(*parse_args(*ARGUMENTS, stage="distill"))
