"""
Tokenizers and chat templates: train, save, load and check a tokenizer, and encode documents and conversations.

A text can never produce a control token by spelling it; only the chat template writes them. This package imports
`model` and `runtime` at most. It re-exports nothing: `training` imports the library `datasets`, which users of the
other modules should not have to wait for.
"""
