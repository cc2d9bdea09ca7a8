"""
Measures of a trained model: validation loss, tasks of lm-eval, tool calls, and losses by position.

The package re-exports nothing, because lm-eval is an optional library.
"""
