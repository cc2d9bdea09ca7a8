"""
Train a reward model on preferences, with TRL's RewardTrainer.

    hf-pretrain reward --preset tiny --model_name_or_path out/sft-tiny
    hf-pretrain reward --model_name_or_path me/chat --dataset_name my/pairs.jsonl --output_dir out/judge
    hf-pretrain grpo --model_name_or_path out/sft-tiny --dataset_name rlaif.jsonl --rewards out/reward-tiny
    torchrun --standalone --nproc_per_node 4 recipes/reward.py --preset minimind3

The data are those of `recipes/dpo.py`. The result is a sequence classifier with one label, whose score rates a whole
conversation. The flags of `TrainingArguments` and of TRL's `RewardConfig` work, except those that docs/launching.md
lists; `--help-all` prints all flags.
"""

from functools import partial

from hf_pretrain.loading.model import load_model
from hf_pretrain.loading.model_arguments import ModelArguments
from hf_pretrain.rows.data_arguments import PreferenceArguments
from hf_pretrain.rows.preference_pairs import prepare_pairs
from hf_pretrain.rows.preparation import load_rows
from hf_pretrain.runtime.command_line import one_line_errors
from hf_pretrain.training.parsing import parse_args
from hf_pretrain.training.run import begin_run, train


# TRL is optional. If it is missing, one line tells the user how to install it.
with one_line_errors():
    from hf_pretrain.stages.reward_training import MiniMindRewardTrainer, RewardTrainingArguments, make_reward_model


ARGUMENTS = (ModelArguments, PreferenceArguments, RewardTrainingArguments)


def main(model_args: ModelArguments, data_args: PreferenceArguments, training_args: RewardTrainingArguments):
    run = begin_run("reward", training_args, model_args, data_args)
    tokenizer = model_args.load_tokenizer(run.checkpoint)
    pairs = load_rows(data_args, training_args, tokenizer, prepare=partial(prepare_pairs, are_whole=True))
    # A reward model answers no questions.
    pairs.conversations = None
    train(run, pairs, make_reward_model(load_model(model_args, tokenizer)), MiniMindRewardTrainer)


if __name__ == "__main__":
    with one_line_errors():
        main(*parse_args(*ARGUMENTS, stage="reward"))
