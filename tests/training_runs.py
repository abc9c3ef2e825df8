"""Train in forked ranks and read what the run wrote."""

import json
from pathlib import Path

from ranks import returned
from safetensors.torch import load_file

import train


def train_run(processes: int, name: str, *flags: str, seconds: float = 120) -> list[dict]:
    """Train on that many ranks in runs/NAME; returns the records of its log."""
    returned(processes, train.main, ["--run_name", name, *flags], seconds=seconds)
    return records(name)


def records(name: str, kind: str | None = None) -> list[dict]:
    lines = map(json.loads, (Path("runs") / name / "log.jsonl").read_text().splitlines())
    return [line for line in lines if kind in (None, line["kind"])]


def weights(name: str, which: str = "latest") -> dict:
    """The tensors of a run's checkpoint."""
    folder = Path("runs") / name / "checkpoints"
    return load_file(folder / (folder / which).read_text().strip() / "model.safetensors")
