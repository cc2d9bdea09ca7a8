"""
The Hugging Face Hub: model cards, the list of files that may be published, and pushes.
`training` decides when to push, and names the parts that do it.
"""
