"""Versions: all files state the same one of Lockstep, and agree on those of its libraries."""

import re
import sys
from datetime import date
from pathlib import Path

import pytest
import versions
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


def test_the_row_of_the_table_in_contributing_is_replaced(tmp_path, monkeypatch):
    """With `make` replaced: a suite of ten tests, of which one failed and two were skipped."""
    page = tmp_path / "page.md"
    before = (ROOT / "CONTRIBUTING.md").read_text().splitlines()
    page.write_text("\n".join([*before, ""]))

    def make(target: str, *variables: str) -> int:
        if target == "test":
            file = variables[-1].removeprefix("ARGS=--junitxml ")
            counts = 'tests="10" errors="0" failures="1" skipped="2"'
            Path(file).write_text(f"<testsuites><testsuite {counts}/></testsuites>")
        return 0

    monkeypatch.setattr(versions, "make", make)
    options = ["--venv", sys.prefix, "--table", str(page)]
    monkeypatch.setattr(sys, "argv", ["versions.py", "newest", *options])
    assert versions.main() == 0
    after = page.read_text().splitlines()
    (place,) = (number for number, line in enumerate(before) if line.startswith("| newest |"))
    assert after[:place] + after[place + 1 :] == before[:place] + before[place + 1 :]
    cells = after[place].strip("| ").split(" | ")
    row = dict(zip(versions.HEADER, cells, strict=True))
    assert row["Python"] == ".".join(map(str, sys.version_info[:3]))
    assert [row[name] for name in ("Passed", "Failed", "Skipped")] == ["7", "1", "2"]
    assert row["Date"] == date.today().isoformat()


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
