"""
Rows: from documents to batches of tensors, whatever files the documents come from.

`data_arguments` and `chat_arguments` hold the flags, and `reading` what they say about files. `preparation` turns the
names of a run into rows: it names the readers of `data/` and imports none. `encoding`, `packing` and
`preference_pairs` make rows of token ids, and `draws` varies the conversations; `collators` and `row_source` make
batches. `unigram` is a baseline, and `caching` has the keys of the cache.

The package re-exports nothing: a module that needs only a collator does not import the libraries `datasets` and
`pyarrow`.
"""
