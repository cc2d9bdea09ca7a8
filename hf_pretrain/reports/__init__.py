"""
The metrics and the files of a run, and the page of one or several runs: HTML without scripts that needs no network.
"""
