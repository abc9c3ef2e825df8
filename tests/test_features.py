"""Each feature in docs/features.md that is not a plain no names a test that exists."""

import re

import pytest
from helpers.training_runs import ROOT

PAGE = (ROOT / "docs/features.md").read_text()
ROWS = [[cell.strip() for cell in line.strip("|").split("|")] for line in PAGE.splitlines() if line.startswith("|")]
ROWS = [row for row in ROWS if row[0] not in ("Feature", "---")]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_each_feature_that_is_there_names_a_test_that_exists(row):
    assert len(row) == 6 and all(row)
    own = row[1]
    found = re.findall(r"`(test_\w+\.py)::(test_\w+)`", own)
    for file, name in found:
        assert f"\ndef {name}(" in (ROOT / "tests" / file).read_text(), (file, name)
    assert own == "no" or len(found) == 1
