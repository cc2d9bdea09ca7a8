"""
Train a MiniMind model on preferences, with TRL's DPO and its losses.

    hf-pretrain dpo --model_name_or_path out/sft-tiny
    hf-pretrain dpo --model_name_or_path me/chat --dataset_name my/pairs.jsonl --beta 0.15 --output_dir out/mine
    hf-pretrain dpo --model_name_or_path out/sft-tiny --loss_type ipo --output_dir out/ipo-tiny
    torchrun --standalone --nproc_per_node 4 recipes/dpo.py --config recipes/minimind3/dpo.yaml
    deepspeed --include localhost:0,1 recipes/dpo.py --config recipes/tiny/dpo.yaml --deepspeed ds_configs/zero2.json

A record has the fields `chosen` and `rejected`, each a text or a list of messages. The prompt is in the field
`prompt`, or at the beginning of both fields. The flags of `TrainingArguments` and of TRL's `DPOConfig` work, except
those that docs/launching.md lists; `--help-all` prints all flags.
"""

from functools import partial

from hf_pretrain.data.data_arguments import SourceArguments
from hf_pretrain.data.preference_pairs import prepare_pairs
from hf_pretrain.hub.model_card import RunFacts
from hf_pretrain.runtime.command_line import one_line_errors
from hf_pretrain.tokenizer.chat_template import mark_template
from hf_pretrain.tokenizer.pretrained import load_tokenizer
from hf_pretrain.training.end_report import sample_answers
from hf_pretrain.training.parsing import parse_args
from hf_pretrain.training.recipe import begin_run, end_run, train_and_evaluate
from hf_pretrain.weights.adapters import AdapterArguments, add_adapter, is_adapted
from hf_pretrain.weights.models import ModelArguments, load_model


# TRL is optional. If it is missing, one line tells the user how to install it.
with one_line_errors():
    from hf_pretrain.stages.dpo import DPOTrainingArguments, MiniMindDPOTrainer


ARGUMENTS = (ModelArguments, AdapterArguments, SourceArguments, DPOTrainingArguments)


def main(
    model_args: ModelArguments,
    adapter_args: AdapterArguments,
    data_args: SourceArguments,
    training_args: DPOTrainingArguments,
):
    checkpoint = begin_run(training_args, model_args, adapter_args, data_args)
    tokenizer = load_tokenizer(model_args.tokenizer_name_or_path or checkpoint or model_args.base_model)
    # The template must mark the assistant's text, because the loss compares only that text.
    mark_template(tokenizer)

    with training_args.main_process_first(desc="preparing the data"):
        documents = data_args.load_documents(training_args, schema="preference")
        (train_pairs, train_report), (eval_pairs, eval_report) = (
            prepare_pairs(part, tokenizer, max_length=training_args.max_length, num_proc=data_args.num_proc)
            for part in documents
        )
    report = [f"Training: {train_report}", f"Validation: {eval_report}"]
    # The plan of a dry run shows the same lines.
    if training_args.process_index == 0 and not training_args.dry_run:
        print("\n".join(report))
    if len(eval_pairs) == 0:
        training_args.evaluate_never()

    model = add_adapter(load_model(model_args, tokenizer, distributed=training_args.distributed_config), adapter_args)
    # With an adapter, the model without its adapter is the reference.
    needs_reference = not (training_args.precompute_ref_log_probs or is_adapted(model))
    trainer = MiniMindDPOTrainer(
        model=model,
        ref_model=load_model(model_args, tokenizer) if needs_reference else None,
        args=training_args,
        train_dataset=train_pairs,
        # An empty dataset is not None, and Trainer would try to evaluate it.
        eval_dataset=eval_pairs if len(eval_pairs) else None,
        processing_class=tokenizer,
        run_facts=RunFacts(
            stage="tuning on preferences (DPO)",
            recipe="dpo",
            datasets=data_args.dataset_name,
            data=report,
            base_model=model_args.model_name_or_path,
            data_kind="preferences",
            # A preference loss is not comparable with a cross-entropy in nats per token.
            loss_unit="DPO",
        ),
    )
    sample = None
    if len(eval_pairs):
        # The documents include the pairs that were dropped because their prompts are too long.
        limit = training_args.max_length
        sample = partial(sample_answers, tokenizer=tokenizer, conversations=documents[1], max_prompt_tokens=limit)
    end_run(trainer, *train_and_evaluate(trainer, checkpoint=checkpoint, sample=sample))


if __name__ == "__main__":
    with one_line_errors():
        main(*parse_args(*ARGUMENTS, stage="dpo"))
