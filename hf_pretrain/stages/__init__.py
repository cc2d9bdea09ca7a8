"""
The stages beyond language modelling: distillation, preference training, reward models and reinforcement learning with
TRL, and all stages within a budget of time.

The package re-exports nothing, because TRL is an optional library.
"""
