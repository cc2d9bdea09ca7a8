"""How a user wants data to be read, mixed and divided."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Reading:
    """
    Choices of a user about the records of data, their mixture and their split.

    Args:
        kind (`str`, *optional*): kind of the records: `text`, `conversation`, `preference` or `task`; with `None`, the
            fields of each record tell. The text of a document is the text of a record, or the JSON of its internal
            form.
        text_column (`str`): key or column of the text.
        columns (`list[str]`, *optional*): names of columns, as in [`~data.columns.parse_columns`].
        encoding (`str`): encoding of a file without a byte order mark.
        whole_files (`bool`): make one document of a .txt file, as of a .md file, not one per paragraph.
        num_proc (`int`, *optional*): number of processes that parse and split data of more than 10,000 records; by
            default one per core, up to 8.
        max_rejected_ratio (`float`): tolerated share of bad lines over all names. Streams are checked before the first
            step, and then every 1,000 lines.
        dataset_weights (`list[float]`, *optional*): sampling weight of each name in the training set; they need not
            sum to 1. Sampling ends when every name has been read in full, so small datasets repeat and no document is
            left out. Without weights, the datasets are concatenated. The validation set never repeats documents.
        streaming (`bool`): read the data while training. The validation set then comes from the first 50,000 documents
            of each name. The run does not train on later documents with such a hash either.
        validation_fraction (`float`): share of the documents in the validation set; 0 for none.
        train_fraction (`float`): share of the remaining documents in the training set, chosen by the same hash. The
            validation set stays the same.
        seed (`int`): seed of the mixture.
    """

    kind: str | None = "text"
    text_column: str = "text"
    columns: list[str] | None = None
    encoding: str = "utf-8"
    whole_files: bool = False
    num_proc: int | None = None
    max_rejected_ratio: float = 0.01
    dataset_weights: list[float] | None = None
    streaming: bool = False
    validation_fraction: float = 0.01
    train_fraction: float = 1.0
    seed: int = 42
