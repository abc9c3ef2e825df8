"""utils/files.py where a file system lacks an operation: the risk is printed, or the fix."""

import errno
import mmap
import os
from pathlib import Path

import pytest
from helpers.make_data import image_folder
from helpers.ranks import run_ranks
from helpers.training_runs import MLP as FLAGS

import train
from utils.data.spec import InputSpec
from utils.launch.exits import exit_with_error
from utils.models import weight_files
from utils.runs.manifest import find_checkpoint, verify

RUN = ["--run_name", "run", *FLAGS, "--max_steps", "4", "--save_every", "2"]


def refuse(owner, name, code, applies):
    """Replace a function by one that raises this error where it applies."""
    real = getattr(owner, name)

    def refusing(*arguments, **named):
        if applies(*arguments):
            raise OSError(code, os.strerror(code))
        return real(*arguments, **named)

    setattr(owner, name, refusing)


def train_without(what, *more):
    if what == "fsync":
        refuse(
            os,
            "fsync",
            errno.EINVAL,
            lambda descriptor: Path(f"/proc/self/fd/{descriptor}").is_dir(),
        )
    elif what == "rename":
        refuse(Path, "rename", errno.EPERM, lambda path, _: path.is_dir())
    else:
        refuse(weight_files, "load_file", errno.ENODEV, lambda _: True)

        class Refusing(mmap.mmap):
            def __new__(cls, *_, **__):
                raise OSError(errno.ENODEV, os.strerror(errno.ENODEV))

        mmap.mmap = Refusing
    train.main([*RUN, *more])


@pytest.mark.full
def test_a_run_goes_on_without_an_operation_and_says_once_what_is_weaker():
    line = "this file system cannot flush folders: if the machine fails, "
    line += "the newest files may be lost (Invalid"
    (outcome,) = run_ranks(1, train_without, "fsync")
    assert outcome.code == 0, outcome.err
    assert outcome.out.count("this file system") == 1 and line in outcome.out
    verify(find_checkpoint(Path("runs/run")))


@pytest.mark.full
def test_a_checkpoint_that_cannot_be_mapped_is_read_into_memory():
    for more in ([], ["--max_steps", "6", "--resume", "auto"]):
        (outcome,) = run_ranks(1, train_without, "mmap", *more)
        assert outcome.code == 0, outcome.err
    assert "resuming from" in outcome.out


def test_a_cache_that_cannot_be_mapped_ends_the_run_with_the_fix():
    image_folder("photos", {"class0": 8, "class1": 8}, size=(20, 20))
    flags = ["--data", "photos", "--image_size", "20", "--global_batch_size", "4"]
    (outcome,) = run_ranks(1, train_without, "mmap", *flags)
    assert outcome.code and outcome.err.count("\n") == 1, outcome.err
    assert "cannot be used as a cache (No such device); " in outcome.err
    assert "--cache_dir DIR" in outcome.err


@pytest.mark.full
def test_a_folder_that_cannot_be_renamed_ends_the_run_with_the_fix():
    (outcome,) = run_ranks(1, train_without, "rename")
    assert outcome.code == 2 and outcome.err.count("\n") == 1
    assert (
        "this file system cannot rename folders (Operation not permitted); "
        "choose another file system" in outcome.err
    )
    assert not list(Path("runs/run/checkpoints").glob("*step*"))


def test_a_long_error_keeps_its_start_and_its_end(capsys):
    with pytest.raises(SystemExit):
        exit_with_error(ValueError(f"begins {'x' * 5000}; the fix"), "train.py")
    line = capsys.readouterr().err
    assert (
        line.startswith("train.py: error: begins xxx")
        and line.endswith("xxx; the fix\n")
        and len(line) < 1600
    )


def test_an_input_that_no_memory_can_hold_is_refused_when_it_is_read():
    values = {"height": 224, "width": 224, "channels": 3, "mean": [0.5] * 3, "std": [0.5] * 3}
    values |= {"resize": None, "interpolation": "bilinear", "squash": False, "evaluation": None}
    assert InputSpec.from_dict(values).size == (224, 224)
    for size in (65_535, 10**9):
        with pytest.raises(ValueError, match="missing or malformed"):
            InputSpec.from_dict(values | {"height": size, "width": size})
