"""
Models of this package: native directories, adapters, and the command-line arguments that name a model.

The package re-exports nothing, because `hf_pretrain` itself imports `adapters`.
"""
