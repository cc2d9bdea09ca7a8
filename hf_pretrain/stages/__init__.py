"""
The stages beyond language modelling: distillation, preference training and reinforcement learning with TRL,
evaluation, chat and serving.

The package re-exports nothing. Each module has its own optional libraries (trl, lm_eval, fastapi), and a recipe
imports only the module that it needs.
"""
