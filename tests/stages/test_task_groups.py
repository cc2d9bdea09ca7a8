"""Groups of tasks and the comparison with published figures."""

from hf_pretrain.stages.task_groups import (
    CHANCE,
    GROUPS,
    PUBLISHED,
    compare_with_published,
    expand_tasks,
    format_comparison,
)


def test_groups_stand_for_their_tasks():
    assert expand_tasks("small, piqa") == ["blimp", "zhoblimp", "piqa"]
    assert expand_tasks("minimind") == list(GROUPS["minimind"])


RESULTS = {
    "piqa": {"metrics": {"acc": {"value": 0.6, "stderr": 0.01}, "acc_norm": {"value": 0.5123, "stderr": 0.01}}},
    "social_iqa": {"metrics": {"acc": {"value": 0.3, "stderr": 0.01}}},
    "blimp": {"metrics": {"acc": {"value": 0.6, "stderr": 0.01}}},
}


def test_the_comparison_has_the_figures_of_the_same_task_and_metric():
    comparison = compare_with_published(RESULTS)
    assert comparison["this model"] == {"piqa": 51.23, "social_iqa": 30.0}
    assert comparison["minimind-3 (64M)"] == {"piqa": 50.65, "social_iqa": 34.19}
    assert comparison["a guess"] == {"piqa": 50.0, "social_iqa": 33.3}
    assert compare_with_published({"blimp": RESULTS["blimp"]}) == {}


def test_the_comparison_as_a_table():
    results = {"comparison": compare_with_published(RESULTS), "limit": None, "apply_chat_template": False}
    lines = format_comparison(results).splitlines()
    table = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    assert table[0] == ["accuracy in %", "piqa", "social_iqa"] and ["this model", "51.23", "30.00"] in table
    assert ["TinyLlama-1.1B", "74.43", "43.09"] in table
    assert lines[-1].endswith("This model was asked in plain text.")
    notes = format_comparison(results | {"limit": 10, "apply_chat_template": True})
    assert "in plain text." in notes and "This model was asked" not in notes
    assert "With --limit 10, this model answered only a part" in notes
    assert format_comparison({"comparison": {}}) == format_comparison({}) == ""


def test_every_published_row_is_complete():
    assert {len(row) for row in (*PUBLISHED.values(), CHANCE, GROUPS["minimind"])} == {7}
