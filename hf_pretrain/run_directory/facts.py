"""The facts about a run that its report and its model card state."""

from dataclasses import dataclass, field

from ..runtime.names import DatasetName, is_local, public_name
from .metrics import NATS


@dataclass
class RunFacts:
    """
    Facts about a run that only its recipe knows.

    Args:
        method (`str`): the kind of training, such as `pretraining`.
        recipe (`str`): the file in `recipes/`, without its ending.
        datasets (`list[str]`): the dataset names on the command line.
        data (`list[str]`): sentences with the counts of documents, tokens and packed sequences.
        base_model (`str`, *optional*): the model that the run started from; a Hub id goes into the card's metadata.
        unigram_loss (`float`, *optional*): the loss of a unigram model on the same validation set, in nats per token.
        loss_unit (`str`): the unit of the loss.
        data_kind (`str`): kind of the validation data, such as `text`. A card lists figures of each kind separately.
        eval_datasets (`list[str]`): names of the validation data, if they are not a part of `datasets`.
    """

    method: str = "training"
    recipe: str = "pretrain"
    datasets: list[str] = field(default_factory=list)
    data: list[str] = field(default_factory=list)
    base_model: str | None = None
    unigram_loss: float | None = None
    loss_unit: str = NATS
    data_kind: str = "text"
    eval_datasets: list[str] = field(default_factory=list)

    @property
    def data_name(self) -> str:
        """The names of the datasets, without the directories of this machine."""
        return ", ".join(map(public_name, self.datasets)) or "unnamed"

    @property
    def hub_datasets(self) -> list[str]:
        """The Hub ids among the datasets, for the card's metadata."""
        names = [DatasetName.parse(name) for name in self.datasets if not is_local(name) and "://" not in name]
        return [name.repo_id for name in names if not name.is_embedded]
