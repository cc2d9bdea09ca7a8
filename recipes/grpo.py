"""
Train a chat model with verifiable rewards: GRPO, its CISPO and DAPO losses, or RLOO.

    hf-pretrain grpo --preset tiny --model_name_or_path out/sft-tiny
    hf-pretrain grpo --model_name_or_path out/sft --dataset_name embedded:arithmetic --rewards arithmetic format
    hf-pretrain grpo --model_name_or_path out/a --dataset_name agent_rl.jsonl --rewards solution \\
        --tools my_tools:TOOLS
    torchrun --nproc_per_node 4 recipes/grpo.py --config recipes/minimind3/grpo.yaml --model_name_or_path out/sft

`--loss_type cispo` or `dapo` selects the loss, `--algorithm rloo` selects RLOO, `--enable_thinking false` puts an
empty `<think>` block before each answer, and `--use_vllm` generates with vLLM. Every flag of TRL's `GRPOConfig` works;
`--help-all` prints all flags.
"""

from functools import partial
from pathlib import Path

from hf_pretrain.data.reward_tasks import load_tasks
from hf_pretrain.hub.model_card import RunFacts
from hf_pretrain.runtime.command_line import one_line_errors
from hf_pretrain.stages.rewards import load_reward_functions
from hf_pretrain.stages.tools import load_object, load_tools
from hf_pretrain.tokenizer.pretrained import load_tokenizer
from hf_pretrain.training.parsing import parse_args
from hf_pretrain.training.recipe import begin_run, end_run, train_and_evaluate
from hf_pretrain.weights.adapters import AdapterArguments, add_adapter
from hf_pretrain.weights.models import ModelArguments, load_model


# TRL is optional. If it is missing, one line tells the user how to install it.
with one_line_errors():
    from hf_pretrain.stages.reinforcement import ALGORITHMS, GRPOTrainingArguments, TaskArguments, task_check


ARGUMENTS = (ModelArguments, AdapterArguments, TaskArguments, GRPOTrainingArguments)


def main(
    model_args: ModelArguments,
    adapter_args: AdapterArguments,
    task_args: TaskArguments,
    training_args: GRPOTrainingArguments,
):
    rewards = load_reward_functions(task_args.rewards)
    tools = load_tools(task_args.tools)
    environment = load_object(task_args.environment, flag="--environment") if task_args.environment else None
    # Begin the run only now: a misspelt reward or tool must not leave traces in the output directory.
    checkpoint = begin_run(training_args, model_args, adapter_args, task_args)
    is_main = training_args.process_index == 0

    tokenizer = load_tokenizer(model_args.tokenizer_name_or_path or checkpoint or model_args.base_model)
    model = add_adapter(load_model(model_args, tokenizer, distributed=training_args.distributed_config), adapter_args)

    train_tasks, eval_tasks = load_tasks(
        task_args.dataset_name,
        validation_fraction=task_args.validation_fraction,
        seed=training_args.seed,
        # TRL gives the template the tools that the model can call.
        describe_tools=tools is None and environment is None,
        render=partial(tokenizer.apply_chat_template, tokenize=False, **(training_args.chat_template_kwargs or {})),
        max_rejected_ratio=task_args.max_rejected_ratio,
        # Every rank reads the tasks, but only one may write the file of rejected lines.
        rejected_path=Path(training_args.output_dir, "rejected.jsonl") if is_main else None,
        check=task_check(
            rewards,
            tokenizer,
            max_prompt_length=model.config.max_position_embeddings - (training_args.max_completion_length or 1),
            tools=tools,
            chat_template_kwargs=training_args.chat_template_kwargs,
        ),
    )
    if len(eval_tasks) == 0:
        training_args.evaluate_never()

    trainer = ALGORITHMS[training_args.algorithm](
        model,
        args=training_args,
        reward_funcs=rewards,
        train_dataset=train_tasks,
        # An empty dataset is not None, and Trainer would try to evaluate it.
        eval_dataset=eval_tasks if len(eval_tasks) else None,
        processing_class=tokenizer,
        tools=tools,
        environment_factory=environment,
        run_facts=RunFacts(
            stage=f"reinforcement ({training_args.method})",
            recipe="grpo",
            datasets=task_args.dataset_name,
            data_kind="tasks",
            data=[
                f"Training: {len(train_tasks):,} tasks, {training_args.num_generations} completions each",
                f"Validation: {len(eval_tasks):,} tasks",
                f"Rewards: {', '.join(task_args.rewards)}",
            ],
            base_model=model_args.model_name_or_path,
            # The losses of these algorithms have no unit.
            loss_unit=training_args.algorithm.upper(),
        ),
    )
    # Without validation tasks, the report shows the last answers of the training.
    results = train_and_evaluate(trainer, checkpoint=checkpoint, sample=lambda model: trainer.last_answers())
    end_run(trainer, *results)


if __name__ == "__main__":
    with one_line_errors():
        main(*parse_args(*ARGUMENTS, stage="grpo"))
