"""
hf_pretrain: pretrain and fine-tune MiniMind models with the Hugging Face stack.

Importing the package registers MiniMind with transformers' Auto classes, here and in every checkpoint. The Trainer and its arguments are imported
when they are first asked for.
"""

from importlib import import_module

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from .configuration_minimind import PRESETS, MiniMindConfig
from .modeling_minimind import MiniMindForCausalLM, MiniMindModel


AutoConfig.register("minimind", MiniMindConfig, exist_ok=True)
AutoModel.register(MiniMindConfig, MiniMindModel, exist_ok=True)
AutoModelForCausalLM.register(MiniMindConfig, MiniMindForCausalLM, exist_ok=True)
# Every checkpoint carries its code, so that it loads where this package is not installed.
MiniMindConfig.register_for_auto_class()
MiniMindModel.register_for_auto_class("AutoModel")
MiniMindForCausalLM.register_for_auto_class("AutoModelForCausalLM")

_LAZY = {
    "MaskedLossTrainer": ".trainer",
    "DataArguments": ".arguments",
    "ModelArguments": ".arguments",
    "LMTrainingArguments": ".arguments",
    "parse_args": ".arguments",
}


def __getattr__(name: str):
    if name in _LAZY:
        return getattr(import_module(_LAZY[name], __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = ["PRESETS", "MiniMindConfig", "MiniMindForCausalLM", "MiniMindModel", *_LAZY]
