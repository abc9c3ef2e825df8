"""Test-time augmentation is the weighted mean of the views that the help names, exact on any number
of processes.
"""

import numpy as np
import pytest
import torch
from helpers.make_data import image_folder
from helpers.ranks import returned, run_ranks
from helpers.training_runs import refused, train_run, weights, words
from PIL import Image
from sklearn.metrics import roc_auc_score
from torch import nn
from torch.nn import functional as F

import eval
from utils.config.settings import TrainConfig
from utils.data.cache import decode_all
from utils.data.selection import load_data
from utils.models.layers import TestTimeAugmentation

FLAGS = ("--model", "mlp", "--model_args", "{hidden: 8}", "--threads", "1", "--lr", "0.05")


def views_of(images: np.ndarray, name: str) -> list[tuple[float, np.ndarray]]:
    """The weights and the views of images [n, C, H, W], pixel by pixel from the definition."""
    height, width = images.shape[2:]

    def moved(by: int) -> np.ndarray:
        rows, columns = (_inside(np.arange(size) - by, size) for size in (height, width))
        return images[:, :, rows][:, :, :, columns]

    views = [(1.0, images)]
    if "shift" in name:
        views = [(0.5, images), (0.25, moved(1)), (0.25, moved(-1))]
    if "flip" in name:
        views = [
            (weight / 2, each) for weight, view in views for each in (view, view[..., ::-1].copy())
        ]
    return views


def _inside(places: np.ndarray, size: int) -> np.ndarray:
    """Places outside 0 to size - 1, reflected at the centre of the edge pixel."""
    places = np.abs(places)
    return np.where(places >= size, 2 * (size - 1) - places, places)


def mean_logits(run: str, images: np.ndarray, name: str) -> torch.Tensor:
    """The mean logits of the best mlp of a run for views of normalised images [n, C, H, W]."""
    w, total = weights(run, "best"), 0.0
    for weight, view in views_of(images, name):
        hidden = torch.relu(
            torch.from_numpy(view).flatten(1) @ w["hidden.weight"].T + w["hidden.bias"]
        )
        total = total + weight * (hidden @ w["output.weight"].T + w["output.bias"]).double()
    return total


def evaluations(run: str, *flags: str, processes=(1, 2)) -> list[dict]:
    return [returned(n, eval.main, ["--ckpt", f"runs/{run}", *flags])[0] for n in processes]


@pytest.mark.parametrize(("name", "count"), [("flip", 2), ("shift", 3), ("flip,shift", 6)])
def test_the_views_and_their_weights_are_those_of_the_definition(name, count):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.LazyLinear(5)).eval()
    images, views = torch.randn(7, 3, 6, 9), TestTimeAugmentation(model, name)
    with torch.no_grad():
        parts = [
            weight * model(torch.from_numpy(view))
            for weight, view in views_of(images.numpy(), name)
        ]
        found = views(images)
        assert len(parts) == count and torch.allclose(found, sum(parts), atol=1e-6)
        assert not torch.allclose(found, model(images), atol=1e-3)
        assert torch.allclose(found[2:5], views(images[2:5]), atol=1e-6)
        assert views(images[:0]).shape == (0, 5)  # of a rank without samples
        assert views(images.contiguous(memory_format=torch.channels_last)).allclose(
            found, atol=1e-6
        )
        assert (
            TestTimeAugmentation(model.bfloat16(), name)(images.bfloat16()).dtype == torch.float32
        )


def test_the_metrics_on_one_to_three_processes_are_those_of_the_mean_logits():
    # blocks of 4 and 3: the third rank has none
    flags = ("--max_eval_samples", "7", "--eval_batch_size", "4")
    train_run(1, "run", *FLAGS, "--max_steps", "12", *flags)
    split = load_data(TrainConfig(max_eval_samples=7)).evaluation
    pixels = np.array(decode_all(split, 8, 8, 1, "plain", iter)).transpose(0, 3, 1, 2)
    logits = mean_logits("run", (pixels.astype(np.float32) / 255 - 0.5) / 0.5, "flip,shift")
    labels = torch.from_numpy(split.labels)
    hits = logits.argsort(dim=1, descending=True) == labels[:, None]
    found = evaluations(
        "run", "--max_eval_samples", "7", "--tta", "flip,shift", processes=(1, 2, 3)
    )
    for record in found:
        assert (record["tta"], record["count"], record["loss"]) == (
            "flip,shift",
            7,
            found[0]["loss"],
        )
        assert record["loss"] == pytest.approx(F.cross_entropy(logits, labels).item(), rel=1e-5)
        assert (record["accuracy"], record["top5"]) == (
            hits[:, 0].sum().item() / 7,
            hits[:, :5].sum().item() / 7,
        )
    (outcome,) = run_ranks(1, eval.main, ["--ckpt", "runs/run", "--max_eval_samples", "7"])
    assert "tta" not in outcome.value and abs(outcome.value["loss"] - found[0]["loss"]) > 1e-3
    (outcome,) = run_ranks(1, eval.main, words("--ckpt runs/run --max_eval_samples 7 --tta flip"))
    assert "\nviews            flip\n" in outcome.out
    line = refused(eval.main, "--ckpt", "runs/run", "--tta", "crop")
    assert line == "eval.py: error: --tta must be flip, shift or flip,shift, got crop"


@pytest.mark.full
def test_photographs_of_a_binary_task_are_seen_in_all_views():
    image_folder("photos/train", {"a": 6, "b": 6}, size=(112, 120))
    paths = image_folder("photos/val", {"a": 5, "b": 4}, size=(112, 120), seed=1)
    size = ("--image_size", "[112, 120]", "--eval_crop", "1", "--num_workers", "0")  # as they are
    train_run(1, "run", "--data", "photos", *size, "--task", "binary", *FLAGS, "--max_steps", "3")
    images = np.stack([np.asarray(Image.open(path)) for path in paths]).transpose(0, 3, 1, 2)
    logits = mean_logits("run", (images.astype(np.float32) / 255 - 0.5) / 0.5, "flip")[:, 0]
    labels = torch.tensor([0.0] * 5 + [1.0] * 4, dtype=torch.float64)
    for record in evaluations("run", *words("--tta flip --num_workers 0 --eval_batch_size 2")):
        assert record["loss"] == pytest.approx(
            F.binary_cross_entropy_with_logits(logits, labels).item(), rel=1e-4
        )
        assert record["accuracy"] == ((logits > 0) == labels).double().mean().item()
        assert record["auc"] == pytest.approx(roc_auc_score(labels, logits))
