"""Runs that push over real HTTP, processes that load without this package, and data that must stay on the machine."""

import json
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard
from safetensors.torch import load, load_file

from hf_pretrain import MiniMindForCausalLM
from hf_pretrain.model.configuration_minimind import CODE_FILES
from hf_pretrain.runtime.errors import UserError
from hf_pretrain.weights.importing import load_upstream
from hf_pretrain.weights.weight_files import resolve
from tests.faults.driving import wait_for
from tests.hub_server import TOKEN, HubServer, Repo, connect
from tests.invariants.launching import ROOT, launcher_command, process_options, start
from tests.models import GOLDEN
from tests.test_recipes import RECIPE, toy_arguments


CODE = set(CODE_FILES)
WEIGHTS = {"config.json", "generation_config.json", "model.safetensors", "README.md"}
MODEL = WEIGHTS | CODE
TOKENIZER = {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
CHECKPOINT = {"optimizer.pt", "scheduler.pt", "trainer_state.json", "model.safetensors", "config.json"}
CONSTANT = "--lr_scheduler_type constant --warmup_steps 0"
PUSH = "--push_to_hub --hub_model_id toy"
SAVE = "--save_strategy steps --save_steps 1"


@pytest.fixture
def environment(hub) -> dict[str, str]:
    return hub.client_environment()


def push(
    hub: HubServer, toys: Path, words: str, output_dir: Path, launcher: str = "python"
) -> subprocess.CompletedProcess[str]:
    """Run the recipe on toy data, and check that the token is nowhere but in the Authorization header."""
    command = [*launcher_command(launcher), RECIPE, *toy_arguments(toys, ""), *words.split()]
    result = start([*command, "--output_dir", str(output_dir)], **hub.client_environment())
    assert result.returncode == 0, result.stdout[-4000:]
    assert TOKEN.encode() not in hub.bytes_received() + result.stdout.encode()
    return result


@pytest.fixture
def run(toys, hub, tmp_path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Return a function that pushes a run to this test's Hub."""

    def run_recipe(words: str, *, launcher: str = "python", output_dir: str = "run"):
        return push(hub, toys, words, tmp_path / output_dir, launcher)

    return run_recipe


STEPS = (1, 2, 3)
EVERY_STEP = f"--hub_language en --learning_rate 3e-4 {SAVE} --max_steps 3 --save_total_limit 1"


@pytest.fixture(scope="module")
def pushed(toys, tmp_path_factory) -> tuple[Repo, Path]:
    """Return the repository and the directory of a run that pushed each of its checkpoints."""
    path = tmp_path_factory.mktemp("pushed") / "run"
    with HubServer() as hub:
        # Each push lasts longer than the checkpoint, which the next one rotates away.
        hub.preupload_seconds = 0.7
        words = f"{PUSH} {EVERY_STEP} --hub_strategy all_checkpoints --hub_always_push true"
        assert "failed" not in push(hub, toys, words, path).stdout.lower()
        return hub.repos["user/toy"], path


@pytest.fixture
def publish(hub, monkeypatch, tmp_path) -> Callable[..., None]:
    """Return a function that puts a repository on this process's Hub."""
    connect(monkeypatch, hub.endpoint, str(tmp_path / "cache"))

    def publish_files(name: str, files: dict[str, str | bytes]) -> None:
        hub.repos[f"user/{name}"] = Repo(private=False)
        encoded = {path: text.encode() if isinstance(text, str) else text for path, text in files.items()}
        hub.repos[f"user/{name}"].commit("all", encoded)

    return publish_files


def files_of(hub: HubServer, repo_id: str = "user/toy") -> set[str]:
    return set(hub.repos[repo_id].files) - {".gitattributes"}


PULL = """
import sys, torch
sys.modules["hf_pretrain"] = None  # as where it is not installed
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
assert type(model).__module__.startswith("transformers_modules")
assert tokenizer.chat_template and model.generation_config.eos_token_id == tokenizer.eos_token_id
assert model.model.rotary_emb.pos_cis.is_complex()
torch.save(model(torch.arange(20)[None]).logits, sys.argv[2])
model.save_pretrained(sys.argv[3])
again = AutoModelForCausalLM.from_pretrained(sys.argv[3], trust_remote_code=True)
assert torch.equal(again(torch.arange(20)[None]).logits, torch.load(sys.argv[2]))
assert "modeling_minimind.MiniMindForCausalLM" == again.config.auto_map["AutoModelForCausalLM"].split("--")[-1]
assert "--" not in open(sys.argv[3] + "/config.json").read()
AutoModel.from_pretrained(sys.argv[1], trust_remote_code=True)
"""


def pull_logits(repo_id: str, environment: dict[str, str], tmp_path: Path) -> torch.Tensor:
    home = {"HF_HOME": str(tmp_path / "another_home")}
    command = [sys.executable, "-c", PULL, repo_id, str(tmp_path / "logits.pt"), str(tmp_path / "again")]
    result = start(command, cwd=tmp_path, fresh=True, **environment | home)
    assert result.returncode == 0, result.stdout[-3000:]
    assert {path.name for path in (tmp_path / "again").iterdir()} >= CODE
    return torch.load(tmp_path / "logits.pt")


@pytest.mark.distributed
@pytest.mark.slow
def test_two_processes_push_and_anybody_loads(run, hub, environment, tmp_path):
    words = f"{PUSH} --hub_strategy checkpoint --hub_private_repo true {SAVE} --save_total_limit 1"
    result = run(f"{words} --report_to tensorboard", launcher="torchrun")
    assert f"Hub                {hub.endpoint}/user/toy\n" in result.stdout
    repo = hub.repos["user/toy"]
    assert repo.private
    assert files_of(hub) >= MODEL | TOKENIZER | {"trainer_state.json"}
    whole = {path.removeprefix("checkpoint-2/") for path in files_of(hub) if path.startswith("checkpoint-")}
    assert whole >= CHECKPOINT | {"rng_state_0.pth", "rng_state_1.pth"}
    assert json.loads(repo.files["checkpoint-2/trainer_state.json"])["global_step"] == 2
    # --hub_strategy asks for the optimizer state as part of a checkpoint, so it must not be anywhere else.
    assert not [path for path in files_of(hub) - {f"checkpoint-2/{name}" for name in whole} if ".pt" in path]

    local = MiniMindForCausalLM.from_pretrained(tmp_path / "run")
    logits = local(torch.arange(20)[None]).logits
    torch.testing.assert_close(pull_logits("user/toy", environment, tmp_path), logits, rtol=0, atol=1e-6)

    # No file has the token, and no file has Trainer's pickled arguments.
    received = hub.bytes_received()
    assert len(received) > 100_000 and b"rms_norm_eps" in received
    assert any(TOKEN in request.headers.get("authorization", "") for request in hub.requests)
    folders = (tmp_path / "run", Path(environment["HF_HOME"]))
    paths = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
    assert len(paths) > 20 and any("events" in path.name for path in paths)
    assert not [path for path in paths if TOKEN.encode() in path.read_bytes()]
    assert not [path for path in [*files_of(hub), *map(str, paths)] if "training_args" in path]
    assert not list((tmp_path / "run").glob(".hub-*"))


@pytest.mark.distributed
@pytest.mark.slow
def test_zero2_checkpoints_travel(run, hub, tmp_path):
    """The optimizer state of both ranks is one file, as under every launcher."""
    zero2 = f"--deepspeed {ROOT}/ds_configs/zero2.json"
    result = run(f"{zero2} {SAVE} {PUSH} --hub_strategy checkpoint {CONSTANT}", launcher="deepspeed")
    # DeepSpeed itself does not remove its buffers. The names of this run's buffers hold its port.
    port = result.args[result.args.index("--master_port") + 1]
    assert not list(Path("/dev/shm").glob(f"deepspeed_allreduce_buffer_*_{port}_*"))
    assert "checkpoint-2/optimizer.pt" in files_of(hub)
    assert not [path for path in files_of(hub) if "zero_to" in path or "global_step" in path]
    assert "deepspeed, DeepSpeed ZeRO-2" in hub.repos["user/toy"].files["README.md"].decode()


@pytest.mark.distributed
@pytest.mark.slow
def test_a_model_sharded_by_fsdp_has_our_code(run, hub):
    """FSDP2 replaces the model's class by one of torch's."""
    run(f"--fsdp_size 2 {PUSH} --hub_strategy end", launcher="torchrun")
    assert files_of(hub) == MODEL | TOKENIZER | {"trainer_state.json"}
    assert json.loads(hub.repos["user/toy"].files["config.json"])["architectures"] == ["MiniMindForCausalLM"]


@pytest.mark.slow
def test_every_checkpoint_is_pushed(pushed):
    repo, _ = pushed
    assert {path.split("/")[0] for path in repo.files if "/" in path} == {f"checkpoint-{step}" for step in STEPS}
    assert repo.files.keys() >= MODEL | TOKENIZER
    assert [message for _, message in repo.commits[1:]] == [*(f"Step {step}" for step in STEPS), "End of training"]
    final = load(repo.files["model.safetensors"])
    for step, (sha, _) in zip(STEPS, repo.commits[1:], strict=False):
        # Each commit has the model and the card of its step, even if it is late.
        files = repo.snapshots[sha]
        assert f"reached step {step} of 3" in files["README.md"].decode()
        is_last = load(files["model.safetensors"])["model.norm.weight"].equal(final["model.norm.weight"])
        assert is_last == (step == 3)
        assert json.loads(repo.files[f"checkpoint-{step}/trainer_state.json"])["global_step"] == step


@pytest.mark.slow
def test_a_second_signal_ends_the_wait_for_a_push(toys, hub, environment, tmp_path):
    """The first signal is SIGHUP, as when an ssh session closes."""
    # Longer than the test waits.
    hub.preupload_seconds = 300
    words = f"{PUSH} {SAVE} --max_steps 100000 --save_total_limit 2 --output_dir {tmp_path}/run"
    command = [sys.executable, RECIPE, *toy_arguments(toys, ""), *words.split()]
    with subprocess.Popen(command, **process_options(**environment)) as process:
        assert wait_for(lambda: list((tmp_path / "run").glob("checkpoint-*")), process), process.stdout.read()
        process.send_signal(signal.SIGHUP)
        # The second signal counts from two seconds after the process has handled the first.
        while process.poll() is None:
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=3)
            process.send_signal(signal.SIGTERM)
        output = process.stdout.read()
    assert process.returncode == 128 + signal.SIGHUP, output[-3000:]
    assert "Stopped by SIGHUP" in output and "was cancelled" in output
    # The process did not wait for the uploading threads either: they would have ended with a commit.
    assert not [message for _, message in hub.repos["user/toy"].commits if message.startswith("Step")]
    assert list((tmp_path / "run").glob("checkpoint-*"))


@pytest.mark.slow
def test_a_run_resumes_from_the_hub(run, pushed, tmp_path):
    """Another machine resumes the run and ends with the same bits as an uninterrupted run."""
    repo, whole = pushed
    for name in (name for name in repo.files if name.startswith("checkpoint-2/")):
        (tmp_path / "second" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "second" / name).write_bytes(repo.files[name])
    # A kill in the middle of a push leaves such a directory.
    (tmp_path / "second/.hub-old/checkpoint-2").mkdir(parents=True)
    result = run(f"{EVERY_STEP} --resume_from_checkpoint auto", output_dir="second")
    assert "Resuming from" in result.stdout and "checkpoint-2." in result.stdout
    expected, found = (load_file(path / "model.safetensors") for path in (whole, tmp_path / "second"))
    assert all(torch.equal(weight, found[name]) for name, weight in expected.items())
    assert not list((tmp_path / "second").glob(".hub-*"))


def test_one_file_of_a_repository_is_named_and_no_other_is_downloaded(publish, hub, input_ids):
    golden = GOLDEN / "C_dense"
    content = (golden / "weights.pth").read_bytes()
    files = {"config.json": (golden / "config.json").read_bytes(), "full_sft_32.pth": content, "pretrain_32.pth": b"x"}
    publish("several", files | {"out/full_sft_32.pth": content, "dataset.json": "{}"})
    with pytest.raises(UserError):
        load_upstream("user/several")
    assert not [request.path for request in hub.requests if request.path.endswith(".pth")]

    expected = load_upstream(golden)(input_ids).logits
    assert torch.equal(load_upstream("user/several:full_sft_32.pth")(input_ids).logits, expected)
    downloaded = resolve("user/several:full_sft_32.pth").parent
    assert {path.name for path in downloaded.iterdir()} == {"config.json", "full_sft_32.pth"}
    assert resolve("user/several:out/full_sft_32.pth").read_bytes() == content


def test_a_conversion_downloads_one_format_and_no_checkpoints(publish):
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    shards = {"model.safetensors.index.json": json.dumps(index)} | {name: "a" for name in index["weight_map"].values()}
    others = {"pytorch_model.bin": "c", "optimizer.bin": "d", "checkpoint-1/model.safetensors": "e"}
    publish("formats", {"config.json": "{}"} | shards | others)
    assert {path.name for path in resolve("user/formats").iterdir()} == {"config.json", *shards}


@pytest.mark.slow
def test_a_push_that_fails_loses_nothing(run, hub, tmp_path):
    hub.fail = lambda method, path: 403 if "/commit/" in path else None
    last_line = run(f"{PUSH} {SAVE}").stdout.strip().splitlines()[-1]
    assert last_line.startswith("Hub                FAILED: The push to user/toy failed: 403")
    assert f"`hf upload user/toy {tmp_path / 'run'} --include=README.md --include=" in last_line
    assert "--include=model.safetensors" in last_line and "manifest" not in last_line
    assert load_file(tmp_path / "run/model.safetensors") and (tmp_path / "run/checkpoint-2").is_dir()

    # A failed push during the run does not prevent the push at the end.
    failures = [500]
    hub.fail = lambda method, path: failures.pop() if failures and "/commit/" in path else None
    last_line = run(f"{PUSH}2 {SAVE}", output_dir="second").stdout.strip().splitlines()[-1]
    assert last_line.startswith(f"Hub                {hub.endpoint}/user/toy2 (1 pushes during the run failed: ")
    assert "model.safetensors" in files_of(hub, "user/toy2")


@pytest.mark.slow
def test_the_model_is_saved_before_the_run_waits_for_the_hub(toys, hub, environment, tmp_path):
    """The Hub accepts the commit of a checkpoint and does not answer."""
    over = threading.Event()
    hub.fail = lambda method, path: over.wait(300) and None if "/commit/" in path else None
    words = f"{PUSH} {SAVE} --output_dir {tmp_path}/run"
    command = [sys.executable, RECIPE, *toy_arguments(toys, ""), *words.split()]
    with subprocess.Popen(command, **process_options(**environment)) as process:
        # Trainer writes the state last.
        assert wait_for(lambda: list((tmp_path / "run").glob("trainer_state.json")), process), process.stdout.read()
        assert load_file(tmp_path / "run/model.safetensors") and process.poll() is None
        over.set()
        output = process.stdout.read()
    assert process.returncode == 0 and f"Hub                {hub.endpoint}/user/toy\n" in output, output[-3000:]


@pytest.mark.slow
def test_the_card_has_the_metrics_of_the_run(pushed):
    repo, directory = pushed
    text = repo.files["README.md"].decode()
    data = ModelCard(text).data
    # The run has no --hub_license.
    assert (data.license, data.language, data.to_dict()["library_name"]) == (None, ["en"], "transformers")
    assert (data.pipeline_tag, data.tags) == ("text-generation", ["minimind", "hf_pretrain"])
    state = json.loads((directory / "trainer_state.json").read_text())
    evaluation = [entry for entry in state["log_history"] if "eval_loss" in entry][-1]
    results = {result.metric_type: result.metric_value for result in data.eval_results}
    assert results.keys() == {"loss", "perplexity", "bits_per_byte"}
    assert results["loss"] == pytest.approx(evaluation["eval_loss"], abs=1e-6)
    assert f"| validation loss (nats per token) | {evaluation['eval_loss']:.4f} |" in text
    assert f"| tokens seen | {state['num_input_tokens_seen']:,} |" in text
    assert re.search(r"- Training: \d+ documents, [\d,]+ tokens in \d+ .*\n- Validation: \d+ documents, ", text)
    parameters = sum(tensor.numel() for tensor in load_file(directory / "model.safetensors").values())
    assert f"| parameters | {parameters:,} |" in text
    assert "- Datasets: train.jsonl\n" in text and str(directory.parent) not in text
    assert "| learning rate | 0.0003, warmup 0.02, cosine_with_min_lr" in text
    assert "| launcher | python, one process |" in text and "| hardware | 1 process(es) on CPU" in text
    assert "AutoModelForCausalLM.from_pretrained(\"user/toy\", trust_remote_code=True)" in text  # fmt: skip


@pytest.mark.slow
def test_conversions_are_pushed(hub, environment, tmp_path):
    command = [sys.executable, str(ROOT / "recipes/convert.py"), "--from", str(GOLDEN / "C_dense"), "--push"]
    options = ["--to", str(tmp_path / "toy"), "--format", "qwen3", "--dtype", "float16", "--hub_license", "mit"]
    result = start([*command, *options, "--hub_private_repo"], **environment)
    assert result.returncode == 0, result.stdout[-4000:]
    assert f"Pushed to {hub.endpoint}/user/toy" in result.stdout
    assert hub.repos["user/toy"].private
    assert files_of(hub) == WEIGHTS
    text = hub.repos["user/toy"].files["README.md"].decode()
    difference = result.stdout.split("largest logit difference on 8 rows ")[1].split()[0]
    assert float(difference) > 1e-4
    assert f"qwen3, float16: read back; largest logit difference on 8 rows {difference}" in text
    assert ModelCard(text).data.license == "mit" and "trust_remote_code" not in text and str(tmp_path) not in text
    assert "This repository holds no tokenizer" in text


@pytest.mark.slow
def test_a_gguf_file_is_pushed_with_its_modelfile(hub, environment, talker, tmp_path):
    command = [sys.executable, str(ROOT / "recipes/convert.py"), "--from", str(talker), "--to", str(tmp_path / "toy")]
    result = start([*command, "--format", "gguf", "--push"], **environment)
    assert result.returncode == 0, result.stdout[-4000:]
    assert {"model.gguf", "Modelfile", "README.md"} <= files_of(hub)
