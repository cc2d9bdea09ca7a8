"""
What every layer needs of the machine and the command line: parsing with one-line errors, devices, the lock of an output
directory, waiting for other ranks, writing whole directories, names of models and datasets, the table of metrics. Nothing
here knows about models, and nothing is imported here, because each layer needs another part.
"""
