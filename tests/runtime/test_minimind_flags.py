"""The command lines of MiniMind's scripts, translated; the table of the docs is that of the data."""

import json
import runpy

import pytest
import torch
from safetensors.torch import load_file

from hf_pretrain.loading.model_arguments import ModelArguments
from hf_pretrain.rows.data_arguments import DataArguments
from hf_pretrain.runtime.minimind_flags import TABLE, translate_minimind
from hf_pretrain.runtime.parser import recipe_parser
from hf_pretrain.tokenizer.pretrained import find_tokenizer, load_tokenizer
from hf_pretrain.training.parsing import parse_args
from hf_pretrain.training.training_arguments import LMTrainingArguments
from hf_pretrain.weights import localizing
from recipes import evaluate, grpo
from tests.invariants.launching import BIN, ROOT, free_port, start
from tests.toys import toy_model, write_jsonl


# The command line that the project's founding document gives.
FOUNDING = (
    "--epochs 3 --batch_size 24 --learning_rate 2e-4 --dtype bfloat16 --accumulation_steps 32 --grad_clip 1.0 "
    "--log_interval 100 --save_interval 10000 --dim 1024 --n_layers 32 --max_seq_len 1024 --use_flash_attn --profile "
    "--profile_interval 10"
)
OVERRIDES = "--config_overrides hidden_size=512,intermediate_size=1664"
GROUPS = "--per_device_train_batch_size 12 --per_device_eval_batch_size 12 --num_generations 6"


def test_the_founding_command_line_means_minimind_s_training(tmp_path, capsys):
    argv = [*FOUNDING.split(), "--use_cpu", "--output_dir", str(tmp_path)]
    model, data, args = parse_args(ModelArguments, DataArguments, LMTrainingArguments, argv=argv)
    assert model.model_preset == "minimind2" and model.overrides == {"hidden_size": 1024, "num_hidden_layers": 32}
    assert (args.optim_preset, args.learning_rate, args.max_grad_norm, args.bf16) == ("adamw", 2e-4, 1.0, True)
    assert (args.num_train_epochs, data.max_length, args.rows_per_step) == (3, 1024, 24 * 32)
    # MiniMind counts micro-batches: 100 / 32 and 10000 / 32.
    assert (args.logging_steps, args.save_steps, args.profile_interval) == (3, 312, 10)
    assert "--preset minimind2" in capsys.readouterr().err


# A command line of MiniMind in each stage, and what it means. MiniMind counts micro-batches.
TRANSLATED = [
    (
        "sft --epochs 2 --from_weight a --hidden_size 512 --save_weight b",
        "--num_train_epochs 2 --output_dir out/b --model_name_or_path out/a",
    ),
    (
        "sft --epochs 2 --max_steps 5 --lora_name medical --save_dir w",
        "--num_train_epochs 2 --max_steps 5 --output_dir w/medical --use_peft --lora_target_modules q_proj o_proj "
        "--lora_alpha 16",
    ),
    (
        "dpo --ddp --batch_size 4 --beta 0.15 --accumulation_steps 4 --save_interval 10 --log_interval 9",
        "--per_device_train_batch_size 4 --beta 0.15 --gradient_accumulation_steps 4 --save_steps 2 --logging_steps 2",
    ),
    (
        "pretrain --hidden_size=512 --use_moe 1 --log_interval 2",
        f"--logging_steps 2 --preset minimind3-moe {OVERRIDES}",
    ),
    (
        "pretrain --dim 96 --preset tiny --device cuda:0 --ddp --from_resume 1 --use_compile 0",
        "--preset tiny --resume_from_checkpoint auto --torch_compile false --config_overrides hidden_size=96",
    ),
    (
        "distill --alpha 0.3 --teacher_hidden_size 768 --from_teacher_weight t",
        "--ce_weight 0.3 --teacher_name_or_path out/t",
    ),
    ("grpo --batch_size 2 --max_gen_len 9", f"--max_completion_length 9 {GROUPS}"),
    ("grpo --num_generations 4 --beta 0.1", "--num_generations 4 --beta 0.1"),
    (
        "grpo --tools calculator --max_gen_len 9 --batch_size 2 --max_seq_len 64",
        "--tools calculator --max_turn_length 9 --max_completion_length 2500 --max_tool_calling_iterations 2 "
        "--per_device_train_batch_size 8 --per_device_eval_batch_size 8 --num_generations 4",
    ),
    (
        "grpo --max_gen_len 9 --max_total_len 99 --max_tool_calling_iterations 5 --tools=calculator",
        "--max_turn_length 9 --max_completion_length 99 --max_tool_calling_iterations 5 --tools=calculator",
    ),
    (
        "evaluate --tasks tool_call --weight grpo --backend local --stream 1 --temperature 0 --max_seq_len 64",
        "--tasks tool_call --temperature 0 --max_length 64 --model_name_or_path out/grpo",
    ),
    (
        "evaluate --backend api --stream 0 --hidden_size 768 --save_dir a --weight full_sft",
        "--api_base_url http://localhost:11434/v1 --api_model jingyaogong/minimind-3:latest",
    ),
    (
        "chat --load_from model --weight full_sft --hidden_size 768 --historys 4 --open_thinking 0 --top_p 0.9",
        "--history 2 --think off --top_p 0.9 --model_name_or_path out/sft",
    ),
    (
        "serve --load_from out/a --use_moe 0 --lora_weight None --open_thinking 0 --device cpu",
        "--think off --use_cpu --model_name_or_path out/a",
    ),
]


@pytest.mark.parametrize(("line", "expected"), TRANSLATED, ids=[line.split()[0] for line, _ in TRANSLATED])
def test_flags_are_translated(line, expected):
    stage, *flags = line.split()
    assert translate_minimind(flags, stage) == expected.split()


# Every flag of MiniMind's train_agent.py, with its default, except those in `refused`. No tracker is installed here.
AGENT = (
    "--save_dir {0}/out --save_weight agent --epochs 1 --batch_size 2 --learning_rate 3e-7 --device cpu "
    "--dtype bfloat16 --num_workers 8 --accumulation_steps 1 --grad_clip 1.0 --log_interval 1 --save_interval 10 "
    "--hidden_size 768 --num_hidden_layers 8 --use_moe 0 --max_seq_len 1024 --max_gen_len 768 --max_total_len 2500 "
    "--data_path agent_rl.jsonl --num_generations 4 --beta 0.1 --loss_type cispo --epsilon 0.2 --epsilon_high 5.0 "
    "--from_weight full_sft --from_resume 0 --use_wandb --wandb_project A --use_compile 0 --debug_mode "
    "--thinking_ratio 0.1 --reward_model_path agent --rollout_engine torch --report_to none"
)


def test_a_whole_command_line_of_train_agent_is_read(tmp_path, monkeypatch):
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    monkeypatch.setattr("sys.argv", [str(ROOT / "recipes/grpo.py")])
    (tmp_path / "out").mkdir()
    (tmp_path / "out/full_sft_768.pth").touch()
    argv = ["--tools", "examples.agent_tools:TOOLS", *AGENT.format(tmp_path).split()]
    model, _, tasks, args = parse_args(*grpo.ARGUMENTS, stage="grpo", argv=argv)
    assert model.model_name_or_path == str(tmp_path / "out/full_sft_768.pth") and tasks.rewards == ["agent"]
    limits = (args.max_turn_length, args.max_completion_length, args.max_tool_calling_iterations)
    assert limits == (768, 2500, 2)
    assert (args.output_dir, args.per_device_train_batch_size, args.loss_type) == (f"{tmp_path}/out/agent", 8, "cispo")


# Every flag of MiniMind's eval_toolcall.py, with its default.
TOOLCALL = (
    "--load_from model --save_dir out --weight full_sft --hidden_size 768 --num_hidden_layers 8 --use_moe 0 "
    "--max_new_tokens 512 --temperature 0.9 --top_p 0.9 --show_speed 0 --device cpu --stream 1"
)
API = "--api_base_url http://localhost:11434/v1 --api_key sk-123 --api_model jingyaogong/minimind-3:latest"


@pytest.mark.parametrize(("backend", "model"), [("local", "out/sft"), ("api", None)])
def test_a_whole_command_line_of_eval_toolcall_is_read(backend, model, capsys):
    argv = f"--tasks tool_call {TOOLCALL} --backend {backend} {API if backend == 'api' else ''}".split()
    model_args, _, _, args = parse_args(*evaluate.ARGUMENTS, stage="evaluate", argv=argv)
    assert (args.max_new_tokens, args.temperature, args.top_p, args.tasks) == (512, 0.9, 0.9, "tool_call")
    assert "sk-123" not in capsys.readouterr().err
    assert model_args.model_name_or_path == model and args.api_base_url == (None if model else API.split()[1])


def test_an_adapter_is_found_by_its_name(tmp_path):
    (tmp_path / "medical").mkdir()
    line = ["--save_dir", str(tmp_path), "--weight", "full_sft", "--lora_weight", "medical"]
    assert translate_minimind(line, "chat") == ["--model_name_or_path", str(tmp_path / "medical")]


def test_a_lora_file_is_read_with_its_base_and_the_tokenizer_beside_out(talker, tmp_path, monkeypatch, capsys):
    """A checkout of MiniMind: weights and LoRA in `out`, the tokenizer in `model`."""
    monkeypatch.setattr(localizing, "COPIES", tmp_path / "copies")
    checkout, generator = tmp_path / "minimind", torch.Generator().manual_seed(0)
    for name in ("out", "model"):
        (checkout / name).mkdir(parents=True)
    load_tokenizer(talker).save_pretrained(checkout / "model")
    fields = {"qk_norm": True, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
    base = toy_model(vocab_size=len(load_tokenizer(talker)), hidden_size=64, **fields)
    weights = base.state_dict()
    torch.save(weights, checkout / "out/full_sft_64.pth")
    stem = "model.layers.0.self_attn.o_proj"
    a, b = (torch.randn(shape, generator=generator) for shape in ((16, 64), (64, 16)))
    torch.save({f"{stem}.lora.A.weight": a, f"{stem}.lora.B.weight": b}, checkout / "out/lora_x_64.pth")
    line = ["--save_dir", str(checkout / "out"), "--hidden_size", "64", "--lora_weight", "lora_x"]
    model = translate_minimind(line, "chat")[-1]
    merged = load_file(f"{model}/model.safetensors")
    torch.testing.assert_close(merged[f"{stem}.weight"], weights[f"{stem}.weight"] + b @ a)
    assert load_tokenizer(model).get_vocab() == load_tokenizer(talker).get_vocab()
    # It is merged into the model that the line names.
    (checkout / "out/full_sft_64.pth").rename(other := checkout / "out/other_64.pth")
    from_file = ["--weight", "None", "--load_from", str(other)]
    for base in (["--model_name_or_path", str(other)], ["--weight", "other"], from_file):
        found = load_file(f"{translate_minimind([*line, *base], 'chat')[-1]}/model.safetensors")
        torch.testing.assert_close(found[f"{stem}.weight"], merged[f"{stem}.weight"])
    other.rename(checkout / "out/full_sft_64.pth")
    # The tokenizer in `model` is that of files of MiniMind alone.
    (checkout / "out/model.safetensors").write_bytes(b"")
    assert find_tokenizer(checkout / "out/model.safetensors") is None
    monkeypatch.chdir(checkout / "out")
    assert find_tokenizer("full_sft_64.pth").get_vocab() == load_tokenizer(talker).get_vocab()
    monkeypatch.undo()
    # Without a LoRA, the file is read as it is.
    assert translate_minimind([*line[:4], "--weight", "full_sft"], "chat")[-1] == f"{checkout}/out/full_sft_64.pth"
    monkeypatch.setattr("sys.argv", ["chat.py", *line, "--prompt", "hello", "--max_new_tokens", "2", "--use_cpu"])
    runpy.run_path("recipes/chat.py", run_name="__main__")
    assert model in capsys.readouterr().err


def test_the_files_of_minimind_are_found_by_their_names(tmp_path, monkeypatch):
    (tmp_path / "full_sft_768.pth").touch()
    line = ["--save_dir", str(tmp_path), "--save_weight", "dpo", "--from_weight", "full_sft"]
    assert translate_minimind(line, "dpo")[-1] == str(tmp_path / "full_sft_768.pth")
    # With other weights, the settings of MiniMind come from the stage's file.
    monkeypatch.setattr("sys.argv", [str(ROOT / "recipes/dpo.py")])
    assert translate_minimind(line, "dpo")[-2:] == ["--config", str(ROOT / "recipes/base/dpo.yaml")]
    assert translate_minimind([*line, "--config", "a.yaml"], "dpo")[-1] == str(tmp_path / "full_sft_768.pth")


@pytest.mark.parametrize("stage", ["pretrain", "sft", "dpo", "distill", "grpo", "chat", "serve", "evaluate"])
def test_every_replacement_is_a_flag_of_the_stage(stage):
    known = {flag for action in recipe_parser(ROOT / f"recipes/{stage}.py")._actions for flag in action.option_strings}
    parts = {"evaluate": ["all", "answers", "evaluate"], "grpo": ["all", "agent"]}.get(
        stage, ["answers" if stage in ("chat", "serve") else "all"]
    )
    rules = {flag: rule for part in [*parts, stage] for flag, rule in TABLE.get(part, {}).items()}.items()
    if stage != "grpo":
        assert {flag for flag, _ in rules} & known == set()
    rules = [rule for flag, rule in rules if not (stage == "grpo" and flag in TABLE["refused"])]
    used = {word for rule in rules for word in " ".join(rule.values() if isinstance(rule, dict) else [rule]).split()}
    assert {word for word in used if word.startswith("--")} - known == set()


@pytest.mark.documents
def test_the_page_has_the_table():
    rows = "\n".join(runpy.run_path(str(ROOT / "docs/minimind_table.py"))["rows"]())
    assert rows in (ROOT / "docs/from-minimind.md").read_text(encoding="utf-8"), f"Paste:\n{rows}"


@pytest.mark.distributed
def test_the_founding_command_runs(tmp_path):
    """Two ranks of accelerate, with fewer layers and steps."""
    rows = write_jsonl(tmp_path / "data.jsonl", [f"the river has {number} green stones" for number in range(400)])
    words = FOUNDING.replace("1024 --n_layers 32", "64 --n_layers 2").replace("steps 32", "steps 2")
    words += f" --data_path {rows} --vocab_size 320 --max_steps 2 --save_dir {tmp_path} --save_weight pretrain"
    flags = "--multi_gpu --mixed_precision=bf16 --deepspeed_config_file ds_configs/zero2.json --num_processes=2"
    command = [str(BIN / "accelerate"), "launch", *flags.split(), f"--main_process_port={free_port()}"]
    result = start([*command, "recipes/pretrain.py", *words.split()])
    assert result.returncode == 0, result.stdout[-3000:]
    config = json.loads((tmp_path / "pretrain/config.json").read_text())
    assert (config["hidden_size"], config["num_hidden_layers"], config["num_attention_heads"]) == (64, 2, 8)


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        *(("batch_size", ""), ("n_layers", ""), ("use_wandb", ""), ("use_lora", ""), ("warmup_iters", "")),
        *(("learning_rat", "learning_rate"), ("maxlength", "max_length"), ("dataset", "dataset_name")),
    ],
)
def test_hints_are_related(word, expected):
    parser = recipe_parser(ROOT / "recipes/sft.py")
    known = [flag.lstrip("-") for action in parser._actions for flag in action.option_strings]
    assert parser.hint(word, known).rpartition(" ")[2] == expected


def test_the_names_of_other_toolkits_lead_to_flags_that_exist():
    known = recipe_parser(ROOT / "recipes/sft.py").flags | recipe_parser(ROOT / "recipes/dpo.py").flags
    others = {word: name for name, about in known.items() for word in about.get("also", "").split()}
    assert len(others) == 23 and not others.keys() & known.keys()
    assert others["cutoff_len"] == "max_length" and others["pref_beta"] == "beta"
