"""
Weights in and out: native checkpoints, MiniMind's own generations, transformers architectures, GGUF and peft adapters,
and the command-line arguments that name a model.

The package re-exports nothing: `gguf` and `peft` are optional, and `hf_pretrain` itself imports `adapters`.
"""
