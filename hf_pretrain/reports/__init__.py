"""The files that a run leaves, and its page: an HTML file without scripts that needs no network, for one or several runs."""
