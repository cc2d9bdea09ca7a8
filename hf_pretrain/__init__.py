"""
hf_pretrain: pretrain and fine-tune MiniMind models with the Hugging Face stack.

Importing the package registers MiniMind with transformers, and changes nothing else in the process. Only the model is
imported at once; every other name is imported on its first use.
"""

import gc
import signal
import sys
from importlib import import_module
from pathlib import Path


# Ctrl-C ends a recipe without a traceback of what it imports here. Other programs keep their handler.
_HERE = Path(__file__).resolve().parent
_IS_RECIPE = Path(sys.argv[0]).resolve().parent in (_HERE / "recipes", _HERE.parent / "recipes")
if _IS_RECIPE and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)

if sys.platform == "win32":
    # NOTE: on Windows, a process that imports torch before pyarrow, which datasets needs, may end without a message
    # (https://github.com/jingyaogong/minimind/issues/771).
    import pyarrow  # noqa: F401

# torch and transformers create about a million objects that live until the process ends. The garbage collector would
# search all of them again and again: a quarter of the time of the import.
collects = gc.isenabled()
gc.disable()
try:
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification

    from .model.configuration_minimind import MiniMindConfig
    from .model.modeling_minimind import MiniMindForCausalLM, MiniMindForSequenceClassification, MiniMindModel
    from .model.presets import PRESETS
finally:
    if collects:
        gc.enable()


AutoConfig.register("minimind", MiniMindConfig, exist_ok=True)
AutoModel.register(MiniMindConfig, MiniMindModel, exist_ok=True)
AutoModelForCausalLM.register(MiniMindConfig, MiniMindForCausalLM, exist_ok=True)
AutoModelForSequenceClassification.register(MiniMindConfig, MiniMindForSequenceClassification, exist_ok=True)

_LAZY = {
    "LMTrainingArguments": ".training.training_arguments",
    "MaskedLossTrainer": ".training.masked_loss_trainer",
    "export": ".weights.exporting",
    "load_upstream": ".weights.importing",
}


def __getattr__(name: str):
    if name == "__version__":
        # It takes too long for an import before the handler of Ctrl-C.
        from importlib.metadata import version

        return version("hf_pretrain")
    if name in _LAZY:
        return vars(import_module(_LAZY[name], __name__))[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "PRESETS",
    "MiniMindConfig",
    "MiniMindForCausalLM",
    "MiniMindForSequenceClassification",
    "MiniMindModel",
    *_LAZY,
]
