"""The numbers that README.md and docs/ show are those of records, and README.md has no others."""

import importlib
import json
import re

import pytest
from helpers.training_runs import ROOT

README = (ROOT / "README.md").read_text()
# Digits that are not measurements: versions, names, years, settings and what other tests count.
OTHERS = (
    r"Python 3\.11|WSL 2|270 lines|18,500 lines|3,400 lines|`python3-venv`|one H100|`kill -9`",
    r"`--microbatches 8`|1 to 8 processes|since 2026|since 8\.3\.218|1\.0\.31|over 1,000",
    r"October 2026|November 2026|a copy of 2022|autumn 2023|Accelerate 1\.15|\(2\.6\)|\(8\.4",
    r"Apache-2\.0|BSD-3|AGPL-3\.0|2gpu\.yaml|^\d\. \*\*|#\d-look-at-the-result",
)


@pytest.fixture
def numbers(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("readme_numbers")


def test_the_pages_show_what_is_written_from_the_records(numbers):
    for page in numbers.PAGES:
        text = page.read_text()
        assert numbers.written(text) == text, "run python benchmarks/readme_numbers.py"


def test_every_part_is_shown(numbers):
    texts = [page.read_text() for page in numbers.PAGES]
    shown = {match[2] for text in texts for match in numbers.PART.finditer(text)}
    assert shown == numbers.PARTS.keys()


def test_a_number_that_is_changed_by_hand_is_found(numbers):
    """Each digit of each written part of the README, one at a time."""
    tried = 0
    for part in numbers.PART.finditer(README):
        for place in range(part.end(1), part.start(3)):
            if README[place].isdigit():
                digit = str((int(README[place]) + 1) % 10)
                changed = README[:place] + digit + README[place + 1 :]
                assert numbers.written(changed) == README
                tried += 1
    assert tried > 100


def test_the_readme_has_no_number_without_a_record(numbers):
    text = numbers.PART.sub("", README)
    text = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
    for other in OTHERS:
        text = re.sub(other, "", text, flags=re.M)
    assert not re.findall(r".*\d.*", text)


def test_each_record_has_its_command_commit_versions_processor_and_all_rounds(numbers):
    names = {name for _, names in numbers.PARTS.values() for name in names}
    for name in names:
        record = json.loads((numbers.RECORDS / f"{name}.json").read_text())
        script = re.match(r"python (benchmarks/\w+\.py) ", record["command"])[1]
        assert (ROOT / script).exists()
        assert re.fullmatch(r"[0-9a-f]{40}", record["commit"]), f"{name}: measured on changed code"
        assert {"python", "torch", "torchvision", "accelerate"} <= record["versions"].keys()
        if name in ("against_peers", "time_to_accuracy"):
            assert record["settings"]["images"] == "MNIST"  # not generated ones
        assert record["machine"]["cpu"] and record["machine"]["cores"] > 0
        assert re.fullmatch(r"\d{4}-\d\d-\d\d", record["date"])
        assert "/" + "work" not in json.dumps(record) and "/tmp" not in json.dumps(record)
        for key, rounds in record["results"].items():
            assert key == "output" or len(rounds) == int(record["settings"]["rounds"])


def test_a_median_and_a_range_are_those_of_the_rounds(numbers):
    """Independent of the helpers that write the table."""
    rates = json.loads((numbers.RECORDS / "against_peers.json").read_text())["results"]
    ours = rates["epoch, ours, 2"]
    for name in ("tutorial", "hugging_face", "timm"):
        ratio = sorted(a / b for a, b in zip(ours, rates[f"epoch, {name}, 2"], strict=True))
        middle = (ratio[(len(ratio) - 1) // 2] + ratio[len(ratio) // 2]) / 2
        assert f"| {middle:.2f} ({ratio[0]:.2f} to {ratio[-1]:.2f}) |" in README
