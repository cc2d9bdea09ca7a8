"""Mistakes in the flags of a stage, its rewards and tasks, and its other models."""

import copy
import json
import sys
from types import SimpleNamespace

import torch
from datasets import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, PreTrainedConfig
from transformers.utils import get_json_schema

from hf_pretrain.data.formats import BadRecord
from hf_pretrain.inference.tools import calculator
from hf_pretrain.loading.adapters import KeepingArguments
from hf_pretrain.runtime.signals import UserCodeExit, guard_user_code
from hf_pretrain.stages.distillation import DistillationArguments, check_same_vocabulary, load_teacher
from hf_pretrain.stages.kl_to_base import BaseTerm
from hf_pretrain.stages.reinforcement import GENERATION_NAME, GRPOTrainingArguments, SavedGeneration, TaskArguments
from hf_pretrain.stages.reward_history import KnownFigures, TaskLevel
from hf_pretrain.stages.reward_training import RewardTrainingArguments
from hf_pretrain.stages.rewards import arithmetic_reward, format_reward, load_reward_functions, task_check
from hf_pretrain.tokenizer.training import train_tokenizer
from hf_pretrain.training.training_arguments import LMTrainingArguments
from tests.invariants.trl_trainers import make_records, make_trl_trainer
from tests.mistakes import Mistake
from tests.rollouts import says
from tests.toys import toy_model
from tests.trainers import small_tokenizer


def given(cls=GRPOTrainingArguments, **flags):
    return lambda tmp_path: cls(output_dir=str(tmp_path), use_cpu=True, **flags)


def type_a_flag_of_grpo(tmp_path, monkeypatch):
    """The presets give `--loss_type` this value, so that it is refused only if it is typed."""
    monkeypatch.setattr(sys, "argv", ["grpo.py", "--loss-type=cispo"])
    given(algorithm="rloo", loss_type="cispo")(tmp_path)


def run_without_the_models_code(tmp_path, monkeypatch):
    monkeypatch.setattr("hf_pretrain.stages.reinforcement.is_vllm_available", lambda: True)
    given(use_vllm=True, vllm_mode="colocate")(tmp_path)


def log_difference(difference):
    """Log the mean difference between the log-probabilities of vLLM and of the model, as TRL does."""
    logs = {"sampling/sampling_logp_difference/mean": difference}
    state = SimpleNamespace(global_step=1, log_history=[{}])
    KnownFigures().on_log(None, state, None, logs=logs)


def loaded(name):
    return lambda: load_reward_functions([name])


def judged_by(config):
    """Take a model with this config as a reward model."""
    return lambda tmp_path: (config.save_pretrained(tmp_path), load_reward_functions([f"{tmp_path}"]))


def score_with_a_number(monkeypatch):
    monkeypatch.setattr("tests.rollouts.long_reward", lambda completions, **columns: 1.0)
    (reward,) = load_reward_functions(["tests.rollouts:long_reward"])
    reward(completions=says("a", "b"))


def asked(content="Sky?", template=None, **options):
    """Check a task that offers a tool."""

    def make():
        tokenizer = copy.deepcopy(small_tokenizer())
        tokenizer.chat_template = template or tokenizer.chat_template
        message = {"role": "user", "content": content, "tools": json.dumps([get_json_schema(calculator)])}
        task_check(tokenizer, **{"rewards": [len], "max_prompt_length": 4000} | options)({"prompt": [message]})

    return make


def taught_by(*parts):
    """Distil from a directory with a model, and perhaps a tokenizer."""
    load = lambda path: load_teacher(str(path), small_tokenizer())  # noqa: E731
    return lambda tmp_path: ([part.save_pretrained(tmp_path) for part in parts], load(tmp_path))


def learn_more_tokens():
    longer = copy.deepcopy(small_tokenizer())
    longer.add_tokens(["<more>"])
    check_same_vocabulary(longer, small_tokenizer())


def synchronised(recipe, **flags):
    """Let the reference model follow a sharded policy, as with `--fsdp_size`."""

    def make(tmp_path, monkeypatch):
        monkeypatch.setattr(LMTrainingArguments, "shards_weights", True)
        make_trl_trainer(recipe, *make_records(4), output_dir=str(tmp_path), sync_ref_model=True, **flags)

    return make


def choose_a_level(tmp_path):
    args = GRPOTrainingArguments(output_dir=str(tmp_path), use_cpu=True)
    tasks = TaskArguments(["embedded:arithmetic"], rewards=["arithmetic"], task_level=2)
    tasks.prepare_tasks(args, small_tokenizer(), rewards=[arithmetic_reward], max_prompt_length=99)


def resume_with_other_batches(tmp_path):
    torch.save([(1, [{}])], tmp_path / GENERATION_NAME)
    args = SimpleNamespace(world_size=1, steps_per_generation=2)
    SavedGeneration().load(SimpleNamespace(args=args), str(tmp_path))


GPT2 = GPT2LMHeadModel(GPT2Config(vocab_size=320, n_embd=8, n_layer=1, n_head=2))
TWO_LABELS = LlamaConfig(num_labels=2, architectures=["LlamaForSequenceClassification"])
# The fields of internlm/internlm2-1_8b-reward, which MiniMind's trainers use.
CODE = "InternLM2ForRewardModel"
INTERNLM = PreTrainedConfig(architectures=[CODE], auto_map={"AutoModel": f"modeling_internlm2.{CODE}"})

MISTAKES = [
    Mistake("add --vllm_model_impl transformers --trust_remote_code true", run_without_the_models_code),
    Mistake("they differ by 0.51 nats per token.*own checkpoint", lambda: log_difference(0.51)),
    # Distillation.
    Mistake("--temperature 0.0 must be above 0", lambda: DistillationArguments("teacher", temperature=0.0)),
    Mistake("--ce_weight 1.5 must be at least 0 and at most 1", lambda: DistillationArguments("a", ce_weight=1.5)),
    Mistake("--kl_to_base 1.0 must be at least 0 and below 1", lambda: KeepingArguments(kl_to_base=1.0)),
    Mistake(
        "--kl_to_base compares with the base of an adapter: pass --use_peft, or --kl_to_base 0",
        lambda: BaseTerm(toy_model(), KeepingArguments(kl_to_base=0.5), LMTrainingArguments(use_cpu=True, bf16=False)),
    ),
    Mistake("Distillation needs a teacher: pass --teacher_name_or_path", lambda: DistillationArguments()),
    Mistake("holds no tokenizer.json", taught_by(toy_model())),
    Mistake("GPT2LMHeadModel may attend across the documents.*--packing none", taught_by(GPT2, small_tokenizer())),
    Mistake(
        r"differs from the student.s: id \d+ is '.+' there and '.+' here .*--tokenizer_name_or_path",
        lambda: check_same_vocabulary(small_tokenizer(), train_tokenizer(["quite different letters"] * 5)),
    ),
    Mistake(r"id \d+ is None there and '<more>' here", learn_more_tokens),
    # Preferences and reward models.
    Mistake(
        "1 rows do not fill one batch of 2",
        lambda tmp_path: make_trl_trainer(
            "dpo", *make_records(1), output_dir=str(tmp_path), per_device_train_batch_size=2
        ).train(),
    ),
    Mistake("--sync_ref_model: checkpoints would lack parts", synchronised("dpo")),
    Mistake("--sync_ref_model: checkpoints would", synchronised("grpo", beta=0.5)),
    Mistake("--fsdp_size.* shard no reward models", given(RewardTrainingArguments, fsdp_size=2)),
    Mistake("--tp_size.* shard no reward models", given(RewardTrainingArguments, tp_size=2)),
    # Flags of reinforcement learning.
    Mistake("--algorithm ppo is unknown. All: grpo, rloo", given(algorithm="ppo")),
    Mistake("--beta 0.1 needs a reference model, which --fsdp_size", given(fsdp_size=2, beta=0.1)),
    Mistake("--beta 0.2 needs a reference model, which .*--tp_size", given(tp_size=2, beta=0.2)),
    Mistake("needs a paged cache", given(use_transformers_continuous_batching=True)),
    Mistake("--temperature 0.0 must be above 0: training", given(temperature=0.0)),
    Mistake("--loss_type sappo is unknown; the nearest one is sapo", given(loss_type="sappo")),
    Mistake("--loss_type dr_grpo has no effect with --algo", given(algorithm="rloo", loss_type="dr_grpo")),
    Mistake("--scale_rewards batch has no effect", given(algorithm="rloo", scale_rewards="batch")),
    Mistake("--entropy_coef 0.1 has no effect", given(algorithm="rloo", entropy_coef=0.1)),
    Mistake("--loss_type cispo has no effect", type_a_flag_of_grpo),
    Mistake("1 micro-batches on each of 1 process", resume_with_other_batches),
    # Rewards.
    Mistake("--rewards fromat is unknown; the nearest one is format. All: .*path:function", loaded("fromat")),
    Mistake("--rewards :f is unknown", loaded(":f")),
    Mistake("--rewards ..a:f is unknown", loaded("..a:f")),
    Mistake("the module no_such_module cannot be imported", loaded("no_such_module:reward")),
    Mistake("stages.rewards has no function 'nothing'", loaded("hf_pretrain.stages.rewards:nothing")),
    # A module without a file.
    Mistake("sys has no function 'nothing'", loaded("sys:nothing")),
    Mistake("--rewards tests.rollouts:long_reward returned 1.0 for 2 completions. Return", score_with_a_number),
    Mistake("--rewards .* one label, and this one is Llama.* with 2 labels. Pass", judged_by(TWO_LABELS)),
    Mistake("--rewards .* one is MiniMindForCausalLM with 2 labels. Pass", judged_by(toy_model())),
    Mistake("or --trust_remote_code true if its own code has get_score", judged_by(INTERNLM)),
    Mistake(
        r"--tools exits:leave ended with SystemExit\(7\). Return a value",
        lambda: guard_user_code(sys.exit, "--tools exits:leave")(7),
        UserCodeExit,
    ),
    # Tasks.
    Mistake("--raise_level_at: no task has a higher level. Name", lambda: TaskLevel(Dataset.from_list([{}]), 0.5)),
    Mistake(
        "reasoning_gym:gcd needs its verifier: add reasoning_gym to --rewards",
        lambda: task_check(small_tokenizer(), rewards=[format_reward], max_prompt_length=9)(
            {"task": "reasoning_gym:gcd", "reasoning_gym": {"family": "gcd"}}
        ),
    ),
    Mistake("--task_level 2 needs a --dataset_name reasoning_gym:NAME", choose_a_level),
    Mistake("--raise_level_at 1.5 must be at least 0 and at most 1", given(raise_level_at=1.5)),
    Mistake("--rewards format arith.* no score", asked(rewards=[format_reward, arithmetic_reward]), BadRecord),
    Mistake("offers the tool calculator, which is not in --tools", asked(tools=[len]), BadRecord),
    Mistake("describes no tools", asked(template="{{ messages[0].content }}")),
    Mistake(
        "the prompt is longer than the 9 tokens .*drop the line", asked("long " * 9, max_prompt_length=9), BadRecord
    ),
]
