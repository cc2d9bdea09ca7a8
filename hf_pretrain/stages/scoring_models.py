"""
Reward models: sequence classifiers with one label, which TRL loads itself, and models with a method `get_score` of
their own code, such as the internlm2-1_8b-reward of MiniMind's trainers.
"""

from collections.abc import Callable
from typing import Any

import torch
from accelerate import PartialState
from transformers import AutoModel, AutoTokenizer, PreTrainedConfig

from ..runtime.errors import UserError, as_user_errors
from ..runtime.signals import guard_user_code
from ..training.deepspeed_support import whole_weights
from .minimind_rewards import Completion, answer_in, calls_in, clip, turns_of


class ScoringModel:
    """
    Reward function of a model that scores a conversation by `get_score(tokenizer, messages)`.

    The score is clipped to ±3. A rollout with tool calls gets none, because such models judge answers to people.
    """

    def __init__(self, name: str):
        # TRL logs the reward by this name.
        self.__name__ = name.rstrip("/").rpartition("/")[2]
        device = PartialState().device
        dtype = torch.float32 if device.type == "cpu" else torch.float16
        with whole_weights(), as_user_errors():
            self.tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=True)
            loaded = AutoModel.from_pretrained(name, dtype=dtype, trust_remote_code=True)
            # NOTE: transformers 5 creates models without memory, and fills only what the checkpoint holds. Tables that
            # the constructor computes, such as a rotary embedding, would hold arbitrary numbers. So construct again.
            self.model = AutoModel.from_config(loaded.config, dtype=dtype, trust_remote_code=True)
            self.model.load_state_dict(loaded.state_dict())
        self.model.to(device).eval()

    @torch.no_grad()
    def __call__(self, prompts: list[Any], completions: list[Completion], **columns: Any) -> list[float | None]:
        scores: list[float | None] = []
        for prompt, turns in zip(prompts, map(turns_of, completions), strict=True):
            messages = [{"role": part["role"], "content": part["content"].strip()} for part in prompt]
            messages.append({"role": "assistant", "content": answer_in(turns[-1])})
            is_agent = any(map(calls_in, turns))
            scores.append(None if is_agent else clip(self.model.get_score(self.tokenizer, messages)))
        return scores


def load_reward_model(name: str, *, trust_remote_code: bool) -> Callable[..., list[float | None]] | str:
    """
    Return a reward model, or the name of one that TRL loads itself.

    Raises:
        `UserError`: for a model without a score. transformers loads most of them with a random head, which would give
            random rewards, or fails.
    """
    try:
        config, _ = PreTrainedConfig.get_config_dict(name)
    except OSError as error:
        raise UserError(f"--rewards {name} is no reward model that can be read: {error}") from error
    architectures = ", ".join(config.get("architectures") or ["of no known architecture"])
    # A config without names for its labels has two.
    num_labels = len(config.get("id2label") or range(2))
    if architectures.endswith("ForSequenceClassification") and num_labels == 1:
        return name
    if trust_remote_code and "AutoModel" in config.get("auto_map", {}):
        flag = f"--rewards {name}"
        return guard_user_code(guard_user_code(ScoringModel, flag)(name), flag)
    raise UserError(
        f"--rewards {name}: a reward model must be a sequence classifier with one label, and this one is "
        f"{architectures} with {num_labels} labels. Pass another one, a function (module.path:function) that calls "
        "this one, or --trust_remote_code true if its own code has get_score(tokenizer, messages)."
    )
