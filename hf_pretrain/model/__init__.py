"""
The MiniMind model: configuration, presets, decoder, attention over packed sequences, experts and loss.

This package is the lowest layer but one. It imports `runtime` at most and knows nothing of tokenizers, data or
training. The modules in `configuration_minimind.CODE_FILES` travel to the Hub with every checkpoint and import only
each other; `presets` and `config_fields` stay here.
"""

from .configuration_minimind import MiniMindConfig
from .modeling_minimind import MiniMindForCausalLM, MiniMindForSequenceClassification, MiniMindModel
from .presets import PRESETS


__all__ = [
    "PRESETS",
    "MiniMindConfig",
    "MiniMindForCausalLM",
    "MiniMindForSequenceClassification",
    "MiniMindModel",
]
