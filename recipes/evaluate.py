"""
Evaluate a model: loss and bits per byte on a validation set, and tasks of lm-eval.

    hf-pretrain evaluate
    hf-pretrain evaluate --model_name_or_path out/mine --eval_dataset_name my/test.jsonl
    hf-pretrain evaluate --config recipes/tiny/pretrain.yaml --tasks hellaswag,arc_easy --limit 100
    hf-pretrain evaluate --config recipes/tiny/sft.yaml --model_name_or_path out/sft-tiny
    hf-pretrain evaluate --tasks minimind,small --validation_fraction 0
    hf-pretrain evaluate --tasks tool_call --validation_fraction 0
    hf-pretrain evaluate --api_base_url http://127.0.0.1:8000/v1
    hf-pretrain evaluate --max_length 2048 --inference_rope_scaling 512:4
    hf-pretrain evaluate --tasks my_task --include_path my/tasks --validation_fraction 0
    hf-pretrain evaluate --model_name_or_path out/mine --against out/other
    torchrun --standalone --nproc_per_node 2 recipes/evaluate.py --config recipes/tiny/pretrain.yaml

By default, the recipe evaluates the newest run in `out/`: a base model on text, and any other model on conversations,
with the figures of its answers. With the flags or the `--config` of a run, it reproduces the validation metrics that
this run printed at its end. It writes all results to `evaluation.json` in the model's directory. `--against` compares
the model with another one on the same examples.
"""

from hf_pretrain.evaluation.evaluation import (
    EvaluationArguments,
    ValidationArguments,
    begin_results,
    evaluate_served,
    format_results,
    load_validation,
    make_trainer,
    run_tasks,
    write_results,
)
from hf_pretrain.inference.samples import measure_answers
from hf_pretrain.inference.terminal_chat import is_base_model
from hf_pretrain.loading.model import load_model
from hf_pretrain.loading.model_arguments import ModelArguments
from hf_pretrain.runtime.command_line import announce, one_line_errors
from hf_pretrain.runtime.named import load_named
from hf_pretrain.runtime.ranks import leave_process_group
from hf_pretrain.training.evaluation_arguments import EvalQuestionArguments
from hf_pretrain.training.parsing import parse_args


ARGUMENTS = (ModelArguments, ValidationArguments, EvalQuestionArguments, EvaluationArguments)


def main(
    model_args: ModelArguments,
    data_args: ValidationArguments,
    question_args: EvalQuestionArguments,
    training_args: EvaluationArguments,
):
    if training_args.api_base_url:
        print(evaluate_served(training_args))
        return
    name = model_args.model_name_or_path = training_args.find_model(model_args.model_name_or_path)
    is_main = training_args.process_index == 0
    tokenizer = model_args.load_tokenizer()
    model = load_model(model_args, tokenizer, distributed=training_args.distributed_config)
    is_base = is_base_model(name, model, tokenizer)
    data_args.dataset_kind = data_args.dataset_kind or ("text" if is_base else "auto")
    rows = load_validation(data_args, training_args, tokenizer)

    announce("evaluating")
    trainer = make_trainer(model, training_args, rows, tokenizer)
    metrics = trainer.evaluate() if rows.eval is not None else {}
    if rows.conversations is not None:
        metrics |= measure_answers(trainer.model, tokenizer, rows.conversations)
    for questions in question_args.callbacks(tokenizer, data_args.enable_thinking):
        metrics |= questions.ask(trainer.model)
    results = begin_results(metrics, rows, max_length=data_args.max_length, limit=training_args.limit)
    results["inference_rope_scaling"] = model_args.inference_rope_scaling
    if training_args.tasks:
        asked = training_args.apply_chat_template
        results["apply_chat_template"] = is_chat = not is_base if asked is None else asked
        results["tasks"] = run_tasks(training_args, trainer.model.eval(), tokenizer, is_chat=is_chat)
    examples = {task: result.pop("examples", []) for task, result in results["tasks"].items()}
    # All ranks hold the same figures; one writes them.
    if is_main:
        path = write_results(results, training_args.output_dir)
        print(f"\nModel     {name}\nData      {results['data']}\nResults   {path}\n\n{format_results(results)}")
    if training_args.against:
        compare_models = load_named("hf_pretrain.evaluation.against:compare_models")
        comparison = compare_models(trainer, rows, examples, model_args, data_args, training_args, question_args)
        if is_main:
            print(f"\n{comparison}")
    leave_process_group()


if __name__ == "__main__":
    with one_line_errors():
        main(*parse_args(*ARGUMENTS, stage="evaluate"))
