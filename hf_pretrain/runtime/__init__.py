"""
Parts that all layers use: parsing with one-line errors, the text and the cache of `--help`, devices, the checks of the
machine, the allocator, signals, collectives between ranks, the lock of an output directory, complete writes, names of
models and datasets, and the table of metrics.

Nothing here knows about models. The package re-exports nothing, because each layer needs different modules.
"""
