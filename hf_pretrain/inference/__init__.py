"""
Answers of a trained model: in the terminal, over HTTP, on a page, for a file of prompts, and for the log of a run.
Nothing here needs `training/`.

The package re-exports nothing: each module has its own optional libraries (fastapi, gradio).
"""
