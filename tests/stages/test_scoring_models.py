"""Reward models: classifiers with one label, and models that score by their own code."""

import json
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForSequenceClassification

from hf_pretrain.runtime.errors import UserError
from hf_pretrain.stages.rewards import load_reward_functions
from tests.rollouts import call, toy_trainer


def save_classifier(path: Path, **fields) -> None:
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    LlamaForSequenceClassification(LlamaConfig(**{"vocab_size": 16} | sizes | fields)).save_pretrained(path)


SCORER = """
import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel


class ScorerConfig(PreTrainedConfig):
    model_type = "scorer"


class ScorerForRewardModel(PreTrainedModel):
    config_class = ScorerConfig
    _tied_weights_keys = ["v_head.weight"]

    def __init__(self, config):
        super().__init__(config)
        self.v_head = nn.Linear(1, 1, bias=False)
        self.register_buffer("table", torch.arange(9.0), persistent=False)
        self.post_init()

    def get_score(self, tokenizer, chat):
        text = tokenizer.apply_chat_template(chat, tokenize=False)
        assert torch.is_inference_mode_enabled() or not torch.is_grad_enabled()
        return self.v_head(self.table[-1:] * len(text)).item()
"""


def save_scorer(path: Path, tokenizer) -> None:
    """Save a reward model like internlm2-1_8b-reward: its code scores, and its constructor computes a table."""
    path.mkdir()
    (path / "modeling_scorer.py").write_text(SCORER)
    names = {"AutoConfig": "modeling_scorer.ScorerConfig", "AutoModel": "modeling_scorer.ScorerForRewardModel"}
    config = {"model_type": "scorer", "architectures": ["ScorerForRewardModel"], "tie_word_embeddings": False}
    (path / "config.json").write_text(json.dumps(config | {"auto_map": names}))
    save_file({"v_head.weight": torch.tensor([[0.002]])}, path / "model.safetensors", {"format": "pt"})
    tokenizer.save_pretrained(path)


def test_reward_models_score_by_their_own_code_or_as_classifiers(tokenizer, tmp_path):
    save_scorer(tmp_path / "scorer", tokenizer)
    save_classifier(tmp_path / "classifier", num_labels=1, vocab_size=360, pad_token_id=0)
    tokenizer.save_pretrained(tmp_path / "classifier")
    names = [f"{tmp_path}/scorer", f"{tmp_path}/classifier"]
    with pytest.raises(UserError):
        load_reward_functions(names)
    rewards = load_reward_functions(names, trust_remote_code=True)
    prompt = [{"role": "user", "content": " Sky? ", "tools": None}]
    chat = [{"role": "user", "content": "Sky?"}, {"role": "assistant", "content": "Blue."}]
    score = 8 * 0.002 * len(tokenizer.apply_chat_template(chat, tokenize=False))
    completions = ["Hm.</think> Blue. ", "long " * 200, call("set_timer")]
    assert rewards[0]([prompt] * 3, completions) == [pytest.approx(score), 3.0, None]
    data = {"reward_funcs": rewards, "train_dataset": Dataset.from_list([{"prompt": prompt}] * 4)}
    trainer = toy_trainer(tokenizer, tmp_path, trainer=data, max_steps=1)
    trainer.train()
    assert {"rewards/scorer/mean", "rewards/classifier/mean"} <= trainer.state.log_history[0].keys()
