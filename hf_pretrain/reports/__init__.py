"""Pages about runs: one HTML file without scripts and without network, for one run or several."""
