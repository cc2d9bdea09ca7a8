"""Mistakes in the flags, the data and the models of an evaluation."""

from functools import cache
from types import SimpleNamespace

from hf_pretrain.evaluation.eval_questions import EvalQuestions
from hf_pretrain.evaluation.evaluation import EvaluationArguments, ValidationArguments, load_validation
from hf_pretrain.evaluation.tool_call_task import evaluate_tool_calls
from hf_pretrain.inference.served_model import ServedModel
from hf_pretrain.tokenizer.training import train_tokenizer
from hf_pretrain.training.evaluation_arguments import check_whole_model
from hf_pretrain.training.parsing import parse_args
from recipes.evaluate import ARGUMENTS, main
from tests.mistakes import Mistake
from tests.toys import toy_model, write_jsonl


@cache
def tokenizer():
    return train_tokenizer(["one two three four"] * 4, vocab_size=320)


def find_model(name, **options):
    return lambda: EvaluationArguments(use_cpu=True, bf16=False, **options).find_model(name)


def validate(*names, **data):
    def make(tmp_path):
        path = write_jsonl(tmp_path / "test.jsonl", ["one two", "three four"])
        args = EvaluationArguments(str(tmp_path), use_cpu=True, bf16=False)
        load_validation(ValidationArguments(max_length=128, **dict.fromkeys(names, [path]), **data), args, tokenizer())

    return make


def ask_cases(content):
    def make(tmp_path):
        (tmp_path / "cases.json").write_text(content)
        evaluate_tool_calls(None, None, tool_cases=str(tmp_path / "cases.json"))

    return make


def name_no_task(tmp_path, monkeypatch):
    from hf_pretrain.evaluation import lm_eval_tasks

    (tmp_path / "own.yaml").write_text("task: toy_choice\ndataset_path: json\noutput_type: multiple_choice\n")
    # The index of lm-eval's own tasks takes ten seconds.
    own = lm_eval_tasks.TaskManager(include_path=[str(tmp_path)], include_defaults=False)
    monkeypatch.setattr(lm_eval_tasks, "TaskManager", lambda **_: own)
    lm_eval_tasks.index_tasks(["toy_chioce"], None, "--eval_tasks")


def compare_on_one_text(tmp_path):
    toy_model(vocab_size=len(tokenizer())).save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    words = ["--model_name_or_path", str(tmp_path), "--against", str(tmp_path), "--dataset_kind", "text", "--use_cpu"]
    words += ["--eval_dataset_name", write_jsonl(tmp_path / "one.jsonl", ["one two"]), "--disable_tqdm", "true"]
    main(*parse_args(*ARGUMENTS, stage="evaluate", argv=[*words, "--bf16", "false"]))


def ask(record):
    return lambda tmp_path: EvalQuestions(write_jsonl(tmp_path / "questions.jsonl", [record]), tokenizer())


def ask_served(address):
    def make(talker):
        from tests.serving import served

        with served(str(talker)) as client:
            url = f"http://localhost:{address.format(client.base_url.port)}"
            evaluate_tool_calls(ServedModel(url, "m", "k"), None, limit=1)

    return make


MISTAKES = [
    Mistake("--tool_cases .*cases.json: it needs `tools` and `cases`, as .*tool_call_cases.json", ask_cases("{}")),
    Mistake("--tool_cases .*cases.json: it needs", ask_cases('{"tools": [{}], "cases": []}')),
    Mistake("no-such.json is not a JSON file", lambda: evaluate_tool_calls(None, None, tool_cases="no-such.json")),
    Mistake("nowhere holds no model to evaluate", find_model(None, output_dir="nowhere")),
    Mistake("name a directory for the results with --results_dir", find_model("me/mine")),
    Mistake("--limit 0 must be above 0", find_model(None, limit=0)),
    Mistake("'nowhere' is neither a directory here nor", find_model("me/mine", results_dir="x", against="nowhere")),
    Mistake(
        "selects no document of .*test.jsonl.* Pass the test data as --eval_dataset_name.* --max_length 128",
        validate("dataset_name", dataset_kind="text", validation_fraction=1e-9),
    ),
    # A chat model is evaluated on conversations by default.
    Mistake(
        "no conversation: its fields are text, .* pass --dataset_kind text for text",
        validate("eval_dataset_name", dataset_kind="auto"),
    ),
    Mistake("models have no two examples in common", compare_on_one_text),
    Mistake("--eval_tasks: lm-eval has no task 'toy_chioce'; the nearest one is toy_choice", name_no_task),
    Mistake(
        "--eval_tasks needs the whole model in each process",
        lambda: check_whole_model(SimpleNamespace(shards_weights=True), "--eval_tasks"),
    ),
    Mistake(
        "tool_call: without a response_template, no tool call can be recognised",
        lambda: evaluate_tool_calls(None, SimpleNamespace(response_template=None)),
    ),
    Mistake("--api_base_url asks the questions of tool_call. Leave", find_model(None, api_base_url="a", tasks="piqa")),
    Mistake("localhost:1/v1/chat/completions: ConnectError: .*. Start the server, or check", ask_served("1/v1")),
    Mistake("/v2/chat/completions: 404 .*This server answers .* check --api_base_url", ask_served("{}/v2")),
    Mistake("has no list `states`", ask({"prompt": "two?"})),
    Mistake(r"'states': 'four'\} has no list `states`", ask({"prompt": "two?", "states": "four"})),
    Mistake(r"'states': \[\[\]\]\} has no list `states`", ask({"prompt": "two?", "states": [[]]})),
]
