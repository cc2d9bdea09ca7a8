"""The files that a run leaves, and the page of one or several runs: HTML without scripts that needs no network."""
