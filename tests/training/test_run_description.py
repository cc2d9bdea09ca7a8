import datasets
import pytest

from hf_pretrain.training.run_description import describe_config, describe_data
from tests.toys import toy_model


@pytest.mark.parametrize(
    ("fields", "is_same"),
    [
        # The first weights of a model do not matter once it is trained.
        ({"zero_init_residual": True}, True),
        ({"use_cache": False}, True),
        # Trainer copies these ids from the tokenizer.
        ({"bos_token_id": 7, "eos_token_id": 8, "pad_token_id": 9}, True),
        ({"dropout": 0.1}, False),
    ],
)
def test_fields_that_do_not_change_a_resumed_run(fields, is_same, tmp_path):
    model = toy_model()
    model.save_pretrained(tmp_path / "a")
    loaded = type(model).from_pretrained(tmp_path / "a", **fields)
    assert loaded.config._name_or_path != model.config._name_or_path
    assert (describe_config(model.config) == describe_config(loaded.config)) == is_same


def test_one_changed_row_of_many_changes_the_digest():
    """The digest depends on the rows alone, not on the tables and the format that hold them."""
    rows = {"input_ids": [[number, number + 1] for number in range(4000)], "text": list("abcd") * 1000}
    whole = describe_data(datasets.Dataset.from_dict(rows))
    halves = [datasets.Dataset.from_dict(rows).select(part) for part in (range(2001), range(2001, 4000))]
    assert describe_data(datasets.concatenate_datasets(halves)) == whole
    assert describe_data(datasets.Dataset.from_dict(rows).select(range(4000)[::-1]).select(range(4000)[::-1])) == whole
    assert describe_data(datasets.Dataset.from_dict(rows).with_format("torch")) == whole
    for column, value in (("input_ids", [1, 2]), ("text", "z")):
        changed = {name: list(values) for name, values in rows.items()}
        # A sample of every third row would miss it.
        changed[column][2002] = value
        assert describe_data(datasets.Dataset.from_dict(changed)) != whole
