"""utils/errors.py: one line from one rank with the fix, code 2, before anything is trained."""

import os
import re
import shutil
from dataclasses import fields
from pathlib import Path

import pytest
from helpers.environments import variables_of
from helpers.make_data import image_folder
from helpers.ranks import run_ranks
from helpers.training_runs import ROOT, refused, rewrite_manifest, train_run, words, working_in

import doctor
import eval
import train
import utils.data.datasets as loader
from utils.config import parse_args
from utils.config.suggestions import OTHER_NAMES, fix_for_unknown, suggestion
from utils.launch import exits
from utils.runs import checkpoint
from utils.runs.manifest import find_checkpoint
from utils.settings.scripts import DoctorConfig, EvalConfig, ExportConfig, PredictConfig
from utils.settings.train import GROUPS, TrainConfig, read_config, to_yaml

TINY = words("--model mlp --max_steps 2 --report false")

# Each case: the flags, what the line must say, and on how many processes. What each rank may find
# by itself, what rank 0 finds alone, and what shows only when the model is built are tried on two.
BAD_INPUT = [
    ("--epoch 3", "unknown flag --epoch; did you mean --epochs?", 2),
    ("--lr fast", "--lr must be a number, got fast", 1),
    ("mnist", "unexpected argument mnist; did you mean --data mnist?", 1),
    ("lr=0.01", "unexpected argument lr=0.01; did you mean --lr 0.01?", 1),
    ("model mlp", "unexpected argument model; did you mean --model?", 1),
    ("a/lr=0.01", "unexpected argument a/lr=0.01; did you mean --data a/lr=0.01?", 1),
    ("--config nope.yaml", "nope.yaml: No such file or directory", 2),
    ("--config key.yaml", "key.yaml: unknown setting 'epoch'", 1),
    ("--config broken.yaml", "broken.yaml: not valid YAML", 1),
    ("--data ./nope", "--data ./nope: no such file, folder or data set", 1),
    ("--data torchvision/Nope", "--data torchvision/Nope: no such data set", 1),
    ("--model resnet19", "--model resnet19: no such model; did you mean", 1),
    ("--resume runs/nope", "runs/nope: no such checkpoint or run folder", 2),
    ("--resume auto", "--resume auto needs --run_name", 1),
    ("--run_name taken", "taken exists; continue it with --resume auto", 2),
    ("--init_method tcp://host", "--init_method must be env:// or tcp://HOST:PORT", 1),
    ("--mixed_precision fp16", "fp16 needs a GPU", 1),
    ("--data broken", "000.png (cannot identify image file)", 2),
    ("--model_args {depth:3}", "--model_args for mlp", 2),
    ("--model alexnet --image_size 8", "alexnet does not accept 8x8", 2),
    ("--drop_last --global_batch_size 9999998", "--drop_last leaves no update", 1),
    (
        "--data synthetic/2x32x33 --model resnet18 --global_batch_size 16 --max_steps 5",
        "33 samples, global batches of 16",
        1,
    ),
]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """A folder with all that the cases name."""
    folder = tmp_path_factory.mktemp("prepared")
    with working_in(folder):
        _write_files()
    shutil.rmtree(folder / "huggingface", ignore_errors=True)
    return folder


@pytest.fixture(autouse=True)
def files(own_folders, prepared):
    shutil.copytree(prepared, ".", dirs_exist_ok=True)


def test_a_config_of_accelerate_is_sent_to_the_launcher(capsys):
    files = sorted((ROOT / "accelerate_configs").glob("*.yaml"))
    for file in files:
        with pytest.raises(SystemExit):
            parse_args(TrainConfig, "train.py", ["--config", str(file)])
        line = capsys.readouterr().err
        assert line.count("\n") == 1
        assert "accelerate launch --config_file FILE train.py" in line, line
    assert len(files) > 4


def test_python_s_none_is_null():
    flags = words("--ema_decay=None --lr None --auto_augment None --fold None --run_name None")
    config = parse_args(TrainConfig, "train.py", [*flags, "--model_args", "{a: None, b: 'None'}"])
    assert config == TrainConfig(model_args={"a": None, "b": "None"})
    Path("saved.yaml").write_text(to_yaml(config))
    assert read_config(Path("saved.yaml")) == config


def _train_in_a_folder_made_meanwhile(flags):
    create = checkpoint.create_folder

    def late(config):
        Path("runs/run").mkdir(parents=True)
        return create(config)

    checkpoint.create_folder = late
    train.main([*TINY, *flags])


def test_a_run_folder_that_another_run_makes_in_the_same_second_has_a_fix():
    for flags in ([], ["--resume", "runs/old"]):
        if flags:
            train_run(1, "old", *TINY)
            shutil.rmtree("runs/run")
        line = refused(_train_in_a_folder_made_meanwhile, "--run_name", "run", *flags)
        fix = "continue it with --resume auto, or choose another --run_name"
        assert line == f"train.py: error: runs/run exists; {fix}"


def _write_files():
    Path("key.yaml").write_text("epoch: 3\n")
    Path("broken.yaml").write_text("lr: [\n")
    Path("runs/taken").mkdir(parents=True)
    image_folder("photos", {"class0": 12, "class1": 12}, size=(32, 32))
    shutil.copytree("photos", "broken")
    Path("broken/class0/000.png").write_bytes(b"no image")


@pytest.mark.parametrize("flags, text, processes", BAD_INPUT)
def test_bad_input_is_one_line_from_rank_0_and_code_2_from_each(flags, text, processes):
    first, *others = run_ranks(processes, train.main, [*TINY, *words(flags)])
    assert first.code == 2 and text in first.err
    assert first.err.count("\n") == 1 and first.err.startswith("train.py: error: ")
    assert all((other.code, other.err) == (2, "") for other in others)
    # no folder of a run that never was
    assert [path.name for path in Path("runs").iterdir()] == ["taken"]


ELSEWHERE = "RANK=2 WORLD_SIZE=4 LOCAL_WORLD_SIZE=2 MASTER_ADDR=node1 MASTER_PORT=1"


def test_an_error_of_another_machine_alone_is_printed_there_with_its_rank(monkeypatch):
    monkeypatch.setattr(exits.socket, "gethostname", lambda: "node2")
    printed = []
    for local_rank in "0", "1":
        variables = variables_of(f"{ELSEWHERE} LOCAL_RANK={local_rank}")
        (outcome,) = run_ranks(1, _train_here, variables)
        assert outcome.code == 2, outcome.err
        printed.append(outcome.err)
    (line,) = printed[0].splitlines()
    assert line.startswith("train.py: error: rank 2 on node2: ") and "not a writable" in line
    assert printed[1] == ""


def _train_here(variables):
    os.environ |= variables  # run_ranks takes those of a launch away
    train.main([*TINY, "--output_dir", "key.yaml/runs"])


def test_traceback_shows_it():
    (outcome,) = run_ranks(1, train.main, ["--data", "./nope", "--traceback"])
    assert outcome.code == 2 and "Traceback" in outcome.err and "./nope" in outcome.err


@pytest.mark.full
def test_an_error_of_another_rank_during_training_is_printed_by_rank_0():
    flags = words("--data photos --num_workers 0 --image_size 112 --global_batch_size 8")
    line = refused(_train_with_a_file_that_rank_1_cannot_read, *flags, processes=2)
    assert line.startswith("train.py: error: rank 1: photos/class0/3.png: not a readable image")


def _train_with_a_file_that_rank_1_cannot_read(flags):
    decode = loader.decode_image

    def broken(*arguments):
        if os.environ["RANK"] == "1":
            raise ValueError("photos/class0/3.png: not a readable image (planted)")
        return decode(*arguments)

    loader.decode_image = broken
    train.main([*TINY, *flags, "--model_args", "{hidden: 2}"])


@pytest.fixture(scope="module")
def two_runs(tmp_path_factory):
    """A folder with the run `run` and the run `other`, whose settings describe another model."""
    folder = tmp_path_factory.mktemp("two_runs")
    with working_in(folder):
        train_run(1, "run", *TINY)
        shutil.copytree("runs/run", "runs/other")
        checkpoint = find_checkpoint(Path("runs/other"))
        path = checkpoint / "config.yaml"
        path.write_text(path.read_text().replace("model_args: {}", "model_args: {hidden: 17}"))
        rewrite_manifest(checkpoint)
    return folder / "runs"


@pytest.mark.full
@pytest.mark.parametrize(
    "flags, text",
    [
        ("--ckpt runs/taken", "runs/taken: holds no checkpoint"),
        ("--ckpt runs/run --json nope/x.json", "does not exist"),
        ("--ckpt runs/run --data photos", "the checkpoint does not have the class 'class0'"),
        ("--ckpt runs/other", "holds a different model (hidden.weight"),
    ],
)
def test_eval_says_what_is_wrong(flags, text, two_runs):
    shutil.copytree(two_runs, "runs", dirs_exist_ok=True)
    assert text in refused(eval.main, *words(flags), processes=2)


def test_several_unknown_flags_are_answered_at_once(capsys):
    with pytest.raises(SystemExit):
        parse_args(TrainConfig, "train.py", words("--amp --seed 1 --learning_rate=1"))
    line = "unknown flag --amp; use --mixed_precision; unknown flag --learning_rate; use --lr"
    assert capsys.readouterr().err == f"train.py: error: {line}\n"


@pytest.mark.parametrize(
    "name, fix",
    [
        ("--num-epochs", "did you mean --epochs?"),
        ("--workers", "did you mean --num_workers?"),
        ("--opt", "did you mean --optimizer or --optimizer_args?"),
        ("--LR", "did you mean --lr?"),
        ("--split", "did you mean --train_split or --eval_split?"),
        ("--data-dir", "use --data"),
        ("--zzz", "--help lists all"),
    ],
)
def test_an_unknown_flag_is_answered_with_its_name_here(name, fix, capsys):
    for flags in ([name], ["--lr", "0.1", f"{name}=1"]):
        with pytest.raises(SystemExit):
            parse_args(TrainConfig, "train.py", flags)
        assert capsys.readouterr().err == f"train.py: error: unknown flag {name}; {fix}\n"


def test_names_of_other_trainers_lead_to_settings_and_are_none_themselves():
    names = [field.name for field in fields(TrainConfig)]
    assert len(OTHER_NAMES) == 8 and set(names) & OTHER_NAMES.keys() == {"data_dir"}
    for theirs, ours in OTHER_NAMES.items():
        assert fix_for_unknown(theirs, names, "--") == f"use --{ours}"
        assert f"--{ours}?" not in suggestion(theirs, names, "", "--"), "is found without the list"
    # eval.py has no --lr
    assert fix_for_unknown("learning_rate", ["ckpt", "json"]) == "--help lists all"


@pytest.mark.parametrize(
    "settings, flags, fix",
    [
        (EvalConfig, "runs/a", "unexpected argument runs/a; did you mean --ckpt runs/a?"),
        (ExportConfig, "--output x", "unknown flag --output; did you mean --out?"),
        (PredictConfig, "--outp x", "unknown flag --outp; did you mean --out?"),
        (DoctorConfig, "--warmup_epochs 1", "unknown flag --warmup_epochs; --help lists all"),
    ],
)
def test_the_other_scripts_answer_with_their_own_flags(settings, flags, fix, capsys):
    with pytest.raises(SystemExit):
        parse_args(settings, "x.py", words(flags))
    assert fix in capsys.readouterr().err


SCRIPTS = [(train.main, TrainConfig), (eval.main, EvalConfig), (doctor.main, DoctorConfig)]


@pytest.mark.parametrize("main, settings", SCRIPTS)
def test_help_explains_the_settings_in_groups_in_their_order(main, settings):
    (outcome,) = run_ranks(1, main, ["--help"])
    usage, _, listed = outcome.out.partition("\noptions:\n")
    assert usage.startswith(f"usage: {main.__module__}.py [flags]\n")
    parts = re.split(r"^(\S.*):\n", f"options:\n{listed}", flags=re.M)[1:]
    groups = {
        title: re.findall(r"^  --(\w+)", text, re.M)
        for title, text in zip(parts[::2], parts[1::2], strict=True)
    }
    assert groups.pop("options") == ["config"] * (settings is TrainConfig)
    assert sorted(sum(groups.values(), [])) == sorted(field.name for field in fields(settings))
    assert list(groups)[-1] == "processes and devices"
    if settings is TrainConfig:
        assert list(groups)[:2] == ["most used", "data"] and "(default: runs)" in listed
        assert len(groups["most used"]) == 10 and "Example:" in usage
        own = [name for group in list(groups.values())[:-1] for name in group]
        assert own == [name for names in list(GROUPS.values())[1:] for name in names]
    text = " ".join(listed.split())
    for field in fields(settings):
        sentence = re.split(r" --\w+ [A-Z{\[]", text.split(f" --{field.name} ")[1])[0]
        assert re.search(r"[A-Za-z].{15,}", sentence.split(" ", 1)[1]), sentence
    assert "type:" not in text and "default: null" not in text and "default: {}" not in text
