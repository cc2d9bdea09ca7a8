"""
hf_pretrain: pretrain and fine-tune MiniMind models with the Hugging Face stack.

Importing the package registers MiniMind with transformers' Auto classes and with peft. Only the model is imported at
once; every other name is imported on its first use.
"""

from importlib import import_module
from importlib.metadata import version

from .runtime.help_cache import print_kept_help
from .runtime.importing import collector_paused, hide_interrupts, limit_spinning, scipy_deferred


if __doc__ is None:
    raise ImportError("transformers needs docstrings, which PYTHONOPTIMIZE=2 and -OO remove. Use PYTHONOPTIMIZE=1.")
# The imports below take seconds.
print_kept_help()
hide_interrupts()
limit_spinning()
with collector_paused(), scipy_deferred():
    from transformers import (
        AutoConfig,
        AutoModel,
        AutoModelForCausalLM,
        AutoModelForQuestionAnswering,
        AutoModelForSequenceClassification,
        AutoModelForTokenClassification,
    )

    from .model import (
        PRESETS,
        MiniMindConfig,
        MiniMindForCausalLM,
        MiniMindForQuestionAnswering,
        MiniMindForSequenceClassification,
        MiniMindForTokenClassification,
        MiniMindModel,
    )
    from .weights.adapters import register_peft_defaults


AutoConfig.register("minimind", MiniMindConfig, exist_ok=True)
AutoModel.register(MiniMindConfig, MiniMindModel, exist_ok=True)
AutoModelForCausalLM.register(MiniMindConfig, MiniMindForCausalLM, exist_ok=True)
AutoModelForSequenceClassification.register(MiniMindConfig, MiniMindForSequenceClassification, exist_ok=True)
AutoModelForTokenClassification.register(MiniMindConfig, MiniMindForTokenClassification, exist_ok=True)
AutoModelForQuestionAnswering.register(MiniMindConfig, MiniMindForQuestionAnswering, exist_ok=True)
register_peft_defaults()

_LAZY = {
    "LMTrainingArguments": ".training.arguments",
    "MaskedLossTrainer": ".training.trainer",
    "export": ".weights.exporting",
    "load_upstream": ".weights.loading",
}


def __getattr__(name: str):
    if name == "__version__":
        return version("hf_pretrain")
    if name in _LAZY:
        return getattr(import_module(_LAZY[name], __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "PRESETS",
    "MiniMindConfig",
    "MiniMindForCausalLM",
    "MiniMindForQuestionAnswering",
    "MiniMindForSequenceClassification",
    "MiniMindForTokenClassification",
    "MiniMindModel",
    *_LAZY,
]
