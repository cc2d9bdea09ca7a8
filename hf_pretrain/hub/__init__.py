"""
The Hugging Face Hub: model cards, the list of files that may be published, pushes, and downloads of checkpoints.
`training` decides when to push.
"""
