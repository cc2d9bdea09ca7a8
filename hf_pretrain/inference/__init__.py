"""
Answers of a trained model: in the terminal, over HTTP, on a page, and for a file of prompts. Nothing here needs
`training/`.

The package re-exports nothing: each module has its own optional libraries (fastapi, gradio).
"""
