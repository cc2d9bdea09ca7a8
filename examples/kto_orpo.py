"""
Train a checkpoint of hf_pretrain with a trainer of TRL that has no recipe here: KTO or ORPO.

    python -m examples.kto_orpo kto --model out/sft-tiny --data pairs.jsonl --output_dir out/kto-tiny --max_steps 100

The data are TRL's: a `prompt`, a `chosen` and a `rejected` answer, as lists of messages. All other flags are those of
TRL's config. The result is a checkpoint as any other: `hf-pretrain chat --model_name_or_path out/kto-tiny`.

TRL adds no router loss of ours, so do not train models with experts in this way.
"""

import argparse

import torch
from datasets import load_dataset
from transformers import HfArgumentParser
from trl import KTOConfig, KTOTrainer
from trl.data_utils import unpair_preference_dataset

# NOTE: TRL calls ORPO experimental, and warns at its import.
from trl.experimental.orpo import ORPOConfig, ORPOTrainer

from hf_pretrain import MiniMindForCausalLM
from hf_pretrain.tokenizer.pretrained import load_tokenizer


TRAINERS = {"kto": (KTOTrainer, KTOConfig), "orpo": (ORPOTrainer, ORPOConfig)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("method", choices=TRAINERS)
    parser.add_argument("--model", required=True, help="A checkpoint with a chat template, such as one of sft.")
    parser.add_argument("--data", required=True, help="A JSONL file of preferences.")
    args, rest = parser.parse_known_args()
    trainer_class, config_class = TRAINERS[args.method]
    # TRL asks for bf16 units unless told that there is no GPU.
    defaults = [] if torch.accelerator.is_available() else ["--use_cpu", "--bf16", "false"]
    (config,) = HfArgumentParser(config_class).parse_args_into_dataclasses([*defaults, *rest])
    data = load_dataset("json", data_files=args.data, split="train")
    if args.method == "kto":
        data = unpair_preference_dataset(data)
    model = MiniMindForCausalLM.from_pretrained(args.model)
    trainer = trainer_class(model, args=config, train_dataset=data, processing_class=load_tokenizer(args.model))
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main()
