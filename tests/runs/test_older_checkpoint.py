"""Checkpoints of Lockstep 0.2: their weights, classes and input are read, and no run resumes them.

`checkpoint_0.2/` has the text files of one, as that version wrote them, of a run on `digits`.
"""

import json
import shutil
from pathlib import Path

import pytest
import torch
from helpers.ranks import returned
from helpers.training_runs import refused, train_run, words
from PIL import Image
from safetensors.torch import load_file

import eval
import export
import predict
import replay
import train
from utils.runs.manifest import find_checkpoint, write_manifest

RUN = words("--data digits --model mlp --threads 1 --report false")
QUICK = words("--threads 1 --num_workers 0")


@pytest.fixture
def old(own_folders):
    """The run folder `old` of 0.2, with the weights of the run `new`; returns its checkpoint."""
    train_run(1, "new", *RUN, "--max_steps", "3")
    there = Path("runs/old/checkpoints/step-00000003")
    shutil.copytree(Path(__file__).with_name("checkpoint_0.2"), there)
    for name in ("model.safetensors", "optimizer.bin"):
        shutil.copy(find_checkpoint(Path("runs/new")) / name, there)
    write_manifest(there)
    shutil.copy(there / "config.yaml", "runs/old")
    shutil.copy("runs/new/log.jsonl", "runs/old")
    (there.parent / "latest").write_text(there.name)
    return there


def test_the_weights_of_0_2_are_evaluated_predicted_with_exported_and_started_from(old):
    there, here = (
        returned(1, eval.main, ["--ckpt", f"runs/{run}", *QUICK])[0] for run in ("old", "new")
    )
    assert [there[key] for key in ("loss", "accuracy", "count", "step")] == [
        here[key] for key in ("loss", "accuracy", "count", "step")
    ]
    Image.new("L", (8, 8), 200).save("image.png")
    for run in ("old", "new"):
        flags = ["--ckpt", f"runs/{run}", *QUICK, "image.png", "--out", f"{run}.json"]
        assert returned(1, predict.main, flags)[0]["count"] == 1
        export.main(["--ckpt", f"runs/{run}", "--to", "torch", "--out", run])
    assert Path("old.json").read_bytes() == Path("new.json").read_bytes()
    train_run(1, "next", *RUN, "--init_from", "runs/old", "--max_steps", "1", "--lr", "1e-30")
    next_weights = load_file(find_checkpoint(Path("runs/next")) / "model.safetensors")
    for name, tensor in load_file(old / "model.safetensors").items():
        assert torch.equal(next_weights[name], tensor)


def test_a_run_of_0_2_is_neither_resumed_nor_replayed(old):
    files = {path: path.read_bytes() for path in Path("runs/old").rglob("*") if path.is_file()}
    for resume in ("auto", "runs/old", str(old)):
        line = refused(train.main, *RUN, "--run_name", "old", "--resume", resume)
        assert "for a run of Lockstep 0.2, use that version" in line
    line = refused(replay.main, "--run", "runs/old", "--update", "1")
    assert "has format 4" in line and "use the version of Lockstep that wrote it" in line
    for path, content in files.items():
        assert path.read_bytes() == content


def test_a_malformed_checkpoint_of_0_2_is_one_line(old):
    path = old / "state.json"
    values = json.loads(path.read_text())
    for change in ({"state": {}}, {"state": None}, {"input": {}}, {"format": 3}):
        path.write_text(json.dumps(values | change))
        (old / "manifest.json").unlink()
        write_manifest(old)
        assert "state.json" in refused(eval.main, "--ckpt", "runs/old", *QUICK)
