"""The same run on every topology, equal to a plain PyTorch loop over the global batches."""

import time
from contextlib import nullcontext
from itertools import combinations
from typing import ClassVar

import pytest
import torch
from helpers.ranks import returned
from helpers.training_runs import records, train_run, weights, words
from torch.nn import functional as F

import train
from utils.config.cli import parse_args
from utils.data.decoded import decode_all
from utils.data.order import Plan, fold_in
from utils.data.samplers import UpdateSampler
from utils.data.selection import load_data
from utils.models.zoo import build_model, input_spec
from utils.settings.train import TrainConfig
from utils.training.schedule import learning_rate

# 1438 training samples in batches of 120: the last of an epoch has 118, which 3 and 4 microbatches
# share unequally.
DIGITS = words("--model mlp --eval_fraction 0.2 --global_batch_size 120 --log_every 1 --threads 1")
DIGITS += words("--weight_decay 5e-4")
FULL = pytest.mark.full


def plain_losses(*flags):
    """The loss of each update and the final weights of a single-process loop over whole global
    batches.
    """
    config = parse_args(TrainConfig, "train.py", [*DIGITS, *flags])
    data = load_data(config)
    spec = input_spec(config, 1, (8, 8))
    pixels = decode_all(data.train, spec.height, spec.width, 1, "cache", lambda items: items)
    images = ((torch.from_numpy(pixels.copy()).float() / 255 - 0.5) / 0.5).permute(0, 3, 1, 2)
    labels = torch.from_numpy(data.train.labels)
    torch.manual_seed(fold_in(config.seed, "weights"))
    model = build_model(config, spec, 10)
    groups = [
        {"params": [p]} | ({} if p.ndim > 1 else {"weight_decay": 0}) for p in model.parameters()
    ]
    kind, options = torch.optim.AdamW, {}
    if config.optimizer == "sgd":
        kind, options = torch.optim.SGD, {"momentum": config.momentum, "nesterov": True}
    options |= {"weight_decay": config.weight_decay} | config.optimizer_args
    optimizer = kind(groups, 0.0, **options)
    losses = []
    plan = Plan(len(labels), config.global_batch_size, 1, config.seed)
    for step, microbatch in enumerate(UpdateSampler(plan, 1, config.max_steps)):
        chosen = microbatch.indices
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(config, step, config.max_steps)
        logits = model(images[chosen])
        if config.model == "googlenet":
            main, second, first = (F.cross_entropy(each, labels[chosen]) for each in logits)
            loss = main + 0.3 * second + 0.3 * first
        elif config.loss == "cross_entropy":
            loss = F.cross_entropy(logits, labels[chosen], label_smoothing=config.label_smoothing)
        else:
            targets = torch.full((len(chosen), 10), config.label_smoothing / 10)
            targets[range(len(chosen)), labels[chosen]] += 1 - config.label_smoothing
            loss = F.binary_cross_entropy_with_logits(logits, targets)
        optimizer.zero_grad()
        loss.backward()
        if config.clip_value:
            torch.nn.utils.clip_grad_value_(model.parameters(), config.clip_value)
        if config.clip_norm:
            torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip_norm)
        optimizer.step()
        losses.append(loss.item())
    return losses, model.state_dict()


@pytest.mark.parametrize(
    ("processes", "accum"),
    [(2, 2), *(pytest.param(*topology, marks=FULL) for topology in ((1, 1), (1, 2), (3, 1)))],
)
def test_losses_of_50_updates_equal_a_plain_loop_over_global_batches(processes, accum):
    flags = words("--lr 0.01 --max_steps 50")
    train_run(processes, "run", *DIGITS, *flags, "--grad_accum", str(accum))
    expected, _ = plain_losses(*flags)
    found = [record["loss"] for record in records("run", "train")]
    assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.full
@pytest.mark.parametrize(
    "flags",
    [
        words("--label_smoothing 0.1 --clip_norm 0.5 --clip_value 0.02"),
        words("--loss binary_cross_entropy --label_smoothing 0.1"),
        words("--lr_schedule cosine --warmup_steps 5 --momentum 0.5 --weight_decay 0.01"),
        ["--optimizer_args", "{betas: [0.5, 0.8]}", *words("--optimizer adamw --lr 0.001")],
    ],
)
def test_every_setting_of_the_step_means_what_plain_pytorch_means(flags):
    flags = [*words("--lr 0.01 --max_steps 15"), *flags]
    train_run(2, "run", *DIGITS, *flags, "--grad_accum", "2")
    losses, model = plain_losses(*flags)
    assert [record["loss"] for record in records("run", "train")] == pytest.approx(losses, rel=1e-5)
    for name, tensor in weights("run").items():
        # a unit at zero may flip
        torch.testing.assert_close(tensor, model[name], rtol=1e-3, atol=5e-5)


@pytest.mark.full
def test_the_auxiliary_heads_of_googlenet_are_trained_as_in_a_plain_loop():
    flags = words("--model googlenet --max_train_samples 16 --global_batch_size 16 --max_steps 2")
    flags += ["--model_args", "{dropout: 0, dropout_aux: 0}", *words("--lr 0.01 --report false")]
    train_run(1, "run", *DIGITS, *flags)
    found = [record["loss"] for record in records("run", "train")]
    # batch normalisation makes rounding errors larger: another order of the images changes the
    # second loss by 0.3 %
    assert found == pytest.approx(plain_losses(*flags)[0], rel=0.01)


@pytest.mark.full
def test_a_global_batch_smaller_than_the_ranks_still_counts_each_sample_once():
    flags = words("--data synthetic/3x8x25 --model mlp --global_batch_size 12 --log_every 1")
    flags += words("--lr 0.01 --epochs 3")
    one = train_run(1, "one", *flags)
    # the last update of an epoch has one sample: two ranks have none
    three = train_run(3, "three", *flags)
    for a, b in zip(records("one", "train"), records("three", "train"), strict=True):
        assert (a["loss"], a["accuracy"]) == (pytest.approx(b["loss"], rel=1e-5), b["accuracy"])
    assert len(one) == len(three) == 1 + 9 + 3


def test_training_loss_and_accuracy_are_means_over_all_samples_since_the_last_record():
    flags = (*DIGITS, *words("--lr 0.01 --max_steps 14"))
    train_run(2, "each", *flags)
    train_run(2, "some", *flags, "--log_every", "5")
    each, some = records("each", "train"), records("some", "train")
    assert [record["step"] for record in some] == [5, 10, 14]
    tail = len(load_data(parse_args(TrainConfig, "train.py", flags)).train) % 120
    assert tail
    sizes = [120] * 11 + [tail, 120, 120]
    for record, window in zip(some, (range(5), range(5, 10), range(10, 14)), strict=True):
        for key in ("loss", "accuracy"):
            mean = sum(each[i][key] * sizes[i] for i in window) / sum(sizes[i] for i in window)
            assert record[key] == pytest.approx(mean, rel=1e-9)


@FULL
def test_augmentation_and_dropout_do_not_depend_on_how_pieces_lie_on_ranks():
    flags = [*DIGITS, *words("--model mnist_cnn --crop_padding 2 --flip alternate --lr 0.01")]
    flags += words("--random_erasing 0.5 --cutout 3 --color_jitter 0.3 --max_steps 8")
    flags += words("--auto_augment randaugment --num_workers 1")
    flags += ["--auto_augment_args", "{magnitude: 5}", "--grad_accum"]
    train_run(2, "two", *flags, "2")
    train_run(1, "alone", *flags, "4")
    two, alone = ([r["loss"] for r in records(name, "train")] for name in ("two", "alone"))
    assert two == pytest.approx(alone, rel=1e-5)


@pytest.mark.full
def test_a_bf16_run_learns():
    log = train_run(1, "run", *DIGITS, *words("--mixed_precision bf16 --epochs 4"))
    assert log[0]["precision"] == "bf16"
    assert log[-1]["accuracy"] > 0.85


def _reads_of_the_device(flags):
    """How often an update makes the host wait for a number from the device, by what reads it."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Watch(TorchDispatchMode):
        reads: ClassVar[list[str]] = []

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            waiting = "_local_scalar_dense", "nonzero", "is_nonzero", "equal."
            if any(word in str(function) for word in waiting):
                self.reads.append(str(function))
            return function(*args, **(kwargs or {}))

    update = train.train_update

    def watched(run, batches):
        with Watch() if run.state.step else nullcontext():  # at the first, the loader draws a seed
            update(run, batches)

    train.train_update = watched
    train.main(flags)
    return Watch.reads


def test_an_update_never_waits_for_the_device():
    flags = words("--data synthetic/4x32x96 --model resnet18 --global_batch_size 8 --max_steps 2")
    flags += words("--stem standard --min_scale 0.5 --crop_padding 2 --flip alternate --cutout 5")
    flags += words("--random_erasing 0.5 --clip_norm 1 --label_smoothing 0.1 --grad_accum 2")
    flags += words("--ema_decay 0.9 --mixup 0.2 --cutmix 1")
    assert returned(1, _reads_of_the_device, flags) == [[]]


def _dropout_masks(flags):
    masks = []
    update = train.train_update

    def watched(run, batches):
        layer = run.module.drop_units
        # Units may be zero before the dropout, which would look like dropped ones.
        before = layer.register_forward_pre_hook(lambda m, inputs: 0 * inputs[0] + 1)
        after = layer.register_forward_hook(lambda m, i, out: masks.append((out == 0).tolist()))
        update(run, batches)
        before.remove()
        after.remove()

    train.train_update = watched
    train.main(flags)
    return masks


@pytest.mark.full
def test_dropout_differs_between_updates_and_between_pieces():
    flags = words("--max_steps 3 --global_batch_size 32")
    masks = [mask for rank in returned(2, _dropout_masks, flags) for mask in rank]
    assert len(masks) == 6
    shared = [
        sum(a != b for a, b in zip(sum(m, []), sum(n, []), strict=True))
        for m, n in combinations(masks, 2)
    ]
    assert min(shared) > 500  # of 16 x 500 units


@pytest.mark.full
def test_throughput_and_seconds_in_the_log_fit_the_clock():
    began = time.perf_counter()
    log = train_run(1, "run", *DIGITS, *words("--max_steps 60 --log_every 20 --save_every 7"))
    took = time.perf_counter() - began
    lines = [record for record in log if record["kind"] == "train"]
    assert 0 < lines[-1]["seconds"] < took
    for before, record in zip([{"seconds": 0.0, "step": 0}, *lines], lines, strict=False):
        steps = range(before["step"], record["step"])
        images = sum(120 if step % 12 != 11 else 118 for step in steps)
        seconds = record["seconds"] - before["seconds"]
        assert record["images_per_second"] * seconds == pytest.approx(images)
        assert 0 <= record["data_wait"] < 1
