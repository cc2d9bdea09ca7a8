"""
The metrics and the files of a run, the page of one or several runs, which needs no network, and the texts in Chinese.
"""
