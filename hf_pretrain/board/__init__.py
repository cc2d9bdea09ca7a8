"""
`hf-pretrain board`: a page that shows all runs, and starts, stops and resumes them. What it knows stands in the files
of the runs, and every run is a process of its own, so a board can end and several can run.
"""
