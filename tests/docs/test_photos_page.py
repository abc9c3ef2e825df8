"""docs/photos.md: its commands lead from a folder of photographs to a model in use."""

import csv
import re
import shlex
from pathlib import Path

import pytest
import timm
import torch
from helpers.make_data import image_folder
from helpers.ranks import returned
from helpers.training_runs import ROOT, records

import eval as evaluation
import export
import predict
import train
from extras.compare import __main__ as report

PAGE = (ROOT / "docs/photos.md").read_text()
MAINS = {
    "train.py": train.main,
    "eval.py": evaluation.main,
    "predict.py": predict.main,
    "export.py": export.main,
}
COMMANDS = [
    line
    for block in re.findall(r"^```bash\n(.*?)^```$", PAGE, re.M | re.S)
    for line in block.replace("\\\n", "").splitlines()
    if not re.search("benchmarks/|fold|review", line)
]


@pytest.mark.full
def test_the_commands_of_the_page_lead_to_a_model_in_use():
    for split, count in (("train", 12), ("val", 4)):
        image_folder(f"photos/{split}", {"ant": count, "bee": count}, (50, 40), "jpeg")
    new = image_folder("new_photos", {"ant": 1, "bee": 2}, (60, 60), "jpeg")
    torch.manual_seed(0)
    # published weights need a network
    torch.save(timm.create_model("test_resnet").state_dict(), "published.pth")
    Path("recipes").symlink_to(ROOT / "recipes")
    for command in COMMANDS:
        words = shlex.split(command)
        if words[:3] == ["python", "-m", "extras.compare"]:
            returned(1, report.main, words[3:])
            continue
        place = next(place for place, word in enumerate(words) if word in MAINS)
        flags = words[place + 1 :]
        if words[place] == "train.py":
            flags = [flag for flag in flags if flag not in ("--pretrained", "--model", "resnet18")]
            flags += shlex.split("--epochs 2 --threads 1")
            flags += shlex.split("--model timm/test_resnet --init_from published.pth")
        returned(2 if "2cpu.yaml" in command else 1, MAINS[words[place]], flags)
    head, everything = (records(name, "eval") for name in ("head", "all"))
    assert (len(head), len(everything)) == (1, 3) and head[-1]["count"] == 8
    with open("predictions.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(new) and {row["predicted"] for row in rows} <= {"ant", "bee"}
    assert all(
        Path(path).exists()
        for path in ("compare.html", "predictions.html", "models/head/config.json")
    )
