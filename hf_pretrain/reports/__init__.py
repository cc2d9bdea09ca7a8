"""The text at the end of a run, and the page of one or several runs, which needs no network."""
