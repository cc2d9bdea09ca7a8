"""
The directory of a run (`--output_dir`): `training` writes it, and report page, model card, board, chat and evaluation
read it.

| file | holds | written by |
|---|---|---|
| `.lock` | the process that holds the directory | `RunDirectory` |
| `run.json` | an entry for each launch: command, arguments, versions, data, figures | `RunDirectory` |
| `log.jsonl` | the log while the run trains | `RunDirectory` |
| `trainer_state.json` | the log at the end | Trainer |
| `checkpoint-N/` | a state to resume from | `checkpoints/` |
| `rejected.jsonl`, `spikes.jsonl` | bad lines of the data, steps with a spike | `data/`, `training/` |
| `report.html`, `README.md` | the page and the model card | `reports/`, `hub/` |
| `output.log` | what the run prints | the board that started it |
"""
