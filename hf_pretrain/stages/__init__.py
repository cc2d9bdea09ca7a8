"""
The stages beyond language modelling: distillation, preference and reinforcement training with TRL, evaluation, chat
and serving.

Importing the package loads none of them: each has its own optional libraries (trl, lm_eval, fastapi), and a recipe
imports the one that it needs.
"""
