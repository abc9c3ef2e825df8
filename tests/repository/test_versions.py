"""Versions: all files state the same one of Lockstep, and agree on those of its libraries."""

import re
import sys

import pytest
import yaml
from helpers.training_runs import ROOT, start
from packaging.requirements import Requirement
from versions import lower_bounds

from utils.version import VERSION


def requirements(name: str) -> list[Requirement]:
    """The lines of one of the files that pip reads."""
    lines = [line.partition("#")[0].strip() for line in (ROOT / name).read_text().splitlines()]
    return [Requirement(line) for line in lines if line and not line.startswith("-r")]


def test_the_changelog_and_the_citation_have_the_version_of_the_code():
    changes = (ROOT / "CHANGELOG.md").read_text()
    assert re.search(r"^## \[(?!Unreleased)(.+)\]", changes, re.M)[1] == VERSION
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == VERSION and citation["cff-version"] == "1.2.0"
    assert {"message", "title", "authors"} <= citation.keys()


def test_each_library_has_an_oldest_version_and_a_tested_one_that_is_allowed():
    needed = requirements("requirements.txt") + requirements("requirements-dev.txt")
    exact = requirements("constraints.txt")
    tested = {one.name.lower(): next(iter(one.specifier)).version for one in exact}
    bounds = lower_bounds()
    for one in needed:
        if "==" not in str(one.specifier):
            for version in (bounds[one.name], tested[one.name.lower()]):
                assert one.specifier.contains(version), one
    assert len(bounds) >= 25


@pytest.mark.slow
def test_the_quick_tests_pass_with_the_oldest_versions(tmp_path):
    command = (ROOT / "tests/versions.py", "oldest", "--table", tmp_path / "table.md")
    code, out, err = start("python", *command, seconds=7200)
    assert code == 0, (out + err)[-3000:]
    header, _, row = (
        line.strip("| ").split(" | ") for line in (tmp_path / "table.md").read_text().splitlines()
    )
    cells = dict(zip(header, row, strict=True))
    assert cells["Python"] == ".".join(map(str, sys.version_info[:3])) and cells["Failed"] == "0"
    assert cells["torch"].startswith(lower_bounds()["torch"]) and int(cells["Passed"]) > 1000
