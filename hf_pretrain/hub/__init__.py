"""
The Hugging Face Hub: model cards, the list of files that may be published, pushes, and downloads of checkpoints.
`training` decides when to push.
"""

from .model_card import RunFacts
from .repository import HubPusher, create_repository, push_folder


__all__ = ["HubPusher", "RunFacts", "create_repository", "push_folder"]
