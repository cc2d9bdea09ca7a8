"""
Evaluate a model: loss and bits per byte on a validation set, and tasks of lm-eval.

    hf-pretrain evaluate
    hf-pretrain evaluate --model_name_or_path out/mine --eval_dataset_name my/test.jsonl
    hf-pretrain evaluate --config recipes/tiny/pretrain.yaml --tasks hellaswag,arc_easy --limit 100
    hf-pretrain evaluate --config recipes/tiny/sft.yaml --dataset_kind auto --model_name_or_path out/sft-tiny
    hf-pretrain evaluate --tasks minimind,small --validation_fraction 0
    hf-pretrain evaluate --tasks tool_call --validation_fraction 0
    hf-pretrain evaluate --max_length 2048 --loss_by_position --inference_rope_scaling 512:4
    hf-pretrain evaluate --tasks my_task --include_path my/tasks --validation_fraction 0
    torchrun --standalone --nproc_per_node 2 recipes/evaluate.py --config recipes/tiny/pretrain.yaml

By default, the recipe evaluates the newest run in `out/`. With the flags or the `--config` of a pretraining run, it
reproduces the validation metrics that this run printed at its end. It writes all results to `evaluation.json` in the
model's directory.
"""

from transformers.trainer_callback import PrinterCallback

from hf_pretrain import MaskedLossTrainer
from hf_pretrain.data.collators import DataCollatorForPackedRows
from hf_pretrain.runtime.command_line import announce, one_line_errors
from hf_pretrain.runtime.ranks import leave_process_group
from hf_pretrain.stages.evaluation import (
    EvaluationArguments,
    ValidationArguments,
    begin_results,
    format_results,
    load_validation,
    run_tasks,
    write_results,
)
from hf_pretrain.stages.position_losses import measure_positions
from hf_pretrain.stages.terminal_chat import is_base_model
from hf_pretrain.training.callbacks import measure_answers
from hf_pretrain.training.parsing import parse_args
from hf_pretrain.weights.models import ModelArguments, load_model


ARGUMENTS = (ModelArguments, ValidationArguments, EvaluationArguments)


def main(model_args: ModelArguments, data_args: ValidationArguments, training_args: EvaluationArguments):
    name = model_args.model_name_or_path = training_args.settle(model_args.model_name_or_path)
    is_main = training_args.process_index == 0
    tokenizer = model_args.load_tokenizer()
    rows = load_validation(data_args, training_args, tokenizer)

    announce("evaluating")
    trainer = MaskedLossTrainer(
        model=load_model(model_args, tokenizer, distributed=training_args.distributed_config),
        args=training_args,
        data_collator=DataCollatorForPackedRows(tokenizer.pad_token_id),
        eval_dataset=rows.eval,
        processing_class=tokenizer,
    )
    # The report below holds the figures that this callback would print.
    trainer.remove_callback(PrinterCallback)
    metrics = trainer.evaluate() if rows.eval is not None else {}
    if rows.conversations is not None:
        metrics |= measure_answers(trainer.model, tokenizer, rows.conversations)
    results = begin_results(metrics, rows, max_length=data_args.max_length, limit=training_args.limit)
    if training_args.loss_by_position and rows.first_eval is not None:
        results["loss_by_position"] = measure_positions(trainer, rows.first_eval)
    if training_args.tasks:
        if training_args.apply_chat_template is None:
            training_args.apply_chat_template = not is_base_model(name, trainer.model, tokenizer)
        results["apply_chat_template"] = training_args.apply_chat_template
        results["tasks"] = run_tasks(training_args, trainer.model.eval(), tokenizer)
    # All ranks hold the same figures; one writes them.
    if is_main:
        path = write_results(results, training_args.output_dir)
        print(f"\nModel     {name}\nData      {results['data']}\nResults   {path}\n\n{format_results(results)}")
    leave_process_group()


if __name__ == "__main__":
    with one_line_errors():
        main(*parse_args(*ARGUMENTS, stage="evaluate"))
