"""
Distils a teacher into a smaller MiniMind (https://huggingface.co/papers/1503.02531).

    python recipes/distill.py --teacher_name_or_path out/pretrain-tiny
    python recipes/distill.py --teacher_name_or_path out/mine --kl reverse --temperature 1 --ce_weight 0
    python recipes/distill.py --teacher_name_or_path out/mine --cache_teacher_logits 64
    torchrun --standalone --nproc_per_node 4 recipes/distill.py --config recipes/minimind2-small/distill.yaml
    deepspeed --include localhost:0,1 recipes/distill.py --deepspeed ds_configs/zero2.json --teacher_name_or_path out/mine

The teacher is any causal language model with the same tokenizer. The student is built as in pretraining, or goes on from
`--model_name_or_path`. Without `--config`, the preset's own YAML gives the defaults, and the command line wins.
"""

from functools import partial
from pathlib import Path

from hf_pretrain.adapters import AdapterArguments, add_adapter
from hf_pretrain.arguments import DataArguments, LMTrainingArguments, ModelArguments, parse_args
from hf_pretrain.data.collators import DataCollatorForPackedRows
from hf_pretrain.data.loading import load_documents
from hf_pretrain.data.packing import prepare_rows
from hf_pretrain.distillation import DistillationArguments, DistillationTrainer, load_teacher
from hf_pretrain.model_card import RunFacts
from hf_pretrain.reporting import sample_continuations
from hf_pretrain.running import begin_run, end_run, train_and_evaluate
from hf_pretrain.tokenization import load_tokenizer


def main(
    model_args: ModelArguments,
    adapter_args: AdapterArguments,
    distillation_args: DistillationArguments,
    data_args: DataArguments,
    training_args: LMTrainingArguments,
):
    checkpoint = begin_run(training_args)
    is_main = training_args.process_index == 0
    # A student from scratch takes the teacher's tokenizer.
    tokenizer_name = model_args.tokenizer_name_or_path or checkpoint or model_args.model_name_or_path
    tokenizer = load_tokenizer(tokenizer_name or distillation_args.teacher_name_or_path)
    teacher = load_teacher(distillation_args.teacher_name_or_path, tokenizer, is_packed=data_args.packing != "none")
    model_args.vocab_size = teacher.config.vocab_size

    with training_args.main_process_first(desc="preparing the data"):
        train_documents, eval_documents = load_documents(
            data_args.dataset_name,
            text_column=data_args.text_column,
            weights=data_args.dataset_weights,
            streaming=data_args.streaming,
            validation_fraction=data_args.validation_fraction,
            seed=training_args.seed,
            num_proc=data_args.num_proc,
            max_rejected_ratio=data_args.max_rejected_ratio,
            rejected_path=Path(training_args.output_dir, "rejected.jsonl") if is_main else None,
        )
        if data_args.streaming:
            train_documents = train_documents.shuffle(seed=training_args.seed, buffer_size=10_000)
        prepare = partial(
            prepare_rows,
            tokenizer=tokenizer,
            max_length=data_args.max_length,
            packing=data_args.packing,
            num_proc=data_args.num_proc,
        )
        train_rows, packing_report = prepare(train_documents)
        eval_rows, eval_report = prepare(eval_documents) if len(eval_documents) else (None, None)
    if eval_rows is None:
        training_args.eval_strategy = "no"

    model = add_adapter(model_args.load_model(tokenizer, fsdp_size=training_args.fsdp_size), adapter_args)
    trainer = DistillationTrainer(
        model=model,
        teacher=teacher,
        distillation_args=distillation_args,
        args=training_args,
        data_collator=DataCollatorForPackedRows(tokenizer.pad_token_id),
        train_dataset=train_rows,
        eval_dataset=eval_rows,
        processing_class=tokenizer,
        run_facts=RunFacts(
            stage=f"distillation from {Path(distillation_args.teacher_name_or_path).name}",
            recipe="distill",
            datasets=data_args.dataset_name,
            data=[f"Training: {packing_report or 'streamed'}", f"Held out: {eval_report or 'nothing'}"],
            base_model=model_args.model_name_or_path,
        ),
    )
    metrics = train_and_evaluate(trainer, checkpoint=checkpoint)
    samples = sample_continuations(trainer.model, tokenizer, eval_rows) if eval_rows is not None else []
    end_run(trainer, metrics, samples=samples)


if __name__ == "__main__":
    argument_classes = (ModelArguments, AdapterArguments, DistillationArguments, DataArguments, LMTrainingArguments)
    main(*parse_args(*argument_classes, stage="distill"))
