"""utils/config: files first, then flags; what is saved can be read back; sizes of batches."""

import os
import re
from contextlib import suppress
from pathlib import Path

import pytest
import yaml
from helpers.ranks import run_ranks
from helpers.training_runs import ROOT, refused, words

import train
from utils.config import parse_args
from utils.config.yaml_text import dump_yaml, load_yaml
from utils.runs.batch_sizes import resolve_batch
from utils.settings.train import FIXED, TrainConfig, read_config, to_yaml


def parse(*flags):
    return parse_args(TrainConfig, "train.py", flags)


def test_a_flag_beats_the_config_file_wherever_either_stands():
    Path("one.yaml").write_text("lr: 0.5\nepochs: 7\n")
    Path("two.yaml").write_text("lr: 0.125\n")
    for flags, lr in (
        ("--config one.yaml --lr 0.25", 0.25),
        ("--lr=0.25 --config=one.yaml", 0.25),
        # a later file beats an earlier one
        ("--config one.yaml --config two.yaml", 0.125),
    ):
        config = parse(*words(flags))
        assert (config.lr, config.epochs) == (lr, 7)


@pytest.mark.parametrize(
    "flags, name, value",
    [
        (["--flip", "--lr", "0.1"], "flip", True),  # a bare boolean flag means true
        (["--flip=false"], "flip", False),
        (["--model_args", "{hidden: 16, name: a}"], "model_args", {"hidden": 16, "name": "a"}),
        (["--mean", "[0.5, 0.25]"], "mean", [0.5, 0.25]),
        (words("--mean -0.5 1e-3 .5 --flip"), "mean", [-0.5, 1e-3, 0.5]),
        (words("--mean -0.1,0.2,0.3 --flip"), "mean", [-0.1, 0.2, 0.3]),
        (words("--mean 0.5, 0.5, 0.5"), "mean", [0.5] * 3),
        (["--run_name", "r.3_é it's"], "run_name", "r.3_é it's"),
    ],
)
def test_flags_are_booleans_numbers_lists_and_dictionaries(flags, name, value):
    assert getattr(parse(*flags), name) == value


def test_init_from_replaces_the_published_weights_of_a_recipe():
    Path("recipe.yaml").write_text("pretrained: true\nepochs: 7\n")
    config = parse(*words("--config recipe.yaml --init_from runs/other"))
    assert (config.pretrained, config.init_from, config.epochs) == (False, "runs/other", 7)


def test_a_resume_cannot_change_what_the_model_or_the_order_of_samples_depends_on():
    names = "model stem freeze task optimizer train_split eval_split eval_fraction fold group_by"
    assert {*FIXED} == {*words(f"{names} image_bits shrink drop_last microbatches fit_head")}


def test_settings_survive_saving_and_a_saved_file_is_a_config_file():
    config = parse(
        "--model_args", "{a: 1}", "--std", "[0.5]", "--seed", "3", "--flip", "--data", "ä/b"
    )
    Path("saved.yaml").write_text(to_yaml(config))
    assert read_config(Path("saved.yaml")) == parse("--config", "saved.yaml") == config


@pytest.mark.parametrize(
    "recipe", sorted((ROOT / "recipes").glob("*.yaml")), ids=lambda path: path.stem
)
def test_every_recipe_is_valid_and_leaves_the_topology_open(recipe):
    settings = yaml.safe_load(recipe.read_text())
    config = parse("--config", str(recipe))
    assert {name: getattr(config, name) for name in settings} == settings
    assert not settings.keys() & words(
        "batch_size grad_accum num_workers threads output_dir run_name"
    )


@pytest.mark.parametrize(
    "flags, processes, expected",
    [
        ("", 4, (32, 1, 128)),
        ("--batch_size 32 --grad_accum 2", 2, (32, 2, 128)),
        ("--global_batch_size 96 --grad_accum 3", 2, (16, 3, 96)),
        ("--global_batch_size 96 --batch_size 16", 2, (16, 3, 96)),
    ],
)
def test_batch_sizes_multiply_to_the_global_batch(flags, processes, expected):
    assert resolve_batch(parse(*words(flags)), processes) == expected


@pytest.mark.parametrize(
    "flags, processes, fix",
    [
        ("--global_batch_size 100", 3, "set --global_batch_size to 99 or 102"),
        ("--global_batch_size 96 --batch_size 40", 2, "leave out --batch_size"),
        ("--global_batch_size 96 --batch_size 16 --grad_accum 2", 2, "is 64, not"),
    ],
)
def test_batch_sizes_that_do_not_divide_are_refused_with_numbers_that_work(flags, processes, fix):
    with pytest.raises(ValueError, match=fix):
        resolve_batch(parse(*words(flags)), processes)


@pytest.mark.parametrize("place", ["model_args: {a: [{b: CLASS}]}", "data: CLASS"])
def test_settings_from_a_stranger_import_and_execute_nothing(place, monkeypatch):
    Path("trap.py").write_text(
        "import os\nos.mkdir('imported')\nclass Trap:\n    def __init__(self): os.mkdir('made')\n"
    )
    monkeypatch.syspath_prepend(".")
    Path("recipe.yaml").write_text(place.replace("CLASS", "{class_path: trap.Trap}") + "\n")
    flag, value = Path("recipe.yaml").read_text().strip().split(": ", 1)
    for flags in (["--config", "recipe.yaml"], [f"--{flag}", value]):
        with suppress(SystemExit):
            parse(*flags)
    assert not Path("imported").exists() and not Path("made").exists()


def refusal(capsys, *flags):
    """The one line that ends a start with these flags."""
    with pytest.raises(SystemExit) as end:
        parse(*flags)
    line = capsys.readouterr().err
    assert end.value.code == 2 and line.count("\n") == 1
    return line


@pytest.mark.parametrize(
    "text, name, value",
    [
        ("mixed_precision: no", "mixed_precision", "no"),
        ("flip: yes", "flip", True),
        ("run_name: on", "run_name", "on"),
        ("lr: 1e-3", "lr", 1e-3),
        ("max_steps: 1_000", "max_steps", 1000),
        ("max_steps:", "max_steps", None),
        ("mean: [0.5, 1, .25]", "mean", [0.5, 1.0, 0.25]),
    ],
)
def test_words_and_numbers_of_a_config_file_are_what_they_look_like(text, name, value):
    Path("recipe.yaml").write_text(text + "\n")
    assert getattr(parse("--config", "recipe.yaml"), name) == value
    assert getattr(read_config(Path("recipe.yaml")), name) == value


def test_yaml_that_is_written_is_read_as_the_same_values():
    shared = [1, 2]
    texts = ["no", "1e5", "1:30", "2026-01-01", "null", "é", "0x1F", "010", "", "~", "a: b #c"]
    values = {"a": shared, "b": shared, "c": 1e-7, "d": [True, None], "e": float("inf"), "f": texts}
    assert load_yaml(dump_yaml(values)) == values
    assert yaml.safe_load(dump_yaml(values)) == values  # by other programs


ALIASES = "a: &a [x, x, x], b: &b [*a, *a, *a], c: [*b, *b, *b]"  # with more, 9 ** 9 values


@pytest.mark.parametrize(
    "text, what",
    [
        (f"model_args: {{{ALIASES}}}\n", "aliases (*) are not allowed"),
        ("seed: 1\n\nmodel_args: {hidden: 3, hidden: 4}\n", "(line 3: hidden is given twice"),
        ("mixed_precision: off\n", "no, bf16, fp16 or auto, got off"),
        # a string is not read as YAML
        (f"model_args: '{{{ALIASES}}}'\n", "--model_args must be '{NAME: VALUE}'"),
        ("lr: 1" + "0" * 5000, "Exceeds the limit"),
        ("data: caf\xe9", "not valid UTF-8"),
    ],
    ids=["aliases", "twice", "choice", "string", "digits", "encoding"],
)
def test_a_config_file_that_is_damaged_or_would_take_all_memory_is_refused(text, what):
    Path("recipe.yaml").write_bytes(text.encode("latin-1"))
    (outcome,) = run_ranks(1, train.main, ["--config", "recipe.yaml"], seconds=20)
    assert outcome.code == 2 and outcome.err.count("\n") == 1 and what in outcome.err, outcome.err


def test_only_a_regular_file_is_read_as_settings_or_weights():
    os.mkfifo("fifo")
    Path("folder").mkdir()
    for path in ("fifo", "/dev/zero"):
        for flag in ("--config", "--init_from"):
            assert f"{path}: is not a regular file" in refused(
                train.main, "--model", "mlp", flag, path
            )
    assert "folder: Is a directory" in refused(train.main, "--config", "folder")


@pytest.mark.parametrize("name", [".hidden", "-x", "a/b", "a\nb", "é" * 128, ""])
def test_a_run_name_that_cannot_name_a_folder_is_refused(name, capsys):
    assert "--run_name must be a plain name" in refusal(capsys, f"--run_name={name}")


@pytest.mark.parametrize(
    "flags, text",
    [
        (("--max_steps", "1" + "0" * 400), f"got 1{'0' * 79}\n"),
        (("--seed", "1" + "0" * 26), "--seed must be at most 9223372036854775807"),
        (("--lr", "-1e-3"), "--lr must be above 0, got -0.001"),
        (("--label_smoothing", "1"), "--label_smoothing must be below 1, got 1\n"),
        (("--lr", "-inf"), "--lr must be a number, got -inf"),
        (("--pos_weight", "-1,2"), "--pos_weight must be above 0, got [-1, 2]"),
        (("--mean", "half"), "--mean must be numbers such as 0.5 0.5 0.5, got half"),
        (("--mean", "[.inf]"), "--mean must be a finite number, got inf"),
    ],
)
def test_other_values_are_refused_with_the_limit_or_an_example(flags, text, capsys):
    assert text in refusal(capsys, *flags)


@pytest.mark.full
def test_a_run_folder_is_named_after_the_data_and_the_model_that_was_chosen():
    (outcome,) = run_ranks(1, train.main, ["--max_steps", "1", "--cache_dir", "mine"])
    (path,) = Path("runs").iterdir()
    assert outcome.code == 0 and outcome.out.endswith(
        f"eval.py --ckpt {path} --cache_dir mine\n"
    ), outcome.out
    assert re.fullmatch(r"digits-mnist_cnn-\d{8}-\d{6}", path.name)
