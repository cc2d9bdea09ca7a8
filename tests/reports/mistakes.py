"""Mistakes with the runs of a report, with the prices of cards, and with a model that does not loop."""

import sys
from unittest.mock import MagicMock

from benchmarks import cards
from examples import no_loops
from hf_pretrain.run_directory.history import read_runs
from tests.mistakes import Mistake


def mend_what_does_not_loop(monkeypatch, tmp_path):
    for name, value in {"load_documents": ([], None), "load_tokenizer": None, "load_model": MagicMock()}.items():
        monkeypatch.setattr(no_loops, name, MagicMock(return_value=value))
    monkeypatch.setattr(no_loops, "find_loops", lambda *_: [])
    words = ["--model", "mine", "--dataset_name", "chats.jsonl", "--output_dir", str(tmp_path / "new")]
    monkeypatch.setattr(sys, "argv", ["no_loops", *words])
    no_loops.main()


MISTAKES = [
    Mistake("holds no run that has logged something. Pass the --output_dir", lambda tmp_path: read_runs([tmp_path])),
    Mistake("the cards are T4, 3060", lambda: cards.read_prices(["V100=1"]), SystemExit),
    Mistake("0 of the answers of mine loop. There is nothing to mend", mend_what_does_not_loop),
]
