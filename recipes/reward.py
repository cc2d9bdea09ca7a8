"""
Train a reward model on preferences, with TRL's RewardTrainer.

    hf-pretrain reward --preset tiny --model_name_or_path out/sft-tiny
    hf-pretrain reward --model_name_or_path me/chat --dataset_name my/pairs.jsonl --output_dir out/judge
    hf-pretrain grpo --model_name_or_path out/sft-tiny --dataset_name rlaif.jsonl --rewards out/reward-tiny
    torchrun --standalone --nproc_per_node 4 recipes/reward.py --config recipes/minimind3/reward.yaml

The data are those of `recipes/dpo.py`. The result is a sequence classifier with one label, whose score rates a whole
conversation. The flags of `TrainingArguments` and of TRL's `RewardConfig` work, except those that docs/launching.md
lists; `--help-all` prints all flags.
"""

from functools import partial

from hf_pretrain.data.data_arguments import SourceArguments
from hf_pretrain.data.preference_pairs import prepare_pairs
from hf_pretrain.data.preparation import load_rows
from hf_pretrain.runtime.command_line import one_line_errors
from hf_pretrain.training.parsing import parse_args
from hf_pretrain.training.recipe import begin_run, train_on
from hf_pretrain.weights.models import ModelArguments, load_model


# TRL is optional. If it is missing, one line tells the user how to install it.
with one_line_errors():
    from hf_pretrain.stages.reward_training import MiniMindRewardTrainer, RewardTrainingArguments, make_reward_model


ARGUMENTS = (ModelArguments, SourceArguments, RewardTrainingArguments)


def main(model_args: ModelArguments, data_args: SourceArguments, training_args: RewardTrainingArguments):
    checkpoint = begin_run(training_args, model_args, data_args)
    tokenizer = model_args.load_tokenizer(checkpoint)
    pairs = load_rows(data_args, training_args, tokenizer, prepare=partial(prepare_pairs, are_whole=True))
    # A reward model answers no questions.
    pairs.conversations = None
    train_on(
        pairs,
        make_reward_model(load_model(model_args, tokenizer)),
        MiniMindRewardTrainer,
        stage="training of a reward model",
        recipe="reward",
        checkpoint=checkpoint,
        base_model=model_args.model_name_or_path,
        training_args=training_args,
        # The loss of a pair is not comparable with a cross-entropy in nats per token.
        loss_unit="per pair",
    )


if __name__ == "__main__":
    with one_line_errors():
        main(*parse_args(*ARGUMENTS, stage="reward"))
