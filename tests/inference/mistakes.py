"""Mistakes in prompts, in the commands of a chat, and in the flags of the server."""

import socket
import threading
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

from filelock import FileLock

from hf_pretrain.inference import llama_cpp
from hf_pretrain.inference.batch_answers import count_answers, read_prompts, write_answers
from hf_pretrain.inference.inference_arguments import load_engine
from hf_pretrain.inference.llama_cpp import EngineEnded, LlamaCppModel
from hf_pretrain.inference.serving import ModelServer, check_ports
from hf_pretrain.inference.terminal_chat import Chat
from hf_pretrain.inference.tools import offer_tools
from hf_pretrain.tokenizer.training import train_tokenizer
from recipes.serve import ServingArguments
from recipes.serve import main as serve
from tests.invariants.launching import free_port
from tests.mistakes import Mistake
from tests.toys import toy_model, write_jsonl


@cache
def tokenizer():
    return train_tokenizer(["one two three four"] * 4, vocab_size=320)


def offer_file(content):
    def offer():
        with TemporaryDirectory() as directory:
            path = Path(directory, "mine.py")
            path.write_text(content)
            offer_tools(str(path))

    return offer


def read(record, **options):
    """Return a function that reads a file of prompts with this record in its second line."""

    def make(tmp_path):
        path = Path(write_jsonl(tmp_path / "prompts.jsonl", [{"prompt": "one"}, record]))
        read_prompts(path, tokenizer(), max_tokens=30, **options)

    return make


def answer_other_prompts(tmp_path):
    (tmp_path / "notes.json").write_text('{"a": [1, 2]}')
    count_answers(tmp_path / "notes.json", [{"prompt": "a"}])


def write_twice(tmp_path):
    with FileLock(tmp_path / ".answers.jsonl.lock"):
        write_answers([], tmp_path / "answers.jsonl", None, tokenizer(), batch_size=1)


def talk(line, model=None, **options):
    def make():
        chat = Chat(model, tokenizer(), {"temperature": 0, "max_new_tokens": 1}, **options)
        if line.startswith("/"):
            chat.run_command(line)
        chat.say(line)
        chat.answer(print)

    return make


def ask_llama_cpp(status):
    """Return a function that asks a process of llama.cpp which has no status yet, or has ended with one."""
    model = LlamaCppModel.__new__(LlamaCppModel)
    model._key, model._process = "", SimpleNamespace(poll=lambda: status, wait=lambda seconds: status)

    def make():
        model._address = f"http://127.0.0.1:{free_port()}"
        list(model._post())

    return make


def start_llama_cpp(monkeypatch, tmp_path):
    (tmp_path / "process.py").write_text("import os; os.abort()")
    monkeypatch.setattr(llama_cpp, "_PROCESS", tmp_path / "process.py")
    LlamaCppModel(toy_model(vocab_size=64, max_position_embeddings=64).eval())


def serve_at_taken_port(*names, **options):
    def make():
        with socket.create_server(("127.0.0.1", 0)) as listener:
            taken = dict.fromkeys(names, listener.getsockname()[1])
            # The port is checked before the model is looked for.
            serve(
                ServingArguments(model_name_or_path="nowhere", use_cpu=True, **{"port": free_port()} | taken | options)
            )

    return make


def serve_without_template(tmp_path):
    toy_model(vocab_size=len(tokenizer())).save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    ports = {"port": free_port(), "web_port": free_port()}
    serve(ServingArguments(model_name_or_path=str(tmp_path), web=True, use_cpu=True, **ports))


def check_ended_server():
    server = ModelServer.__new__(ModelServer)
    server.engine, server.thread = SimpleNamespace(check=lambda: None), threading.Thread()
    server.check()


def load_other_model(**options):
    def make(tmp_path):
        from transformers import GPT2Config, GPT2LMHeadModel

        GPT2LMHeadModel(GPT2Config(vocab_size=320, n_embd=32, n_layer=1, n_head=2)).save_pretrained(tmp_path)
        tokenizer().save_pretrained(tmp_path)
        load_engine(str(tmp_path), **options)

    return make


MISTAKES = [
    Mistake("line 2: .*the field 'generated'", read({"prompt": "one", "generated": "x"})),
    Mistake(
        r"line 2: a prompt of \d+ tokens; --max_new_tokens leaves 30",
        read({"prompt": "one " * 100}),
    ),
    Mistake("line 2: 'prompt' is no list of messages but null", read({"text": "one"})),
    Mistake("line 2: 'prompt' is no list of messages but nul", read({"prompt": " "})),
    Mistake("line 2: the record has the field 'image'", read({"prompt": "What is it?", "image": "a.png"})),
    Mistake("line 2: column 'note' holds half a surrogate pair", read({"prompt": "one", "note": ["\ud83d"]})),
    Mistake(
        "line 2: no message comes before the answer", read({"messages": [{"role": "assistant", "content": "one"}]})
    ),
    Mistake("line 2: 'prompt' holds null, not text", read({"prompt": ""}, is_raw=True)),
    Mistake("notes.json, line 1 answers no record in its place. Name another --output", answer_other_prompts),
    Mistake("is in use by another process, which holds .*answers.jsonl.lock", write_twice),
    Mistake("'/sing' is not a command.*/reset", talk("/sing")),
    Mistake("'/think' is not a command", talk("/think")),
    Mistake("'/system Be brief.' is not a command for raw continuation", talk("/system Be brief.", is_raw=True)),
    Mistake("'warm'", talk("/temperature warm"), ValueError),
    Mistake("--temperature nan must be at least 0", talk("/temperature nan")),
    # There is no room for a single token more.
    Mistake(
        "The text so far has 3 tokens, and the model sees 3: /reset it",
        talk("one two", toy_model(vocab_size=320, max_position_embeddings=3), is_raw=True),
    ),
    Mistake("has ended with status -9. Start this command again. .* smaller model", ask_llama_cpp(-9), EngineEnded),
    Mistake("llama.cpp broke off an answer: .*. Start this command again.", ask_llama_cpp(None), EngineEnded),
    Mistake("llama.cpp did not start: its process ended with status -6", start_llama_cpp),
    Mistake("--engine llama.cpp: .* cannot be converted", load_other_model(engine="llama.cpp")),
    Mistake("no generation of MiniMind has these names", load_other_model(rope_scaling="1024:4")),
    Mistake(
        "--tools .*mine.py: ModuleNotFoundError: No module named 'nowhere_to_be_found'",
        offer_file("import nowhere_to_be_found"),
    ),
    Mistake("--tools .*mine.py: DocstringParsingException: .*has no docstring", offer_file("def plain(): pass")),
    Mistake("--tools .*mine.py: .*Argument x is missing a type hint", offer_file('def f(x):\n    "Does."')),
    Mistake("--tools .*mine.py: SystemExit", offer_file("exit()")),
    Mistake("mine.py defines no function without a leading underscore", offer_file("X = 1")),
    Mistake("--tools other.py: FileNotFoundError", lambda: offer_tools("other.py")),
    Mistake("--tools needs the chat page", lambda: serve(ServingArguments(tools="calculator"))),
    Mistake(r"Port \d+ of 127.0.0.1 cannot be used: .* Choose another", serve_at_taken_port("port")),
    Mistake(r"Port \d+ of 127.0.0.1 cannot be used", serve_at_taken_port("web_port", web=True)),
    Mistake("Port 8031 of 127.0.0.1 cannot", serve_at_taken_port(web=True, port=8031, web_port=8031)),
    Mistake("Port 8033 of localhost cannot be used", lambda: check_ports("localhost", [8033, 8033])),
    Mistake("has no chat template. Put a chat_template.jinja beside it", serve_without_template),
    Mistake("The server has ended. Its message stands above", check_ended_server),
]
