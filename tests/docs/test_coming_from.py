"""docs/coming_from.md: features have a test, functions their place, calls of Accelerate a use."""

import ast
import re
from dataclasses import fields

import pytest
from accelerate.commands.config.config_args import ClusterConfig
from helpers.training_runs import ROOT

PAGE = (ROOT / "docs/coming_from.md").read_text()


def rows(heading: str) -> list[list[str]]:
    """The rows of the tables of a section, without their first line."""
    section = re.split(rf"^#+ {heading}\n", PAGE, flags=re.M)[1]
    lines = re.findall(r"^\| (.*?) \|$", re.split(r"^#", section, flags=re.M)[0], re.M)
    return [cells for line in lines if not (cells := line.split(" | "))[1].startswith("---")][1:]


FEATURES = [
    line for line in re.findall(r"^\| .*", PAGE, re.M) if line.split(" <!-- ")[0].count(" | ") == 5
]


@pytest.mark.parametrize("row", FEATURES[2:], ids=lambda row: row.split(" | ")[0])
def test_each_feature_that_is_there_names_a_test_that_exists(row):
    """In a comment at the end of its row."""
    _, _, own, *_ = re.split(r"\| | \| ", row)
    found = re.findall(r" \| <!-- (test_\w+\.py)::(test_\w+) -->$", row)
    for file, name in found:
        assert f"\ndef {name}(" in next((ROOT / "tests").rglob(file)).read_text(), (file, name)
    assert len(found) == (own != "no")


def test_functions_are_where_the_page_says():
    page = " ".join(PAGE.split())
    named = re.findall(r"((?:`[\w.]+`(?:,| and)? ?)+)(?:\(| in )`(utils/[\w/]+\.py)`", page)
    assert len(named) > 15
    for names, file in named:
        code = (ROOT / file).read_text()
        for name in re.findall(r"`([\w.]+)`", names):
            for part in name.split("."):
                assert re.search(rf"^\s*(def|class) {part}\b", code, re.M), (name, file)


def used_of_accelerate() -> set[str]:
    """The methods and properties of an accelerator that the code uses, and its class."""
    files = [*ROOT.glob("*.py"), *ROOT.glob("utils/**/*.py"), *ROOT.glob("extras/**/*.py")]
    nodes = [node for file in files for node in ast.walk(ast.parse(file.read_text()))]
    owned = [node for node in nodes if isinstance(node, ast.Attribute)]
    used = {node.attr for node in owned if ast.unparse(node.value).endswith("accelerator")}
    return used | {node.id for node in nodes if isinstance(node, ast.Name)} & {"Accelerator"}


def test_calls_of_accelerate_are_used_or_not_as_the_page_says():
    used, said = used_of_accelerate(), 0
    for call, here, _ in rows("You know Accelerate"):
        for name in re.findall(r"`(\w+)(?:\(\))?`", call):
            assert (name in used) == here.startswith("used"), name
            said += 1
        assert {*re.findall(r"`(\w+)` is$", here)} <= used
    assert said >= 20


def test_the_page_has_each_key_of_a_file_of_accelerate_config():
    keys = re.findall(
        r"`(\w+)`", " ".join(row[0] for row in rows("The file that `accelerate config` writes"))
    )
    assert sorted(keys) == sorted(field.name for field in fields(ClusterConfig))
