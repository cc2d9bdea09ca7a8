"""
Models of other programs, in and out: MiniMind's own generations, transformers' architectures, GGUF files, models of
the package index, and adapters of peft.

The package re-exports nothing: `gguf` and `peft` are optional, and `loading` names its modules by strings.
"""
