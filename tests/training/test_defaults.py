"""utils/training/defaults.py: settings that follow from the data; what depends on processes."""

import math
import random
import re
from collections import Counter
from pathlib import Path

import pytest
import torch
import torchvision
import yaml
from helpers.make_data import image_folder
from helpers.ranks import run_ranks
from helpers.training_runs import records, train_run, words

import train
from utils.data.order import Plan
from utils.data.spec import InputSpec
from utils.models.zoo import OWN_MODELS
from utils.runs.batch_sizes import resolve_batch
from utils.settings.train import CHOSEN, TrainConfig
from utils.training.defaults import choose_images, choose_sizes
from utils.training.schedule import total_updates
from utils.training.summary import differences

NAMES = ("global_batch_size", "drop_last", "log_every", "lr", "weight_decay", "model", "flip")


def chosen(samples, processes=1, **settings):
    return choose_sizes(TrainConfig(**settings), samples, processes)[0]


@pytest.mark.parametrize("samples", [1437, 1617, 50_000, 60_000, 1_281_167])
def test_data_sets_of_many_small_images_keep_their_values(samples):
    config, _ = choose_images(chosen(samples), small=True, small_input=True)
    assert {*NAMES, "task", "best_metric"} == set(CHOSEN)
    values = [getattr(config, name) for name in NAMES]
    assert values == [128, False, 50, 0.05, 5e-4, "mnist_cnn", False]


def test_an_epoch_of_a_small_set_has_eight_updates_or_batches_of_eight():
    for samples in range(1, 2000):
        batch = chosen(samples).global_batch_size
        assert batch in (8, 16, 32, 64, 128)
        assert math.ceil(samples / batch) >= 8 or batch == 8
        assert math.ceil(samples / (2 * batch)) < 8 or batch == 128
    assert [chosen(samples).global_batch_size for samples in (10, 24, 120, 500)] == [8, 8, 16, 64]


def test_no_chosen_batch_ends_an_epoch_with_a_few_samples():
    """Otherwise batch statistics of every eighth small set would be refused or poor."""
    for samples in range(8, 897):
        config = chosen(samples)
        plan = Plan(samples, config.global_batch_size, 1, 0, config.drop_last)
        last = samples - (plan.updates_per_epoch - 1) * config.global_batch_size
        assert config.global_batch_size / 2 <= last
        assert config.drop_last or last <= config.global_batch_size


def test_values_that_are_given_are_kept_even_if_they_are_those_of_another_case():
    given = dict(zip(NAMES, (100, True, 7, 0.3, 0.0, "resnet18", True), strict=True))
    config, lines = choose_sizes(TrainConfig(**given), 120, 2)
    assert choose_images(config, small=True, small_input=True) == (TrainConfig(**given), lines)
    assert lines == []
    for name, value in given.items():
        config, _ = choose_images(chosen(120, **{name: value}), small=True, small_input=True)
        assert getattr(config, name) == value
        assert all(getattr(config, other) is not None for other in NAMES)


def test_the_learning_rate_follows_optimizer_start_and_batch():
    tuned = {"pretrained": True, "model": "resnet18"}
    for samples, given, lr in (
        (120, {}, 0.05 * 16 / 128),
        (120, {**tuned, "freeze": ["backbone"]}, 0.05 / 8),
        (120, {"optimizer": "adamw"}, 1e-3 / math.sqrt(8)),
        (9999, {**tuned, "optimizer": "adamw"}, 1e-4),
        (9999, {"global_batch_size": 32}, 0.05 / 4),
        (9999, {"global_batch_size": 1024}, 0.05),  # larger ones made mnist_cnn fail
        (9999, {"batch_size": 8, "grad_accum": 2, "processes": 2}, 0.05 / 4),
        (120, {"optimizer": "of somebody else"}, 1e-3 / math.sqrt(8)),
    ):
        assert chosen(samples, **given).lr == pytest.approx(lr), given
    assert (chosen(120, optimizer="adamw").weight_decay, chosen(120).weight_decay) == (0.05, 5e-4)


@pytest.mark.parametrize(("settings", "expected"), [
    ({}, ("sgd", None, None, None)),
    ({"pretrained": True}, ("adamw", 10.0, True, 0.35)),
    ({"init_from": "W.pth"}, ("adamw", 10.0, True, 0.35)),
    ({"pretrained": True, "optimizer": "sgd"}, ("sgd", None, None, 0.35)),
    ({"pretrained": True, "layer_decay": 0.8, "sync_batchnorm": True}, ("adamw", None, None, 0.35)),
    ({"pretrained": True, "freeze": ["backbone"]}, ("sgd", None, None, None)),
    (
        {"pretrained": True, "head_scale": 2.0, "keep_batch_stats": False, "min_scale": 0.5},
        ("adamw", 2.0, False, 0.5),
    ),
])  # fmt: skip
def test_fine_tuning_all_layers_has_gentle_defaults(settings, expected):
    config, _ = choose_images(
        chosen(200, model="resnet18", **settings), small=False, small_input=False
    )
    names = "optimizer", "head_scale", "keep_batch_stats", "min_scale"
    assert tuple(getattr(config, name) for name in names) == expected


def test_a_run_on_cached_features_has_more_epochs_and_evaluates_less_often():
    head = {"pretrained": True, "model": "resnet18", "freeze": ["backbone"]}
    own = {"eval_every": 3, "save_every": 5}
    for settings, expected in (
        (head, (40, 32, None, 10.0)),  # 8 updates per epoch
        ({**head, **own}, (40, 3, 5, None)),
        ({**head, "feature_views": 0}, (40, None, None, None)),
        ({"pretrained": True, "model": "resnet18"}, (20, None, None, None)),
    ):
        config = chosen(120, **settings)
        names = "epochs", "eval_every", "save_every", "save_seconds"
        assert tuple(getattr(config, name) for name in names) == expected


def test_an_error_of_a_chosen_value_never_blames_a_setting_that_was_not_given():
    rng = random.Random(20)
    causes = Counter()
    for _ in range(500):
        settings = {"freeze": rng.choice([[], ["backbone"]]), "pretrained": True}
        settings |= {
            "global_batch_size": rng.choice([None, 8, 64]),
            "drop_last": rng.random() < 0.7,
        }
        settings |= {"max_steps": rng.choice([None, 1, 40])}
        samples = rng.choice([1, 7, 20, 63, 64, 300])
        cause = ""
        try:
            config = chosen(samples, model="resnet18", **settings)
            batch = config.global_batch_size
            total_updates(config, Plan(samples, batch, 1, 0, config.drop_last))
        except ValueError as error:
            cause = str(error).split(":")[0]
            assert settings["drop_last"] and samples < (settings["global_batch_size"] or 8)
        causes[cause] += 1
    assert causes.keys() == {"", "--drop_last leaves no update"} and min(causes.values()) > 50


@pytest.mark.parametrize(("samples", "settings", "every"), [
    (120, {"max_steps": 28}, 7), (1617, {}, 50), (8, {"epochs": 3}, 1),
    (480, {"max_steps": 200}, 50),
])  # fmt: skip
def test_a_short_run_has_at_least_four_train_records_or_one_for_each_update(
    samples, settings, every
):
    config = chosen(samples, **settings)
    updates = total_updates(config, Plan(samples, config.global_batch_size, 1, 0, config.drop_last))
    assert config.log_every == every and updates // every >= min(4, updates)


@pytest.mark.parametrize(("small", "small_input", "pretrained", "expected"), [
    (True, True, False, ("mnist_cnn", False)),
    (True, True, True, ("resnet18", False)),
    (True, False, False, ("resnet18", False)),  # digits at --image_size 224 are still not mirrored
    (False, True, False, ("resnet18", True)),
])  # fmt: skip
def test_the_model_and_flip_follow_the_images(small, small_input, pretrained, expected):
    config, (line,) = choose_images(TrainConfig(pretrained=pretrained), small, small_input)
    assert (config.model, config.flip) == expected
    assert line.startswith(f"model {expected[0]}, {'' if expected[1] else 'no '}flip (")


def test_processes_that_no_chosen_batch_fits_are_refused_with_the_fix():
    with pytest.raises(ValueError, match=r"set --global_batch_size to 126 or 132"):
        resolve_batch(TrainConfig(), 6)
    assert resolve_batch(TrainConfig(global_batch_size=6), 6)[2] == 6
    with pytest.raises(
        ValueError,
        match=r"^the default global batch 16 is not divisible by 32.*; "
        "set --global_batch_size to 32",
    ):
        choose_sizes(TrainConfig(), 120, 32)


def saved_settings(name):
    values = yaml.safe_load((Path("runs") / name / "config.yaml").read_text())
    return {setting: values[setting] for setting in NAMES}


@pytest.mark.full
def test_photographs_train_with_the_same_settings_on_one_process_and_on_two():
    for split, counts in (("train", {"a": 13, "b": 12}), ("val", {"a": 2, "b": 2})):
        image_folder(f"photos/{split}", counts, size=(100, 120), kind="jpg")
    flags = words("--data photos --model mlp --threads 1 --num_workers 0 --epochs 1")
    tables = []
    for processes in (1, 2):
        run = [*flags, "--image_size", "16", "--run_name", f"on-{processes}"]
        main, *others = run_ranks(processes, train.main, run)
        assert main.code == 0 and not any("defaults  " in other.out for other in others), main.err
        text = re.search(r"^defaults .*\n(?: .*\n)*", main.out, re.M)[0]
        tables.append([line.removeprefix("defaults").strip() for line in text.splitlines()])
    expected = dict(zip(NAMES, (8, True, 1, 0.003125, 5e-4, "mlp", True), strict=True))
    assert saved_settings("on-1") == saved_settings("on-2") == expected
    assert tables[0] == tables[1] and len(tables[0]) == 4, tables
    starts = "global batch 8 (25 training images", "lr 0.00313 (", "flip (", "evaluation uses 83%"
    assert all(map(str.startswith, tables[0], starts)), tables


@pytest.mark.full
def test_a_resumed_run_keeps_the_settings_of_its_checkpoint_unless_they_are_given():
    same = words("--data synthetic/3x8x103 --threads 1")
    first = words("--lr 0.31 --flip --log_every 2 --weight_decay 0.3 --drop_last --model mlp")
    train_run(1, "run", *same, *first, *words("--max_steps 2 --global_batch_size 9"))
    train_run(1, "run", *same, *words("--max_steps 4 --resume auto --weight_decay 0.1"))
    assert saved_settings("run") == dict(
        zip(NAMES, (9, True, 2, 0.31, 0.1, "mlp", True), strict=True)
    )


@pytest.mark.full
def test_a_loss_that_explodes_but_is_finite_is_reported_once_with_the_fix():
    flags = words("--data synthetic/4x8x64 --model mlp --threads 1 --run_name run --log_every 1")
    flags += words("--lr_schedule constant --global_batch_size 16 --save_every 4 --resume auto")
    lines = []
    for number in ("8", "12"):
        (outcome,) = run_ranks(1, train.main, [*flags, "--lr", "3", "--max_steps", number])
        lines.append([line for line in outcome.out.splitlines() if "that of uniform" in line])
    losses = [record["loss"] for record in records("run", "train")]
    step = next(step for step, loss in enumerate(losses, 1) if loss > 10 * math.log(4))
    assert step <= 8 and max(losses[8:]) > 10 * math.log(4)
    assert len(lines[0]) == 1 and lines[1] == []
    assert f"update {step}: the training loss is {losses[step - 1]:.4g}, more" in lines[0][0]
    assert "lower --lr" in lines[0][0]


@pytest.mark.full
@pytest.mark.parametrize("flags", [
    words("--model mnist_cnn --image_size 12 --mixup 0.8 --cutmix 1.0 --label_smoothing 0.1"
          " --warmup_steps 20"),
    *(pytest.param(flags, marks=pytest.mark.full) for flags in [
        words("--data pairs --model mlp --task binary --pos_weight 3 --global_batch_size 8"),
        words("--model mlp --loss focal --class_weights balanced --global_batch_size 8"
              " --ema_decay 0.99"),
        words("--model mlp --loss binary_cross_entropy --optimizer adamw --lr 0.03"
              " --sampler balanced"),
        words("--model timm/test_resnet --image_size 16 --global_batch_size 32 --lr 0.03"),
    ]),
])  # fmt: skip
def test_healthy_runs_are_not_said_to_fall_apart(flags):
    image_folder("pairs/train", {"a": 90, "b": 10})  # random pixels, which are learned by heart
    image_folder("pairs/val", {"a": 36, "b": 4}, seed=1)
    more = words("--max_steps 120 --log_every 1 --eval_every 6 --threads 1 --run_name run")
    (outcome,) = run_ranks(1, train.main, [*flags, *more])
    assert outcome.code == 0 and "lower --lr" not in outcome.out, outcome.err


MASKS = "dropout masks (unless processes x accumulation is 6)"


@pytest.mark.parametrize(("model", "settings", "grad_accum", "parts"), [
    ("mlp", {"sync_batchnorm": True}, 2, []),
    ("mlp", {"comm_hook": "bf16"}, 1, ["gradients, rounded to bf16 (unless --comm_hook no)"]),
    ("mnist_cnn", {"model_args": {"dropout": 0.0}}, 1, []),
    ("resnet18", {}, 2, ["batch statistics (unless --sync_batchnorm)"]),
    ("resnet18", {"sync_batchnorm": True}, 2, ["batch statistics (unless --grad_accum 1)"]),
    ("efficientnet_b0", {}, 1, ["batch statistics (unless --sync_batchnorm)", MASKS]),
    ("vit_b_16", {}, 1, []),
    ("vit_b_16", {"model_args": {"attention_dropout": 0.1}}, 1, [MASKS]),
])  # fmt: skip
def test_what_depends_on_the_number_of_processes_is_named_with_how_to_avoid_it(
    model, settings, grad_accum, parts
):
    config = TrainConfig(model=model, **settings)
    with torch.device("meta"):
        if model in OWN_MODELS:
            module = OWN_MODELS[model](InputSpec(28, 28, 1, [0.5], [0.5]), 10, **config.model_args)
        else:
            module = torchvision.models.get_model(model, **config.model_args)
    text = differences(config, module, grad_accum, 6)
    assert text == (
        f"on another number of processes, besides rounding: {', '.join(parts)}" * bool(parts)
    )


@pytest.mark.full
def test_the_start_table_names_what_differs_between_topologies():
    flags = words("--data synthetic/3x8x64 --threads 1 --max_steps 2 --eval_every 1 --lr 1e-9")
    (dropping,) = run_ranks(1, train.main, flags)
    (plain,) = run_ranks(1, train.main, [*flags, "--model", "mlp", "--sync_batchnorm"])
    assert re.search(r"^depends on topology +on another .* dropout masks", dropping.out, re.M)
    assert "depends on topology" not in plain.out
    assert re.search(r"^accuracy +0\.\d{4} \(best, update 1\)$", plain.out, re.M)
    assert "has no effect" not in plain.out
