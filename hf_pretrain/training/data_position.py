"""
The position of a run in its data, saved with each checkpoint.

Trainer derives the position from the number of steps. This is wrong in the second pass over a stream, and after a
change of the world size at equal global batch size.
"""

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from transformers import TrainerCallback


DATA_POSITION_NAME = "data_position.json"


@dataclass
class DataPosition:
    """
    Position of a run in its data.

    Args:
        epoch (`int`, *optional*): the current pass over the data, from 0. If it is `None`, Trainer derives the pass
            and its rows from the number of steps.
        num_rows (`int`): rows of this pass that all ranks together have taken.
        evaluation_is_due (`bool`): a signal cut off an evaluation at this step. It runs on resume.
        num_skipped_steps (`int`): steps that the run skipped because they were not finite.
    """

    epoch: int | None = None
    num_rows: int = 0
    evaluation_is_due: bool = False
    num_skipped_steps: int = 0

    def save(self, directory: str | Path) -> None:
        """Write the position to `data_position.json` in a checkpoint."""
        Path(directory, DATA_POSITION_NAME).write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def load(cls, directory: str | Path) -> "DataPosition | None":
        """Return the position saved in a checkpoint, or `None` if it has none. Ignore fields of other versions."""
        path = Path(directory, DATA_POSITION_NAME)
        if not path.is_file():
            return None
        content = json.loads(path.read_text(encoding="utf-8"))
        # Checkpoints of the first version hold the number of skipped steps under `unlogged`.
        content.setdefault("num_skipped_steps", content.get("unlogged", {}).get("skipped", 0))
        return cls(**{field.name: content[field.name] for field in fields(cls) if field.name in content})


class PositionTracker(TrainerCallback):
    """
    Track how far a run is in its data.

    Attributes:
        epoch (`int`): the current pass, from 0.
        num_batches (`int`): micro-batches of this pass that each rank has taken. The caller counts them.
    """

    def __init__(self) -> None:
        self.start(0, 0)

    def start(self, epoch: int, num_batches: int) -> None:
        """Begin at pass `epoch`, of which each rank has already taken `num_batches` micro-batches."""
        # Trainer calls `on_epoch_begin` next, which adds one.
        self.epoch, self.num_batches = epoch - 1, 0
        self._num_batches_before = num_batches

    def on_epoch_begin(self, args, state, control, **kwargs):
        self.epoch += 1
        self.num_batches, self._num_batches_before = self._num_batches_before, 0


__all__ = ["DATA_POSITION_NAME", "DataPosition", "PositionTracker"]
