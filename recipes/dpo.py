"""
Train a MiniMind model on preferences, with TRL's DPO and its losses.

    hf-pretrain dpo --model_name_or_path out/sft-tiny
    hf-pretrain dpo --model_name_or_path me/chat --dataset_name my/pairs.jsonl --beta 0.15 --output_dir out/mine
    hf-pretrain dpo --model_name_or_path out/sft-tiny --loss_type ipo --output_dir out/ipo-tiny
    torchrun --standalone --nproc_per_node 4 recipes/dpo.py --preset minimind3
    deepspeed --include localhost:0,1 recipes/dpo.py --preset tiny --deepspeed ds_configs/zero2.json

A record has the fields `chosen` and `rejected`, each a text or a list of messages. The prompt is in the field
`prompt`, or at the beginning of both fields. The flags of `TrainingArguments` and of TRL's `DPOConfig` work, except
those that docs/launching.md lists; `--help-all` prints all flags.
"""

from hf_pretrain.loading.adapters import AdapterArguments, add_adapter, is_adapted
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
    from hf_pretrain.stages.dpo import DPOTrainingArguments, MiniMindDPOTrainer


ARGUMENTS = (ModelArguments, AdapterArguments, PreferenceArguments, DPOTrainingArguments)


def main(
    model_args: ModelArguments,
    adapter_args: AdapterArguments,
    data_args: PreferenceArguments,
    training_args: DPOTrainingArguments,
):
    run = begin_run("dpo", training_args, model_args, adapter_args, data_args)
    tokenizer = model_args.load_tokenizer(run.checkpoint)
    pairs = load_rows(data_args, training_args, tokenizer, prepare=prepare_pairs)
    model = add_adapter(load_model(model_args, tokenizer, distributed=training_args.distributed_config), adapter_args)
    # With an adapter, the model without its adapter is the reference.
    needs_reference = not (training_args.precompute_ref_log_probs or is_adapted(model))
    reference = load_model(model_args, tokenizer) if needs_reference else None
    train(run, pairs, model, MiniMindDPOTrainer, ref_model=reference)


if __name__ == "__main__":
    with one_line_errors():
        main(*parse_args(*ARGUMENTS, stage="dpo"))
