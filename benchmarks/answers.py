"""
Speed of answers on a CPU, measured side by side: one stream of tokens, and eight clients of a server.

    taskset -c 1 python -m benchmarks.answers
    python -m benchmarks.answers --models tiny --rounds 1 --output scratch.json

`tiny` and `26M` have random weights, `smollm2` is SmolLM2-135M-Instruct. All programs continue the same prompt
greedily. They take turns in each of several rounds. A speed is the median of the tokens per second of processor time,
that of child processes and of their own clients included, which other programs disturb less than the time of a clock.
llama.cpp by itself runs the weights in bfloat16 in the process of the benchmark; its server and transformers' (with
continuous batching) are those that their users start.
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError

import psutil
import torch
import xllamacpp
from transformers.generation.streamers import BaseStreamer

from benchmarks.bench import NUM_DOCUMENTS, ROOT, environment
from hf_pretrain.data.documents import load_documents
from hf_pretrain.inference import llama_cpp_process
from hf_pretrain.inference.llama_cpp import LlamaCppModel
from hf_pretrain.loading.model import load_model
from hf_pretrain.loading.model_arguments import ModelArguments
from hf_pretrain.rows.reading import Reading
from hf_pretrain.tokenizer.pretrained import load_tokenizer, save_tokenizer
from hf_pretrain.tokenizer.training import train_tokenizer
from hf_pretrain.weights.exporting import export
from hf_pretrain.weights.gguf import FILE_NAME


MODELS: dict[str, dict[str, Any]] = {
    "tiny": {"model_preset": "tiny"},
    "26M": {"model_preset": "minimind2-small"},
    "smollm2": {"model_name_or_path": "embedded:smollm2"},
}
PROMPT = "The history of the world is the history of rivers, and of those who lived beside them."
NUM_CLIENTS = 8
# Only llama.cpp's server asks for the key.
KEY = "none"
HEADERS = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"}
# The clock of the processor time ticks every 10 ms.
NUM_TOKENS = {"tiny": 1000, "26M": 256, "smollm2": 64}


class Silent(BaseStreamer):
    """A streamer that shows nothing."""

    def put(self, value: torch.Tensor) -> None:
        pass

    def end(self) -> None:
        pass


def cpu_seconds(process: psutil.Process) -> float:
    """Return the processor time of a process and its children."""
    times = [each.cpu_times() for each in (process, *process.children(recursive=True))]
    return sum(each.user + each.system for each in times)


def stream_programs(name: str, directory: Path, num_tokens: int) -> dict[str, Callable[[], int]]:
    """Return functions that generate a stream of tokens, and return their number."""
    arguments = ModelArguments(**MODELS[name])
    if arguments.model_name_or_path is None:
        documents, _ = load_documents(["embedded"], Reading(validation_fraction=0.01))
        tokenizer = train_tokenizer(documents["text"][:NUM_DOCUMENTS])
    else:
        tokenizer = load_tokenizer(arguments.model_name_or_path)
    model = load_model(arguments, tokenizer).eval()
    for format, dtype in (("minimind", "float32"), ("llama", "float32"), ("gguf", "bfloat16")):
        export(model, directory / format, format, tokenizer=tokenizer, dtype=dtype)
        save_tokenizer(tokenizer, directory / format)
    engine, ids = LlamaCppModel(model), tokenizer(PROMPT, return_tensors="pt").input_ids
    params = xllamacpp.CommonParams()
    params.model.path = str(directory / "gguf" / FILE_NAME)
    params.n_ctx, params.n_parallel, params.warmup, params.verbosity = 2048, 1, False, -1
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = torch.get_num_threads()
    server = xllamacpp.Server(params)
    how: dict[str, Any] = {"attention_mask": torch.ones_like(ids), "max_new_tokens": num_tokens, "do_sample": False}
    how |= {"eos_token_id": None, "pad_token_id": 0}

    def llama_cpp() -> int:
        chunks: list[Any] = []
        request = {"prompt": ids[0].tolist(), "n_predict": num_tokens, "temperature": 0.0, "ignore_eos": True}
        server.handle_completions(request | {"stream": True}, lambda chunk: chunks.append(chunk))
        return chunks[-1]["usage"]["completion_tokens"]

    return {
        "this package": lambda: engine.generate(ids, **how, streamer=Silent()).shape[1] - ids.shape[1],
        "llama.cpp": llama_cpp,
        "transformers": lambda: model.generate(ids, **how, streamer=Silent()).shape[1] - ids.shape[1],
    }


def start_servers(directory: Path, running: ExitStack) -> dict[str, tuple[psutil.Process, str, str]]:
    """Start three servers. Return the process, the address and the name of the model of each."""
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as other:
        first, second = one.getsockname()[1], other.getsockname()[1]
    threads = str(torch.get_num_threads())
    ours, theirs, gguf = (str(directory / each) for each in ("minimind", "llama", f"gguf/{FILE_NAME}"))
    commands = {
        "this package": [str(ROOT / "recipes/serve.py"), "--model_name_or_path", ours, "--use_cpu"],
        "llama.cpp": [llama_cpp_process.__file__, gguf, "16384", str(NUM_CLIENTS), threads],
        "transformers": ["-c", "from transformers.cli.transformers import main; main()", "serve", theirs],
    }
    commands["this package"] += ["--port", str(first)]
    commands["transformers"] += [
        "--device",
        "cpu",
        "--dtype",
        "float32",
        "--continuous-batching",
        "--port",
        str(second),
    ]
    addresses = {"this package": f"http://127.0.0.1:{first}", "transformers": f"http://127.0.0.1:{second}"}
    found = {}
    for program, command in commands.items():
        streams: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        streams["env"] = os.environ | {"LLAMA_CPP_KEY": KEY}
        process = running.enter_context(subprocess.Popen([sys.executable, *command], text=True, **streams))
        running.callback(process.kill)
        if program == "llama.cpp":
            assert process.stdout is not None
            addresses[program] = next(line.strip() for line in process.stdout if line.startswith("http"))
        found[program] = (
            psutil.Process(process.pid),
            addresses[program],
            theirs if program == "transformers" else ours,
        )
    return found


def ask(address: str, model: str, num_tokens: int) -> int:
    """Return the number of tokens of an answer."""
    body = {"model": model, "prompt": PROMPT, "max_tokens": num_tokens, "temperature": 0}
    request = urllib.request.Request(f"{address}/v1/completions", json.dumps(body).encode(), HEADERS)
    with urllib.request.urlopen(request, timeout=600) as response:
        return json.load(response)["usage"]["completion_tokens"]


def wait_for(address: str, model: str) -> None:
    """Wait until a server answers."""
    for _ in range(240):
        try:
            ask(address, model, 1)
            return
        except URLError as error:
            if isinstance(error, HTTPError):
                raise RuntimeError(f"{address}: {error.read().decode()}") from error
            time.sleep(0.5)
    raise TimeoutError(f"{address} does not answer.")


def rate(process: psutil.Process, run: Callable[[], int]) -> float:
    """Return the tokens per second of processor time."""
    start = cpu_seconds(process)
    num_tokens = run()
    return num_tokens / (cpu_seconds(process) - start)


def total(answers: Callable[[], Iterable[int]]) -> int:
    """Return the tokens of all answers."""
    return sum(answers())


def compare(name: str, *, rounds: int, num_tokens: int) -> dict[str, dict[str, float]]:
    """Return the speeds of one stream and of eight clients, by program."""
    own = psutil.Process()
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as running:
        programs = stream_programs(name, Path(scratch), num_tokens)
        servers = start_servers(Path(scratch), running)
        for _, address, model in servers.values():
            wait_for(address, model)
        streams: dict[str, list[float]] = {program: [] for program in programs}
        clients: dict[str, list[float]] = {program: [] for program in servers}
        with ThreadPoolExecutor(NUM_CLIENTS) as pool:
            for _ in range(rounds):
                for program, run in programs.items():
                    streams[program].append(rate(own, run))
                for program, (process, address, model) in servers.items():
                    answers = partial(pool.map, partial(ask, address, model), [num_tokens] * NUM_CLIENTS)
                    clients[program].append(rate(process, partial(total, answers)))
    return {
        "one stream": {program: statistics.median(values) for program, values in streams.items()},
        "eight clients": {program: statistics.median(values) for program, values in clients.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--rounds", type=int, default=3, help="turns of each program")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks/results/answers.json")
    args = parser.parse_args()
    results: dict[str, Any] = environment() | {"threads": torch.get_num_threads(), "models": {}}
    for name in args.models:
        results["models"][name] = speeds = compare(name, rounds=args.rounds, num_tokens=NUM_TOKENS[name])
        for kind, row in speeds.items():
            print(f"{name:8} {kind:14}", *(f"{program} {value:,.1f}" for program, value in row.items()), flush=True)
    args.output.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
