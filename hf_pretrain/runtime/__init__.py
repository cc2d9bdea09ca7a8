"""
Parts that all layers use: parsing with one-line errors, YAML files, devices, the checks of the machine, signals,
collectives between ranks, complete writes, names of models and datasets, and the table of metrics.

Nothing here knows about models. The package re-exports nothing, because each layer needs different modules.
"""
