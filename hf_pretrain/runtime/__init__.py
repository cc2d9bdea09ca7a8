"""
Parts that all layers use: parsing with one-line errors, YAML files, devices, signals, collectives between
ranks, complete writes, names of models and datasets, and texts in two languages.

Nothing here knows about models. The package re-exports nothing, because each layer needs different modules.
"""
