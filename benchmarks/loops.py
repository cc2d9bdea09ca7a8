"""
Repetition in the answers of chat models, with and without a penalty for tokens that the text already has.

    python -m benchmarks.loops out/sft-tiny
    python -m benchmarks.loops out/sft-smollm2 --questions examples/identity_questions.jsonl

Each model answers questions of the validation set of the embedded conversations, or those of a file, with at most 64
tokens, greedily and with the defaults of `chat`. The penalty is transformers' `repetition_penalty`. It counts the
whole text, as `generation_config.json` and llama.cpp do, or leaves the prompt out, which takes a logits processor of
transformers. The figures are those of `inference/samples.py`. `right` is the share of right answers to the questions.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from transformers import LogitsProcessorList, PreTrainedModel, RepetitionPenaltyLogitsProcessor

from benchmarks.bench import ROOT, environment
from hf_pretrain.data.documents import load_documents
from hf_pretrain.evaluation.eval_questions import EvalQuestions
from hf_pretrain.inference.samples import answer_figures, choose_questions, generate, stop_tokens_of
from hf_pretrain.loading.adapters import is_adapted
from hf_pretrain.loading.model import load_model
from hf_pretrain.loading.model_arguments import ModelArguments
from hf_pretrain.rows.reading import Reading
from hf_pretrain.tokenizer.pretrained import load_tokenizer


NUM_QUESTIONS, MAX_TOKENS = 192, 64
SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False, "temperature": None, "top_p": None, "top_k": None},
    "sampled": {"do_sample": True, "temperature": 0.8, "top_p": 0.9},
}
# A penalty, and the text that it counts.
WHOLE = "prompt and answer"
PENALTIES = ((1.0, None), (1.1, WHOLE), (1.2, WHOLE), (1.2, "answer"), (1.3, WHOLE))


def penalize(penalty: float, counted: str | None, *, width: int) -> dict[str, Any]:
    """Return the arguments of `generate` for prompts that are padded to `width` tokens."""
    if counted == "answer":
        processor = RepetitionPenaltyLogitsProcessor(penalty, prompt_ignore_length=width)
        return {"repetition_penalty": 1.0, "logits_processor": LogitsProcessorList([processor])}
    # Without it, a penalty of the model's own would count.
    return {"repetition_penalty": penalty}


def measure(model: PreTrainedModel, tokenizer: Any, prompts: list[list[int]], questions: EvalQuestions | None) -> list:
    """Return a row of figures for each sampling and penalty."""
    rows, stops = [], stop_tokens_of(model)
    for sampling, settings in SAMPLING.items():
        for penalty, counted in PENALTIES:
            more = penalize(penalty, counted, width=max(map(len, prompts)))
            answers = generate(model, tokenizer, prompts, max_new_tokens=MAX_TOKENS, **settings, **more)
            row = {"sampling": sampling, "penalty": penalty, "counted": counted}
            figures = answer_figures(answers, stop_tokens=stops)
            row |= {name.removeprefix("eval_"): round(value, 4) for name, value in figures.items()}
            # Loops are the answers that do not end.
            ended = answer_figures([answer for answer in answers if answer[-1] in stops], stop_tokens=stops)
            row["repeated_4grams_of_ended"] = round(ended.get("eval_repeated_4grams", 0.0), 4)
            if questions is not None:
                texts = [tokenizer.decode(answer, skip_special_tokens=True) for answer in answers]
                row["right"] = sum(questions._are_right(texts)) / len(texts)
            print(json.dumps(row), flush=True)
            rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a chat model")
    parser.add_argument("--questions", help="file of questions with known answers")
    parser.add_argument("--name", help="name of the model in the results; by default its directory")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks/results/loops.json")
    args = parser.parse_args()
    tokenizer = load_tokenizer(args.model)
    model: Any = load_model(ModelArguments(model_name_or_path=args.model), tokenizer).eval()
    model = model.merge_and_unload() if is_adapted(model) else model
    questions = EvalQuestions(args.questions, tokenizer) if args.questions else None
    if questions is not None:
        prompts = [ids for _, ids in questions.prompts]
    else:
        _, held_out = load_documents(["embedded"], Reading(kind="conversation"), is_evaluation=True)
        prompts = [ids for _, ids in choose_questions(tokenizer, held_out, NUM_QUESTIONS)]
    results = json.loads(args.output.read_text(encoding="utf-8")) if args.output.exists() else {"models": {}}
    rows = measure(model, tokenizer, prompts, questions)
    results["models"][args.name or Path(args.model).name] = {"num_questions": len(prompts), "rows": rows}
    args.output.write_text(json.dumps(environment() | results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
