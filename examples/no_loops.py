"""
Teach a chat model not to loop: DPO prefers real answers to the model's own loops.

    python -m examples.no_loops --model out/sft-tiny --output_dir out/no-loops

The program answers questions of the conversations greedily, and pairs each answer that still repeats itself after 96
tokens with the real answer. `hf-pretrain dpo` trains on these pairs. The new model then gets a repetition penalty of
its own, which `chat`, `generate`, servers and all exports respect. Flags that are not listed below go to
`hf-pretrain dpo`. docs/performance.md has the figures.
"""

import argparse
import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

from transformers import GenerationConfig

import hf_pretrain_cli
from hf_pretrain.data.documents import load_documents
from hf_pretrain.inference.samples import GREEDY, generate, stop_tokens_of
from hf_pretrain.loading.model import load_model
from hf_pretrain.loading.model_arguments import ModelArguments
from hf_pretrain.rows.reading import Reading
from hf_pretrain.runtime.command_line import one_line_errors
from hf_pretrain.runtime.errors import UserError
from hf_pretrain.tokenizer.control_tokens import encode_prompt
from hf_pretrain.tokenizer.pretrained import load_tokenizer


# Tokens of a question and of an answer. DPO cuts pairs at the second number, so no stop token ends a loop there.
PROMPT_TOKENS, ANSWER_TOKENS = 60, 96
DPO = f"--max_length {ANSWER_TOKENS} --loss_type sigmoid sft --loss_weights 1 1 --beta 0.2 --learning_rate 1e-4"
DPO += " --max_steps 60 --per_device_train_batch_size 16 --gradient_accumulation_steps 1"


def mark_repeated(tokens: list[int], n: int = 4) -> list[bool]:
    """Return for each token whether it belongs to an n-gram that occurred earlier."""
    seen, marks = set(), [False] * len(tokens)
    for start in range(len(tokens) - n + 1):
        gram = tuple(tokens[start : start + n])
        if gram in seen:
            marks[start : start + n] = [True] * n
        seen.add(gram)
    return marks


def find_loops(model: Any, tokenizer: Any, conversations: list[list[dict]], *, batch_size: int = 96) -> list[dict]:
    """
    Return preferences for `hf-pretrain dpo`: of each conversation, the first answer and the model's greedy answer to
    the same question, if it loops.
    """
    questions = []
    for messages in conversations:
        turns = zip(messages, messages[1:], strict=False)
        last = next((n for n, turn in enumerate(turns) if [m["role"] for m in turn] == ["user", "assistant"]), None)
        if last is None or not messages[last + 1]["content"]:
            continue
        prompt = encode_prompt(tokenizer, messages[: last + 1])
        if len(prompt) <= PROMPT_TOKENS:
            questions.append((prompt, messages[: last + 1], messages[last + 1]["content"]))
    questions.sort(key=lambda question: len(question[0]))
    pairs = []
    for batch in (questions[start : start + batch_size] for start in range(0, len(questions), batch_size)):
        answers = generate(model, tokenizer, [prompt for prompt, *_ in batch], max_new_tokens=ANSWER_TOKENS, **GREEDY)
        for (_, question, chosen), answer in zip(batch, answers, strict=True):
            if answer[-1] not in stop_tokens_of(model) and any(mark_repeated(answer)):
                pairs.append({"prompt": question, "chosen": chosen, "rejected": tokenizer.decode(answer)})
    return pairs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="A chat model.")
    parser.add_argument("--output_dir", required=True, help="Directory of the new model; its pairs lie beside it.")
    parser.add_argument("--dataset_name", nargs="+", default=["embedded"], help="Conversations with real answers.")
    parser.add_argument("--num_conversations", type=int, default=6000, help="At most this many of them.")
    parser.add_argument("--repetition_penalty", type=float, default=1.1, help="The penalty of the new model.")
    args, rest = parser.parse_known_args()
    if late := {"--use_peft", "--push_to_hub"} & set(rest):
        raise UserError(f"Leave out {', '.join(late)}: the penalty is written later, beside whole weights.")
    output = Path(args.output_dir)
    if output.exists():
        raise UserError(f"{output} exists. Choose another directory.")
    output.parent.mkdir(parents=True, exist_ok=True)
    documents, _ = load_documents(args.dataset_name, Reading(kind="conversation"))
    chosen = random.Random(0).sample(range(len(documents)), min(args.num_conversations, len(documents)))
    conversations = [json.loads(documents[index]["text"])["messages"] for index in chosen]
    tokenizer = load_tokenizer(args.model)
    model = load_model(ModelArguments(model_name_or_path=args.model), tokenizer).eval()
    pairs = find_loops(model, tokenizer, conversations)
    if len(pairs) < 2:
        raise UserError(f"{len(pairs)} of the answers of {args.model} loop. There is nothing to mend.")
    print(f"{len(pairs):,} of the answers to {len(conversations):,} conversations loop", flush=True)
    path = output.with_name(f"{output.name}.jsonl")
    with path.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(pair, ensure_ascii=False) + "\n" for pair in pairs)
    words = ["dpo", "--model_name_or_path", args.model, "--dataset_name", path, "--output_dir", output, *DPO.split()]
    status = subprocess.run([sys.executable, hf_pretrain_cli.__file__, *words, *rest]).returncode
    if status:
        sys.exit(status)
    config = GenerationConfig.from_pretrained(output)
    config.update(repetition_penalty=args.repetition_penalty)
    config.save_pretrained(output)


if __name__ == "__main__":
    with one_line_errors():
        main()
