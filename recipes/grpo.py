"""
Train a chat model with rewards for its answers: GRPO, its CISPO and DAPO losses, or RLOO.

    hf-pretrain grpo --preset tiny --model_name_or_path out/sft-tiny
    hf-pretrain grpo --model_name_or_path out/sft --dataset_name embedded:arithmetic --rewards arithmetic format
    hf-pretrain grpo --model_name_or_path out/a --dataset_name rlaif.jsonl --trust_remote_code true \\
        --rewards length thought_length closed_thought repetition internlm/internlm2-1_8b-reward
    hf-pretrain grpo --model_name_or_path out/a --dataset_name agent_rl.jsonl --rewards agent --tools my_tools:TOOLS
    torchrun --nproc_per_node 4 recipes/grpo.py --config recipes/minimind3/grpo.yaml --model_name_or_path out/sft

`--loss_type cispo` or `dapo` selects the loss, `--algorithm rloo` selects RLOO, `--thinking_ratio 0` puts an empty
`<think>` block before each answer, and `--use_vllm` generates with vLLM. Every flag of TRL's `GRPOConfig` works;
`--help-all` prints all flags.
"""

from hf_pretrain.runtime.command_line import one_line_errors
from hf_pretrain.stages.rewards import load_reward_functions
from hf_pretrain.stages.tools import load_tools
from hf_pretrain.training.parsing import parse_args
from hf_pretrain.training.recipe import begin_run, train_on
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
    rewards = load_reward_functions(task_args.rewards, trust_remote_code=training_args.trust_remote_code)
    tools = load_tools(task_args.tools)
    # Begin the run only now: a misspelt reward or tool must not leave traces in the output directory.
    checkpoint = begin_run(training_args, model_args, adapter_args, task_args)
    tokenizer = model_args.load_tokenizer(checkpoint)
    model = add_adapter(load_model(model_args, tokenizer, distributed=training_args.distributed_config), adapter_args)
    check = task_check(
        rewards,
        tokenizer,
        max_prompt_length=model.config.max_position_embeddings - (training_args.max_completion_length or 1),
        tools=tools,
        chat_template_kwargs=training_args.chat_template_kwargs,
    )
    tasks = task_args.load_tasks(training_args, tokenizer, check=check)
    train_on(
        tasks,
        model,
        ALGORITHMS[training_args.algorithm],
        stage=f"reinforcement ({training_args.method})",
        recipe="grpo",
        checkpoint=checkpoint,
        base_model=model_args.model_name_or_path,
        training_args=training_args,
        # The losses of these algorithms have no unit.
        loss_unit=training_args.algorithm.upper(),
        # Without validation tasks, the report shows the last answers of the training.
        sample=ALGORITHMS[training_args.algorithm].last_answers,
        reward_funcs=rewards,
        tools=tools,
    )


if __name__ == "__main__":
    with one_line_errors():
        main(*parse_args(*ARGUMENTS, stage="grpo"))
