import pytest

from hf_pretrain.training.run_description import describe_config
from tests.toys import toy_model


@pytest.mark.parametrize(
    ("fields", "is_same"),
    [({"zero_init_residual": True}, True), ({"use_cache": False}, True), ({"dropout": 0.1}, False)],
)
def test_fields_that_do_not_change_a_resumed_run(fields, is_same):
    """The first weights of a model do not matter once it is trained, so a preset may change how it draws them."""
    digests = [set(describe_config(toy_model(**more))) for more in ({}, fields)]
    assert bool(digests[0] & digests[1]) == is_same
