"""
Train a chat model with rewards for its answers: GRPO, its CISPO and DAPO losses, or RLOO.

    hf-pretrain grpo --preset tiny --model_name_or_path out/sft-tiny
    hf-pretrain grpo --model_name_or_path out/sft --dataset_name embedded:arithmetic --rewards arithmetic format
    hf-pretrain grpo --model_name_or_path out/a --dataset_name rlaif.jsonl --trust_remote_code true \\
        --rewards length thought_length closed_thought repetition internlm/internlm2-1_8b-reward
    hf-pretrain grpo --model_name_or_path out/a --dataset_name agent_rl.jsonl --rewards agent --tools my_tools:TOOLS
    torchrun --nproc_per_node 4 recipes/grpo.py --preset minimind3 --model_name_or_path out/sft

`--loss_type cispo` or `dapo` selects the loss, `--algorithm rloo` selects RLOO, `--thinking_ratio 0` puts an empty
`<think>` block before each answer, and `--use_vllm` generates with vLLM. Every flag of TRL's `GRPOConfig` works;
`--help-all` prints all flags.
"""

from hf_pretrain.inference.tools import load_tools
from hf_pretrain.loading.adapters import AdapterArguments, add_adapter
from hf_pretrain.loading.model import load_model
from hf_pretrain.loading.model_arguments import ModelArguments
from hf_pretrain.runtime.command_line import one_line_errors
from hf_pretrain.stages.rewards import load_reward_functions
from hf_pretrain.training.parsing import parse_args
from hf_pretrain.training.run import begin_run, train


# TRL is optional. If it is missing, one line tells the user how to install it.
with one_line_errors():
    from hf_pretrain.stages.reinforcement import ALGORITHMS, GRPOTrainingArguments, TaskArguments, last_answers


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
    # The losses of these algorithms have no unit.
    options = {"detail": training_args.method, "loss_unit": training_args.algorithm.upper()}
    run = begin_run("grpo", training_args, model_args, adapter_args, task_args, **options)
    tokenizer = model_args.load_tokenizer(run.checkpoint)
    model = add_adapter(load_model(model_args, tokenizer, distributed=training_args.distributed_config), adapter_args)
    whole = training_args.max_completion_length or 1
    longest = model.config.max_position_embeddings - whole
    if tools:
        # TRL generates the last turn to its end, before it cuts off what exceeds the whole.
        longest -= min(training_args.max_turn_length or whole, whole)
    limits = {"rewards": rewards, "tools": tools, "max_prompt_length": longest}
    tasks = task_args.prepare_tasks(training_args, tokenizer, **limits)
    trainer_class = ALGORITHMS[training_args.algorithm]
    # Without validation tasks, the report shows the last answers of the training.
    train(run, tasks, model, trainer_class, sample=last_answers, reward_funcs=rewards, tools=tools)


if __name__ == "__main__":
    with one_line_errors():
        main(*parse_args(*ARGUMENTS, stage="grpo"))
