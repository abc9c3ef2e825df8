"""--tta: the weighted mean of the views that the help names, exact on any topology."""

import numpy as np
import pytest
import torch
from helpers.ranks import returned, run_ranks
from helpers.training_runs import refused, train_run, weights, words
from torch import nn
from torch.nn import functional as F

import eval
from utils.data.decoded import decode_all
from utils.data.selection import load_data
from utils.models.layers import TestTimeAugmentation as Augmented
from utils.settings.train import TrainConfig

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
    if "flip" not in name:
        return views
    return [(each / 2, some) for each, view in views for some in (view, view[..., ::-1].copy())]


def _inside(places: np.ndarray, size: int) -> np.ndarray:
    """Places outside 0 to size - 1, reflected at the centre of the edge pixel."""
    places = np.abs(places)
    return np.where(places >= size, 2 * (size - 1) - places, places)


def mean_logits(run: str, images: np.ndarray, name: str) -> torch.Tensor:
    """The mean logits of the best mlp of a run for views of normalised images [n, C, H, W]."""
    w, total = weights(run, "best"), 0.0
    for weight, view in views_of(images, name):
        hidden = F.linear(torch.from_numpy(view).flatten(1), w["hidden.weight"], w["hidden.bias"])
        logits = F.linear(hidden.relu(), w["output.weight"], w["output.bias"])
        total = total + weight * logits.double()
    return total


@pytest.mark.parametrize(("name", "count"), [("flip", 2), ("shift", 3), ("flip,shift", 6)])
def test_the_views_and_their_weights_are_those_of_the_definition(name, count):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.LazyLinear(5)).eval()
    images, views = torch.randn(7, 3, 6, 9), Augmented(model, name)
    with torch.no_grad():
        parts = views_of(images.numpy(), name)
        mean = sum(weight * model(torch.from_numpy(view)) for weight, view in parts)
        found = views(images)
        assert len(parts) == count and torch.allclose(found, mean, atol=1e-6)
        assert not torch.allclose(found, model(images), atol=1e-3)
        assert torch.allclose(found[2:5], views(images[2:5]), atol=1e-6)
        assert views(images[:0]).shape == (0, 5)  # of a rank without samples
        other = images.contiguous(memory_format=torch.channels_last)
        assert views(other).allclose(found, atol=1e-6)
        half = Augmented(model.bfloat16(), name)(images.bfloat16())
        assert half.dtype == torch.float32


@pytest.mark.full
def test_the_metrics_on_one_to_three_processes_are_those_of_the_mean_logits():
    # blocks of 4 and 3: the third rank has none
    flags = ("--max_eval_samples", "7", "--eval_batch_size", "4")
    train_run(1, "run", *FLAGS, "--max_steps", "12", *flags)
    split = load_data(TrainConfig(max_eval_samples=7)).evaluation
    pixels = np.array(decode_all(split, 8, 8, 1, "plain", iter)).transpose(0, 3, 1, 2)
    logits = mean_logits("run", (pixels.astype(np.float32) / 255 - 0.5) / 0.5, "flip,shift")
    labels = torch.from_numpy(split.labels)
    hits = logits.argsort(dim=1, descending=True) == labels[:, None]
    flags = words("--ckpt runs/run --max_eval_samples 7 --tta")
    found = [returned(n, eval.main, [*flags, "flip,shift"])[0] for n in (1, 2, 3)]
    for record in found:
        assert (record["tta"], record["count"]) == ("flip,shift", 7)
        assert record["loss"] == found[0]["loss"]
        assert record["loss"] == pytest.approx(F.cross_entropy(logits, labels).item(), rel=1e-5)
        assert record["accuracy"] == hits[:, 0].sum().item() / 7
        assert record["top5"] == hits[:, :5].sum().item() / 7
    (plain,) = returned(1, eval.main, flags[:-1])
    assert "tta" not in plain and abs(plain["loss"] - found[0]["loss"]) > 1e-3
    (outcome,) = run_ranks(1, eval.main, [*flags, "flip"])
    assert "\nviews            flip\n" in outcome.out
    line = refused(eval.main, "--ckpt", "runs/run", "--tta", "crop")
    assert line == "eval.py: error: --tta must be flip, shift or flip,shift, got crop"
