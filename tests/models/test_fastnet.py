"""utils/models/fastnet.py: what its layers compute at first; equal initial weights anywhere."""

import math

import numpy as np
import pytest
import torch
from helpers.ranks import returned
from helpers.training_runs import same_tensors, train_run, weights, words
from torch import nn

import eval
from utils.data.datasets import ArrayDataset
from utils.data.spec import InputSpec
from utils.errors import UserError
from utils.models.fastnet import FastNet, some_images
from utils.models.zoo import build_model
from utils.settings.train import TrainConfig

SMALL = ["--model", "fastnet", "--model_args", "{widths: [12, 16], scaling: 0.5}"]
RUN = [
    "--data",
    "digits",
    "--image_size",
    "12",
    *SMALL,
    "--crop_padding",
    "1",
    "--global_batch_size",
    "120",
]
RUN += words("--max_train_samples 480 --lr 1 --save_every 3")  # 4 updates an epoch


def correlated(count: int, size: int, channels: int) -> np.ndarray:
    """Random images whose neighbouring pixels and channels are alike, uint8 [n, H, W, C]."""
    noise = torch.randn(
        count, channels, size + 2, size + 2, generator=torch.Generator().manual_seed(0)
    )
    smooth = nn.functional.avg_pool2d(noise, 3, 1) + 0.2 * noise[:, :, 1:-1, 1:-1]
    mixed = smooth + 0.5 * smooth.mean(1, keepdim=True)
    return (110 + 80 * mixed).clamp(0, 255).byte().permute(0, 2, 3, 1).numpy()


def spec_of(size: int) -> InputSpec:
    return InputSpec(size, size, 3, [0.5] * 3, [0.5] * 3)


def normalised(pixels: np.ndarray, spec: InputSpec) -> torch.Tensor:
    images = torch.from_numpy(pixels).double() / 255
    return ((images - torch.tensor(spec.mean)) / torch.tensor(spec.std)).permute(0, 3, 1, 2).float()


@pytest.mark.parametrize("channels", [1, 3])
def test_the_first_layer_whitens_the_patches_of_the_images(channels):
    spec = InputSpec(20, 20, channels, [0.4, 0.5, 0.3][:channels], [0.02, 0.03, 0.01][:channels])
    pixels, patch = correlated(250, 20, channels), 4 * channels
    net = FastNet(spec, 10, widths=[16])
    net.whiten_patches(pixels)
    with torch.no_grad():
        outputs = net.whiten(normalised(pixels, spec)).permute(1, 0, 2, 3).flatten(1).double()
    assert outputs.shape == (2 * patch, 250 * 19 * 19)
    assert torch.equal(outputs[:patch], -outputs[patch:])
    assert outputs.mean(1).abs().max() < 1e-4
    assert (torch.cov(outputs[:patch]) - torch.eye(patch)).abs().max() < 1e-3


def test_directions_in_which_the_patches_do_not_vary_are_not_amplified():
    grey, spec = (
        np.repeat(correlated(50, 12, 1), 3, axis=3),
        InputSpec(12, 12, 3, [0.5] * 3, [0.25] * 3),
    )
    net = FastNet(spec, 10, widths=[16])
    net.whiten_patches(grey)
    with torch.no_grad():
        deviations = net.whiten(normalised(grey, spec)).permute(1, 0, 2, 3).flatten(1)[:12].std(1)
    assert deviations[:8].max() < 1e-3 and deviations[8:].min() > 0.9
    assert net.whiten.weight.flatten(1).norm(dim=1).max() == pytest.approx(
        1 / math.sqrt(5e-4), rel=1e-4
    )
    net.whiten_patches(np.zeros((1, 12, 12, 3), np.uint8))
    assert all(torch.isfinite(parameter).all() for parameter in net.whiten.parameters())


def test_the_other_convolutions_pass_their_input_on_at_first():
    net = FastNet(spec_of(32), 10, widths=[32, 48])
    images = torch.randn(2, 24, 31, 31)
    with torch.no_grad():
        assert torch.equal(net.blocks[0][0](images)[:, :24], images)
        assert net.blocks[0][0](images)[:, 24:].std() > 0.1
        x = torch.randn(2, 48, 7, 7)
        assert torch.equal(net.blocks[1][4](x), x)


@pytest.mark.parametrize(("size", "blocks"), [(4, 2), (97, 3)])
def test_sizes_that_do_not_fit_are_one_line_with_a_fix(size, blocks):
    config = TrainConfig(model="fastnet", model_args={"widths": [8] * blocks})
    with pytest.raises(UserError, match=f"fastnet .*{size}x{size}.*; try --image_size"):
        build_model(config, spec_of(size), 10)


@pytest.mark.full
def test_it_learns_to_the_same_bits_on_two_processes_and_after_a_resume():
    flags = [*RUN, *words("--threads 1 --microbatches 4 --eval_every 24 --max_steps 24 --keep 9")]
    log = train_run(1, "one", *flags)
    assert log[-1]["accuracy"] > 0.9
    pixels = some_images(ArrayDataset(np.arange(2500).reshape(-1, 1, 1, 1), np.zeros(2500)))
    assert pixels.ravel().tolist() == list(range(0, 2500, 3))  # evenly
    train_run(2, "two", *flags)
    path = "runs/two/checkpoints/step-00000012"
    train_run(1, "again", *flags, "--resume", path)
    assert same_tensors(weights("one"), weights("two"))
    assert same_tensors(weights("one"), weights("again"))
    # without its training images
    assert returned(1, eval.main, ["--ckpt", "runs/one"])[0]["accuracy"] == log[-1]["accuracy"]
