"""
Checkpoints on disk: a manifest that shows damage, functions that find, verify and rotate checkpoints, and a writer
that gives a checkpoint its name only once it is complete. `training` decides when to write.
"""
