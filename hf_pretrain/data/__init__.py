"""
Data: from the names that users type to documents.

`sources` finds what users name: files, the embedded `corpora`, and `hub_datasets`. `formats` has a table with the
reader of each kind of file. `records` checks the records, with a reader for each kind in `conversations`, and
`rejected` lists the bad ones. `documents` mixes the documents and divides them into a training set and a validation
set. `reward_tasks` holds the prompts of reinforcement learning. `inspection`, `audit` and `cleaning` inspect and clean
data before training.

Training imports nothing of this package. `rows/preparation.py` names what it needs.
"""
