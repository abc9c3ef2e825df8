"""The page of features names tests that exist, and a yes without a test is an error."""

import re

import pytest
from helpers.training_runs import ROOT

from utils.config.settings import TrainConfig

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
    assert own == "no" or own.startswith("not yet: ") or len(found) == 1


def test_no_flag_that_exists_is_called_missing():
    flags = [flag for row in ROWS if row[1].startswith("not yet") for flag in re.findall(r"`--(\w+)`", row[1])]
    existing = {"loss"}  # a flag that lacks a value
    assert not set(flags) & set(TrainConfig.__annotations__) - existing
