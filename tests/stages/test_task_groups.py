"""Groups of tasks and the comparison with published figures."""

from hf_pretrain.stages.task_groups import CHANCE, GROUPS, PUBLISHED, compare_with_published, expand_tasks


def test_groups_stand_for_their_tasks():
    assert expand_tasks("small, piqa") == ["blimp", "zhoblimp", "piqa"]
    assert expand_tasks("minimind") == list(GROUPS["minimind"])


def test_the_comparison_has_the_figures_of_the_same_task():
    results = {
        "piqa": {"metrics": {"acc": {"value": 0.5123, "stderr": 0.01}}},
        "arc_easy": {"metrics": {"acc": {"value": 0.3, "stderr": 0.01}}},
        "blimp": {"metrics": {"acc": {"value": 0.6, "stderr": 0.01}}},
    }
    lines = [line.split("  ") for line in compare_with_published(results).splitlines()]
    table = {line[0]: [cell.strip() for cell in line[1:] if cell.strip()] for line in lines}
    assert table["accuracy in %"] == ["arc_easy", "piqa"]
    assert table["this model"] == ["30.00", "51.23"]
    assert table["minimind-3 (64M)"] == ["28.49", "50.65"] and table["random guess"] == ["25.00", "50.00"]
    assert compare_with_published({"blimp": results["blimp"]}) == ""


def test_every_published_row_is_complete():
    assert {len(row) for row in (*PUBLISHED.values(), CHANCE, GROUPS["minimind"])} == {7}
