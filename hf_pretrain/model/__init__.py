"""
The MiniMind model: its configuration and presets, the decoder, attention over packed documents, the experts and the loss.
It knows nothing of tokenizers, data or training.
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
