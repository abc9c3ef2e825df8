"""--help and config.yaml are those of the files in tests/unchanged, byte by byte.

To write them again: PYTHONPATH=. python tests/config/test_unchanged.py
"""

import math
import os
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from utils.config import cli, fit
from utils.settings.scripts import (
    DoctorConfig,
    EvalConfig,
    ExportConfig,
    PredictConfig,
    ReplayConfig,
    SweepConfig,
)
from utils.settings.train import GROUPS, TrainConfig, to_yaml

FILES = Path(__file__).parents[1] / "unchanged"
SCRIPTS = {
    "train": TrainConfig,
    "eval": EvalConfig,
    "predict": PredictConfig,
    "export": ExportConfig,
    "replay": ReplayConfig,
    "sweep": SweepConfig,
    "doctor": DoctorConfig,
}


def texts() -> dict[str, str]:
    """--help of each script, without the names of tables, which follow from versions; and
    config.yaml.
    """
    os.environ["COLUMNS"] = "100"
    found = {
        f"{name}.help": cli.make_parser(settings, f"{name}.py", ()).format_help()
        for name, settings in SCRIPTS.items()
    }
    return found | {"config.yaml": to_yaml(TrainConfig())}


@pytest.mark.skipif(sys.version_info >= (3, 13), reason="argparse writes help in another form")
def test_help_and_config_yaml_are_unchanged(monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    found = texts()
    assert found == {path.name: path.read_text() for path in FILES.iterdir()}


def test_each_setting_of_train_py_is_in_one_group():
    listed = [name for names in GROUPS.values() for name in names]
    assert sorted(listed) == sorted(field.name for field in fields(TrainConfig))


@pytest.mark.parametrize("settings", SCRIPTS.values())
def test_each_setting_of_a_script_has_a_flag(settings):
    parser = cli.make_parser(settings, "x.py", ())
    flags = {name for action in parser._actions for name in action.option_strings}
    assert {f"--{field.name}" for field in fields(settings)} - flags <= {"--paths"}


VALUES = [-1, 0, 1, 2, 300, 2**40, 0.0, 0.5, 1.0, 1.5, math.inf, True, "", "x", "no", "bf16"]
VALUES += [
    "error",
    "skip",
    "full",
    "quick",
    "name",
    "order",
    "bicubic",
    [],
    [0.0],
    [1, 2],
    [1, 2, 3],
]


def accepted(hint: object) -> list:
    """What becomes of each value as a setting of this type."""
    found = []
    for value in VALUES:
        try:
            found.append(fit(value, hint))
        except (TypeError, ValueError, OverflowError) as error:
            found.append(str(error))
    return found


@pytest.mark.parametrize("settings", [EvalConfig, PredictConfig, ReplayConfig])
def test_a_setting_that_train_py_has_too_has_its_type_and_bounds(settings):
    of_train = {field.name: field.type for field in fields(TrainConfig)}
    own = {"weights", "model", "pretrained", "metrics", "report"}  # mean something else here
    for field in fields(settings):
        if field.name in of_train.keys() - own:
            assert accepted(field.type) == accepted(of_train[field.name]), field.name


if __name__ == "__main__":
    for name, text in texts().items():
        (FILES / name).write_text(text)
