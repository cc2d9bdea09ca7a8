"""
Data: from the names that users type to batches of tensors.

`sources` finds what users name: files, the embedded `corpora`, and `hub_datasets`. `formats` reads files.
`conversations` checks the records, and `rejected` lists the bad ones. `documents` mixes the documents and divides
them into a training set and a validation set. `encoding`, `packing` and `preference_pairs` make rows of token ids, and
`draws` varies the conversations; `collators` and `row_source` make batches. `reward_tasks` holds the prompts of
reinforcement learning, `unigram` a baseline, `caching` the keys of the cache, and `data_arguments` the flags.
`records`, `inspection` and `cleaning` inspect and clean data before training.

The package re-exports nothing: a module that needs only a collator does not import the libraries `datasets` and
`pyarrow`.
"""
