"""
hf_pretrain: pretrain and fine-tune MiniMind models with the Hugging Face stack.

Importing the package registers MiniMind with transformers' Auto classes and with peft. The Trainer and its arguments
are imported when they are first asked for.
"""

from importlib import import_module

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification

from .adapters import register_peft_defaults
from .configuration_minimind import PRESETS, MiniMindConfig
from .modeling_minimind import MiniMindForCausalLM, MiniMindForSequenceClassification, MiniMindModel


AutoConfig.register("minimind", MiniMindConfig, exist_ok=True)
AutoModel.register(MiniMindConfig, MiniMindModel, exist_ok=True)
AutoModelForCausalLM.register(MiniMindConfig, MiniMindForCausalLM, exist_ok=True)
AutoModelForSequenceClassification.register(MiniMindConfig, MiniMindForSequenceClassification, exist_ok=True)
register_peft_defaults()

_LAZY = {
    "MaskedLossTrainer": ".trainer",
    "DataArguments": ".arguments",
    "ModelArguments": ".arguments",
    "LMTrainingArguments": ".training_args",
    "parse_args": ".arguments",
}


def __getattr__(name: str):
    if name in _LAZY:
        return getattr(import_module(_LAZY[name], __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "PRESETS",
    "MiniMindConfig",
    "MiniMindForCausalLM",
    "MiniMindForSequenceClassification",
    "MiniMindModel",
    *_LAZY,
]
