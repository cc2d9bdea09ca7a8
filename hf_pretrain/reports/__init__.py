"""The history of a run, and its page: an HTML file without scripts that needs no network, for one or several runs."""
