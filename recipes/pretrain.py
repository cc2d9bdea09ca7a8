"""
Pretrain a MiniMind model, from random weights or from the weights of a checkpoint.

    hf-pretrain pretrain --preset tiny
    hf-pretrain pretrain --model_preset minimind2 --dataset_name my/*.jsonl --output_dir out/mine
    torchrun --standalone --nproc_per_node 4 recipes/pretrain.py --config recipes/minimind2-small/pretrain.yaml
    accelerate launch --config_file recipes/accelerate_configs/fsdp2.yaml recipes/pretrain.py
    deepspeed --include localhost:0,1 recipes/pretrain.py --deepspeed ds_configs/zero2.json

The flags of `TrainingArguments` work, except those that docs/launching.md lists; `--help-all` prints all flags.
Without `--config`, the YAML file of the preset gives the defaults. Flags on the command line override it.
"""

from functools import partial

from hf_pretrain import MaskedLossTrainer
from hf_pretrain.data.arguments import DataArguments
from hf_pretrain.data.collators import DataCollatorForPackedRows
from hf_pretrain.data.preparation import load_rows
from hf_pretrain.hub.model_card import RunFacts
from hf_pretrain.runtime.command_line import one_line_errors
from hf_pretrain.tokenizer.training import load_or_train_tokenizer
from hf_pretrain.training.arguments import LMTrainingArguments
from hf_pretrain.training.parsing import parse_args
from hf_pretrain.training.reporting import sample_continuations, unigram_loss
from hf_pretrain.training.running import begin_run, end_run, train_and_evaluate
from hf_pretrain.weights.adapters import AdapterArguments, add_adapter
from hf_pretrain.weights.model_arguments import ModelArguments
from hf_pretrain.weights.models import load_model


ARGUMENTS = (ModelArguments, AdapterArguments, DataArguments, LMTrainingArguments)


def main(
    model_args: ModelArguments,
    adapter_args: AdapterArguments,
    data_args: DataArguments,
    training_args: LMTrainingArguments,
):
    # Lock the output directory, seed, and find the checkpoint to resume from, if any.
    checkpoint = begin_run(training_args, model_args, adapter_args, data_args, streaming=data_args.streaming)

    # A resumed run must keep its tokenizer, which lies in the checkpoint.
    tokenizer_name = model_args.tokenizer_name_or_path or checkpoint or model_args.model_name_or_path
    train_tokenizer = partial(load_or_train_tokenizer, tokenizer_name, vocab_size=model_args.vocab_size)
    rows = load_rows(data_args, training_args, train_tokenizer)
    tokenizer = rows.tokenizer

    model = add_adapter(load_model(model_args, tokenizer, distributed=training_args.distributed_config), adapter_args)
    trainer = MaskedLossTrainer(
        model=model,
        args=training_args,
        # Give all sequences one length: torch.compile would compile again for each new length.
        data_collator=DataCollatorForPackedRows(tokenizer.pad_token_id, max_length=data_args.row_length),
        train_dataset=rows.train,
        eval_dataset=rows.eval,
        processing_class=tokenizer,
        run_facts=RunFacts(
            stage="pretraining",
            datasets=data_args.dataset_name,
            data=rows.report,
            base_model=model_args.model_name_or_path,
        ),
    )
    sample = None if rows.eval is None else partial(sample_continuations, tokenizer=tokenizer, eval_rows=rows.eval)
    results = train_and_evaluate(trainer, checkpoint=checkpoint, sample=sample)
    # A stream has no counts over the whole training set.
    if rows.eval is not None and not data_args.streaming:
        trainer.run_facts.unigram_loss = unigram_loss(rows.train, rows.eval, vocab_size=len(tokenizer))
    end_run(trainer, results)


if __name__ == "__main__":
    with one_line_errors():
        main(*parse_args(*ARGUMENTS))
