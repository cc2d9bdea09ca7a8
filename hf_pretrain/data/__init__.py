"""
Data: from the names that users type to batches of tensors.

`hub_files` downloads files from the Hub. `sources`, `formats` and `corpora` read records. `conversations` and
`rejected` check them. `loading` and `splitting` mix them and divide them into a training set and a validation set.
`encoding`, `packing` and `preferences` make rows of token ids; `collators` and `padding_rows` make batches. `tasks`
holds the prompts of reinforcement learning, `parts` the worker processes and cache keys, and `arguments` the flags.
`records`, `inspection` and `cleaning` inspect and clean data before training.

The package re-exports nothing: a module that needs only a collator does not import the libraries `datasets` and
`pyarrow`.
"""
