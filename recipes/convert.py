"""
Convert MiniMind weights of any generation into one of eight formats, and merge adapters into their base models.

MiniMind's LoRA files are read and written, too.

    hf-pretrain convert --from full_sft_768.pth --config num_attention_heads=8 --tokenizer v2/ --to out/mine
    hf-pretrain convert --from jingyaogong/MiniMind2 --to out/minimind2
    hf-pretrain convert --from owner/name:full_sft_512.pth --config num_attention_heads=8 --to out/mine
    hf-pretrain convert --from out/pretrain --to out/llama --format llama --dtype bfloat16
    hf-pretrain convert --from out/adapter --to out/merged
    hf-pretrain convert --from lora_identity_768.pth --base out/minimind3 --to out/merged
    hf-pretrain convert --from out/adapter --to out/lora --format lora --stage lora_identity
    hf-pretrain convert --from out/pretrain --to out/gguf --format gguf --dtype q8_0
    hf-pretrain convert --from out/sft --to out/web --format web
    hf-pretrain convert --from out/pretrain --to out/upstream --format upstream
    hf-pretrain convert --from out/pretrain --to out/llama --format llama --push --hub_model_id me/mine

The recipe reads the result back, and compares its logits with the logits of the source. The output and the model card
state the largest difference.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_pretrain.checkpoints.directory import find_newest_run
from hf_pretrain.hub.model_card import format_conversion_card, format_page_card
from hf_pretrain.hub.pushing import create_repository, push_folder
from hf_pretrain.loading.model_arguments import parse_fields
from hf_pretrain.runtime.command_line import announce, one_line_errors
from hf_pretrain.runtime.errors import UserError
from hf_pretrain.runtime.flags import flag
from hf_pretrain.runtime.parser import parse_flags
from hf_pretrain.runtime.writing import check_empty
from hf_pretrain.tokenizer.pretrained import find_tokenizer, load_tokenizer
from hf_pretrain.weights.browser import check_tokenizer
from hf_pretrain.weights.exporting import EXPORT_FORMATS, GGUF_TYPES, export
from hf_pretrain.weights.foreign_configs import UPSTREAM_FIELDS
from hf_pretrain.weights.upstream_lora import load_merged, write_upstream_lora


@dataclass
class ConversionArguments:
    """Source, result and repository."""

    source: str | None = flag(
        None,
        "A .pth file, a checkpoint or adapter directory, a Hub id, or a file in one: owner/name:x.pth; by default the "
        "newest model in out.",
        names="model",
        spelled="--from",
    )
    to: str = flag(help="A new or empty directory.")
    format: str = flag(
        "minimind",
        "Format of the new model; lora: an adapter as a LoRA file of MiniMind.",
        choices=(*EXPORT_FORMATS, "lora"),
    )
    base: str | None = flag(None, "The base model, if --from is a LoRA file of MiniMind.", names="model")
    config: str | None = flag(None, "A JSON file, or name=value,...: config fields that the source lacks.")
    tokenizer: str | None = flag(
        None, "Directory or Hub id; by default the tokenizer beside the weights.", names="model"
    )
    dtype: str | None = flag(None, "Dtype of the weights; by default the source's.", choices=GGUF_TYPES)
    stage: str | None = flag(None, "For upstream and lora: start of the file name; by default full_sft, or lora.")
    push: bool = flag(False, "Push to --hub_model_id.")
    hub_model_id: str | None = flag(None, "Repository; by default the name of the directory, in your namespace.")
    hub_private_repo: bool = flag(None, "Make a new repository private.")
    hub_license: str | None = flag(None, "Licence, for the model card.")


ARGUMENTS = (ConversionArguments,)


def main(args: ConversionArguments) -> None:
    # Check before the download of a large model.
    check_empty(args.to, "--to")
    args.source = args.source or find_newest_run(with_adapters=True)
    config: Any = args.config
    # --config accepts a file or fields; only fields contain "=".
    if config is not None and "=" in config:
        config = parse_fields(config, flag="--config", also_known=UPSTREAM_FIELDS)
    announce("reading the weights")
    if args.format == "lora":
        if args.push:
            raise UserError("--format lora does not push. Push the file with `hf upload`.")
        print(f"{args.to}: {write_upstream_lora(args.source, args.to, name=args.stage, dtype=args.dtype)}")
        return
    model, merge = load_merged(args.source, base=args.base, config=config, dtype=args.dtype)
    # If there is no tokenizer beside the weights, the export warns.
    tokenizer = load_tokenizer(args.tokenizer) if args.tokenizer else find_tokenizer(args.base or args.source)
    is_page, default = args.format == "web", Path(args.to).name
    if is_page:
        check_tokenizer(tokenizer)
        # The link of one model must not show another one later.
        default = re.sub(r"[^\w.-]+", "-", Path(args.source).name)
    repo_id = args.hub_model_id or default
    if args.push:
        repo_id = create_repository(repo_id, private=args.hub_private_repo, is_space=is_page)
    announce("writing the model")
    options = {"dtype": args.dtype, "model_name": Path(args.hub_model_id or args.source).name}
    report = export(model, args.to, args.format, tokenizer=tokenizer, stage=args.stage or "full_sft", **options)
    facts = {"source": args.source, "license": args.hub_license}
    if is_page:
        card = format_page_card(options["model_name"], str(report), **facts)
    else:
        facts |= {"repo_id": repo_id, "format": args.format}
        card = format_conversion_card(model, str(report), has_tokenizer=tokenizer is not None, **facts)
    Path(args.to, "README.md").write_text(card, encoding="utf-8")
    if merge is not None:
        print(f"Merged; largest logit difference from peft's unmerged model {merge.max_difference:.2e}")
    print(f"{args.to}: {report}")
    if args.push:
        page = ("*.html", "*.css", "*.js", "*.wasm", "*.txt", "model.*")
        also = page if is_page else ("*.gguf", "Modelfile", "*.pth")
        pushed = push_folder(args.to, repo_id, message=str(report), also=also, is_space=is_page)
        print(f"Pushed to {pushed}")


if __name__ == "__main__":
    with one_line_errors():
        main(*parse_flags(*ARGUMENTS))
