"""TRL's own trainers, unchanged, on checkpoints of dense models and of models with experts."""

import pytest
import torch
from datasets import Dataset

from hf_pretrain.tokenizer.pretrained import save_tokenizer
from hf_pretrain.tokenizer.training import train_tokenizer
from tests.models import TEXT


trl = pytest.importorskip("trl")
MODELS = {"dense": {}, "experts": {"num_experts": 4, "num_shared_experts": 1, "router_aux_loss_coef": 0.1}}
QUESTION = [{"role": "user", "content": "walks"}]
ANSWERS = [[{"role": "assistant", "content": word}] for word in ("river", "steps")]
TRAINERS = {
    "SFT": {"messages": QUESTION + ANSWERS[0]},
    "DPO": {"prompt": QUESTION, "chosen": ANSWERS[0], "rejected": ANSWERS[1]},
    "GRPO": {"prompt": QUESTION},
    "Distillation": {"prompt": QUESTION},
    "Reward": {"prompt": QUESTION, "chosen": ANSWERS[0], "rejected": ANSWERS[1]},
}


@pytest.fixture(scope="module")
def checkpoints(build_model, tmp_path_factory):
    """Return the directories of a dense toy model and of a toy model with experts, with their tokenizer."""
    path = tmp_path_factory.mktemp("toys")
    tokenizer = train_tokenizer([TEXT, "some more words"], vocab_size=330)
    for name, overrides in MODELS.items():
        build_model(**overrides, vocab_size=len(tokenizer)).save_pretrained(path / name)
        save_tokenizer(tokenizer, path / name)
    return path


@pytest.mark.parametrize("trainer_name", TRAINERS)
@pytest.mark.parametrize("model_name", MODELS)
def test_a_step_of_trl_s_own_trainers(model_name, trainer_name, checkpoints, tmp_path):
    settings = {"max_steps": 1, "per_device_train_batch_size": 2, "use_cpu": True, "bf16": False, "report_to": "none"}
    settings |= {"output_dir": str(tmp_path), "save_strategy": "no", "disable_tqdm": True, "learning_rate": 1e-3}
    extra = {}
    if trainer_name == "GRPO":
        settings |= {"num_generations": 2, "max_completion_length": 8}
        extra = {"reward_funcs": lambda completions, **_: [float(i) for i in range(len(completions))]}
    if trainer_name == "Distillation":
        settings |= {"max_completion_length": 8}
        extra = {"teacher_model": str(checkpoints / model_name)}
    trainer = getattr(trl, f"{trainer_name}Trainer")(
        model=str(checkpoints / model_name),
        args=getattr(trl, f"{trainer_name}Config")(**settings),
        train_dataset=Dataset.from_list([TRAINERS[trainer_name]] * 4),
        **extra,
    )
    if trainer_name == "Distillation":
        # The teacher has other weights, or there would be nothing to learn.
        with torch.no_grad():
            trainer.teacher_model.lm_head.weight.add_(torch.randn_like(trainer.teacher_model.lm_head.weight))
    before = {name: parameter.clone() for name, parameter in trainer.model.named_parameters()}
    trainer.train()
    assert any(not torch.equal(before[name], parameter) for name, parameter in trainer.model.named_parameters())
