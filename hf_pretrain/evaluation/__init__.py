"""
Measures of a trained model: validation loss, tasks of lm-eval, and tool calls.

The package re-exports nothing, because lm-eval is an optional library.
"""
