"""Summaries of bad lines."""

import pytest

from hf_pretrain.data.rejected import RejectedLines


def test_the_summary_counts_all_reasons():
    rejected = RejectedLines(0.0, None)
    for reason in range(7):
        rejected.num_lines += 8 - reason
        for line in range(7 - reason):
            rejected.add(f"{reason}.jsonl", line + 1, None, f"reason {reason}")
    with pytest.raises(ValueError, match=r"28 of 35 lines \(80.00%\) are bad") as error:
        rejected.check_ratio()
    # An error message becomes one line.
    text = " ".join(str(error.value).split())
    assert "raise the limit: 7 x reason 0 (first: 0.jsonl:1); 6 x reason 1 (first: 1.jsonl:1); " in text
    assert text.endswith("3 x reason 4 (first: 4.jsonl:1); 3 for other reasons")
