"""A damaged checkpoint is found before anything changes; a malicious one executes nothing."""

import contextlib
import json
import math
import os
import pickle
import random
import shutil
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
import yaml
from helpers.memory import peak_of
from helpers.ranks import NOBODY, as_nobody, run_ranks
from helpers.training_runs import (
    codes,
    full,
    rewrite_manifest,
    same_tensors,
    steps,
    train_run,
    weights,
    words,
    working_in,
)

import eval
import train
from utils.data import TABLE_FILE
from utils.runs.manifest import NEEDED, damage_of, newest_good, write_manifest
from utils.runs.metadata import read_settings
from utils.runs.state import TrainState
from utils.settings.train import FORMAT, OLDER_FORMAT, TrainConfig

FLAGS = words("--data digits --model mlp --threads 1 --keep 9 --report false --save_every 2")
FLAGS += ["--model_args", "{hidden: 16}", *words("--lr_schedule constant --eval_every 99")]
FRESH = (*FLAGS, "--global_batch_size", "120")
RESUME = (*FLAGS, *words("--run_name run --resume auto --max_steps 10"))
STEPS = ("step-00000002", "step-00000004", "step-00000006", "step-00000008")
RUN, CHECKPOINTS = Path("runs/run"), Path("runs/run/checkpoints")
NEWEST = CHECKPOINTS / STEPS[-1]
EVAL = ("--ckpt", str(NEWEST))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with `run`, which has the four checkpoints, and `whole`, which went on without a
    stop.
    """
    folder = tmp_path_factory.mktemp("trained")
    with working_in(folder):
        train_run(1, "whole", *FRESH, "--max_steps", "10")
        train_run(1, "run", *FRESH, "--max_steps", "8")
    return folder / "runs"


@pytest.fixture(autouse=True)
def fresh_copy(own_folders, trained):
    """runs/run and runs/whole in the test's own folder."""
    shutil.copytree(trained, "runs")


def contents(folder):
    """Everything below a folder, except the lock file, which changes with each run."""
    files = (path for path in sorted(folder.rglob("*")) if path.name != ".lock")
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in files
    }


def refused(outcome, *texts):
    """Assert that a rank ended with code 2 and one line that says all of this."""
    assert outcome.code == 2, (outcome.code, outcome.err, outcome.out)
    assert outcome.err.count("\n") == 1 and "Traceback" not in outcome.out, outcome.err
    assert all(text in outcome.err for text in texts), outcome.err


def run_one(function, *arguments):
    (outcome,) = run_ranks(1, function, *arguments)
    return outcome


# Each damages a file of a checkpoint, with the random numbers of its first argument.


def flip_a_bit(rng, path):
    data = bytearray(path.read_bytes())
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)


def exchange(rng, path):
    """With another file of the checkpoint."""
    other = rng.choice([file for file in path.parent.iterdir() if file != path])
    first, second = path.read_bytes(), other.read_bytes()
    path.write_bytes(second)
    other.write_bytes(first)


def take_from_the_checkpoint_before(rng, path):
    """A file that each update changes; the others may be the same in both."""
    name = rng.choice(["model.safetensors", "optimizer.bin", "state.json", "manifest.json"])
    before = CHECKPOINTS / STEPS[STEPS.index(path.parent.name) - 1]
    shutil.copy(before / name, path.parent / name)


def put_a_link_there(rng, path):
    path.unlink()
    path.symlink_to("nowhere")


def put_a_file_in_the_place_of_all(rng, path):
    shutil.rmtree(path.parent)
    path.parent.write_bytes(rng.randbytes(9))


DAMAGES = {
    "truncate": lambda rng, path: os.truncate(path, rng.randrange(path.stat().st_size)),
    "flip a bit": flip_a_bit,
    "delete": lambda rng, path: path.unlink(),
    "overwrite": lambda rng, path: path.write_bytes(rng.randbytes(path.stat().st_size)),
    "append": lambda rng, path: path.write_bytes(path.read_bytes() + rng.randbytes(1)),
    "exchange": exchange,
    "of the checkpoint before": take_from_the_checkpoint_before,
    "folder": lambda rng, path: (path.unlink(), path.mkdir()),
    "link": put_a_link_there,
    "file": put_a_file_in_the_place_of_all,
}
POINTERS = [b"", b"\xff\xfe\x00", b"../..\n", b"step-99999999\n", b"step-00000002\n", None]


def damage(kind, checkpoint, rng):
    files = sorted(checkpoint.iterdir())
    if kind == "delete":
        files.remove(checkpoint / TABLE_FILE)  # it may be absent
    DAMAGES[kind](rng, rng.choice(files))


@pytest.mark.parametrize("kind", DAMAGES)
def test_each_of_130_random_damages_is_named_and_the_newest_good_checkpoint_is_taken(
    trained, kind, capsys
):
    rng = random.Random(f"{kind} 0")
    for _ in range(13):
        shutil.rmtree(RUN)
        shutil.copytree(trained / "run", RUN)
        for name in STEPS[-1 : -rng.choice([2, 2, 3]) : -1]:
            damage(kind, CHECKPOINTS / name, rng)
        for pointer in rng.choice([(), ("latest",), ("best",), ("latest", "best")]):
            (CHECKPOINTS / pointer).unlink()
            if content := rng.choice(POINTERS):
                (CHECKPOINTS / pointer).write_bytes(content)
        changed = {name: changed_files(trained, name) for name in reversed(STEPS)}
        assert changed[STEPS[-1]]  # no damage left everything as it was
        good = next(name for name in changed if not changed[name])
        assert newest_good(RUN) == CHECKPOINTS / good
        lines = capsys.readouterr().out.splitlines()
        assert len(lines) == list(changed).index(good)
        for name, line in zip(changed, lines, strict=False):
            assert (
                line
                == f"{damage_of(CHECKPOINTS / name)}; resuming from {CHECKPOINTS / good} instead"
            )
            assert "manifest.json" in changed[name] or any(
                line.startswith(f"{CHECKPOINTS / name / file}: ") for file in changed[name]
            ), (line, changed[name])


def changed_files(trained, name):
    """Of a checkpoint, the names of the files that are not as they were written."""
    before, after = contents(trained / "run/checkpoints" / name), contents(CHECKPOINTS / name)
    return [file for file in before if after.get(file) != before[file]]


@pytest.mark.full
def test_each_change_of_one_byte_of_a_manifest_is_seen(tmp_path):
    """Each bit flipped, and each byte replaced by one that a reader of text or of JSON might take
    for the same.
    """
    checkpoint = tmp_path / "step-00000001"
    checkpoint.mkdir()
    for name in NEEDED:
        (checkpoint / name).write_text("a")
    write_manifest(checkpoint)
    assert damage_of(checkpoint) is None
    path, written = checkpoint / "manifest.json", (checkpoint / "manifest.json").read_bytes()
    changes = [written.replace(b"\n", b"\r\n"), written[:-1], written + b"\n", b" " + written]
    for position, byte in enumerate(written):
        for other in {byte ^ 1 << bit for bit in range(8)} | set(b"\r\n ") - {byte}:
            changes.append(written[:position] + bytes([other]) + written[position + 1 :])
    for changed in changes:
        path.write_bytes(changed)
        assert str(checkpoint) in (damage_of(checkpoint) or ""), changed


def test_a_disk_that_cannot_read_counts_as_damage_and_the_file_is_named(capsys):
    bad = NEWEST / "model.safetensors"
    bad.unlink()
    bad.symlink_to("/proc/self/mem")  # reading it is an I/O error, which does not name the file
    assert newest_good(RUN) == CHECKPOINTS / STEPS[-2]
    line = capsys.readouterr().out
    assert line.startswith(f"{bad}: ") and "Input/output error" in line


# The same through train.py and eval.py.


def test_two_processes_go_on_from_the_newest_good_checkpoint():
    shutil.rmtree("runs")
    train_run(2, "whole", *FRESH, "--max_steps", "10")
    train_run(2, "run", *FRESH, "--max_steps", "8")
    PICKLES["torch"](NEWEST / "optimizer.bin")
    outcomes = run_ranks(2, train.main, RESUME)
    went_on(outcomes[0], "optimizer.bin: damaged")  # it is verified before it is loaded
    assert NEWEST.with_name(f"{NEWEST.name}.damaged").is_dir()
    assert outcomes[1].code == 0 and outcomes[1].err + outcomes[1].out == ""


def went_on(outcome, text=""):
    """Assert that a rank said so about the newest checkpoint, went on from the one before, and
    ended as `whole`.
    """
    assert outcome.code == 0 and outcome.err == "" and "Traceback" not in outcome.out, (
        outcome.err + outcome.out
    )
    end = f"; resuming from {CHECKPOINTS / STEPS[-2]} instead"
    (line,) = [line for line in outcome.out.splitlines() if line.endswith(end)]
    assert line.startswith(str(NEWEST)) and text in line
    assert steps("run", "start")[-1] == 6
    assert same_tensors(weights("run"), weights("whole"))
    assert damage_of(NEWEST) is None  # made anew


def test_pointers_matter_to_no_resume_and_are_fixed_by_it():
    (CHECKPOINTS / "best").unlink()
    (CHECKPOINTS / "latest").write_bytes(b"../..\n")
    evaluated = run_one(eval.main, ("--ckpt", "runs/run"))
    assert evaluated.code == 0 and evaluated.value["step"] == 8, evaluated.err
    outcome = run_one(train.main, RESUME)
    assert outcome.code == 0 and outcome.err == "" and f"resuming from {NEWEST}\n" in outcome.out
    assert same_tensors(weights("whole"), weights("run"))
    state = json.loads((CHECKPOINTS / "step-00000010/state.json").read_text())["state"]
    assert (CHECKPOINTS / "latest").read_text() == "step-00000010\n"
    assert (CHECKPOINTS / "best").read_text() == f"step-{state['best_step']:08d}\n"


def test_without_a_good_checkpoint_nothing_is_trained_and_nothing_changes():
    for name in STEPS:
        damage("delete", CHECKPOINTS / name, random.Random(name))
    before = contents(RUN)
    outcomes = run_ranks(2, train.main, RESUME)
    refused(outcomes[0], f"{NEWEST}/", "all checkpoints are damaged")
    assert outcomes[1].code == 2 and outcomes[1].err == ""
    assert contents(RUN) == before


def test_a_damaged_checkpoint_asked_for_by_its_path_is_refused():
    damage("flip a bit", NEWEST, random.Random(0))
    before = contents(RUN)
    refused(run_one(train.main, (*RESUME, "--resume", str(NEWEST))), f"{NEWEST}/")
    for path in (str(NEWEST), "runs/run"):
        refused(run_one(eval.main, ("--ckpt", path)), f"{NEWEST}/")
    assert contents(RUN) == before


# Folders that were renamed or merged.


def test_renamed_checkpoints_and_those_of_two_runs_are_refused_before_any_is_deleted():
    for source, target in (
        (NEWEST, STEPS[-2][:-1] + "7"),
        (Path("runs/whole/checkpoints/step-00000010"), ""),
    ):
        moved = shutil.move(source, CHECKPOINTS / target)
        before = contents(RUN)
        refused(run_one(train.main, RESUME), ": is not update ")
        assert contents(RUN) == before
        shutil.move(moved, source)
    assert run_one(train.main, RESUME).code == 0 and same_tensors(weights("run"), weights("whole"))


# Permissions, as a user who is not root.


@pytest.fixture
def of_nobody(trained, anyones_folder):
    """The runs in a folder that an unprivileged user owns."""
    shutil.copytree(trained, "runs")
    if os.geteuid() == 0:
        for path in (Path("runs"), *Path("runs").rglob("*")):
            os.chown(path, NOBODY, NOBODY)
    yield
    CHECKPOINTS.chmod(0o700)


def test_what_may_not_be_read_counts_as_damaged(of_nobody):
    path = NEWEST / "model.safetensors"
    path.chmod(0)
    refused(run_one(as_nobody, eval.main, EVAL), f"{path}: Permission denied")
    went_on(run_one(as_nobody, train.main, RESUME), f"{path}: Permission denied; resuming from")


@pytest.mark.parametrize("mode", [0, full(0o300)])
def test_a_folder_that_may_not_be_listed_or_entered_is_no_fresh_start(of_nobody, mode):
    before = contents(RUN)
    CHECKPOINTS.chmod(mode)
    outcome = run_one(as_nobody, train.main, RESUME)
    CHECKPOINTS.chmod(0o700)
    refused(outcome, str(CHECKPOINTS), "Permission denied")
    assert contents(RUN) == before


# Malicious files under a manifest that matches.


class Payload:
    def __reduce__(self):
        return (os.mkdir, ("executed",))


PICKLES = {
    "torch": lambda path: torch.save({"state": {0: Payload()}}, path),
    "pickle": lambda path: path.write_bytes(pickle.dumps(Payload())),
    "yaml": lambda path: path.write_text("model: !!python/object/apply:os.mkdir [executed]\n"),
}
CODES = {  # of train.py and of eval.py when a file is something else than it should be
    "model.safetensors": (2, 2),
    "optimizer.bin": (2, 0),
    "random_states_0.pkl": (0, 0),  # of Accelerate, for its load_state
    "state.json": (2, 2),
    "config.yaml": (2, 2),
}


def both(train_code, eval_code):
    """Assert that train.py and eval.py end so (None: with 0 or 2), and where they refuse, in one
    line without a trace.

    They are given the newest checkpoint, under a manifest that is made to match.
    """
    rewrite_manifest(NEWEST)
    before = contents(RUN)
    for main, flags, code in ((eval.main, EVAL, eval_code), (train.main, RESUME, train_code)):
        outcome = run_one(main, flags)
        assert not Path("executed").exists()
        printed = outcome.out + outcome.err
        assert outcome.code in ((0, 2) if code is None else (code,)), (main, printed)
        if outcome.code == 2:
            refused(outcome, str(NEWEST))
            assert contents(RUN) == before
        assert "Traceback" not in printed, (main, printed)


QUICK = [("optimizer.bin", "pickle"), ("config.yaml", "yaml"),
         ("random_states_0.pkl", "torch"), ("model.safetensors", "torch")]  # fmt: skip


def cases(every, quick):
    """A test's cases, of which those that are not quick are in `make test-full`."""
    marked = [case if case in quick else full(case) for case in every]
    return pytest.mark.parametrize("case", marked, ids=lambda case: repr(case)[:40])


@cases([(name, kind) for name in CODES for kind in PICKLES], QUICK)
def test_no_file_of_a_checkpoint_is_executed(case):
    name, kind = case
    PICKLES[kind](NEWEST / name)
    both(*CODES[name])


MALFORMED = {  # the first of each is quick
    "state.json": [b"[" * 100_000, b"9" * 5000, b"{}", b"null", b"\xff\xfe", b"NaN"],
    "config.yaml": [b"[" * 500, b"model: !!bool x", b"lr: {}", b"[]", b"1: 2"],
    "optimizer.bin": [b".", b"\x80\x02.", b"PK\x03\x04", b""],
    "model.safetensors": [b"\xff" * 8, b"", b"\x02" + bytes(7) + b"[]"],
}  # fmt: skip


@cases(
    [(name, content) for name in MALFORMED for content in MALFORMED[name]],
    [(name, contents[0]) for name, contents in MALFORMED.items()],
)
def test_a_malformed_file_is_named_in_one_line(case):
    name, content = case
    put(name, content)
    both(*CODES[name])


def test_a_file_that_would_fill_the_memory_is_refused_by_its_size():
    put("config.yaml", b" " * (128 * 1024 + 1))
    rewrite_manifest(NEWEST)
    refused(run_one(eval.main, EVAL), "config.yaml: is larger than 128 KiB")


@pytest.mark.parametrize(
    "main, flags", [(eval.main, EVAL), (train.main, words("--run_name run --resume auto"))]
)
def test_settings_that_ask_for_a_far_larger_model_are_refused_before_it_is_built(main, flags):
    put("config.yaml", b"model_args: {hidden: 4000000}")
    rewrite_manifest(NEWEST)

    def run():
        with contextlib.suppress(SystemExit):
            main(flags)

    outcome = run_one(peak_of, run)
    assert "settings of this checkpoint do not match the size of its weights" in outcome.err
    assert outcome.err.count("\n") == 1 and outcome.value < 5e8  # the first layer would have a GB


def put(name, content):
    """Write the file; into config.yaml a line in the place of the setting's own."""
    if name == "config.yaml" and b": " in content:
        settings = yaml.safe_load((NEWEST / name).read_bytes())
        settings.pop(content.split(b":")[0].decode(), None)
        content = yaml.safe_dump(settings).encode() + content + b"\n"
    (NEWEST / name).write_bytes(content)


WRONG = [  # in state.json: one for each kind of check; the first five are quick
    ("state", None), ("state.step", -1), ("class_names", []), ("format", 0), ("input.height", 0),
    ("state.step", 1.5), ("state.seconds", math.nan), ("input.std", [0.5, 0.5]),
]  # fmt: skip


@cases(WRONG, WRONG[:5])
def test_a_value_of_the_wrong_kind_is_one_line(case):
    key, value = case

    def change(saved):
        *folders, last = key.split(".")
        for name in folders:
            saved = saved[name]
        saved[last] = value

    change_state(change)
    both(2, None)  # eval.py uses no plan, which some of the values contradict


def change_state(change, checkpoint=NEWEST):
    """Let `change` edit the contents of state.json, under a manifest that is made to match."""
    path = checkpoint / "state.json"
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))
    rewrite_manifest(checkpoint)


@pytest.mark.parametrize("number", [OLDER_FORMAT - 1, FORMAT + 1])
def test_another_format_is_refused_with_what_reads_it(number):
    for step in STEPS:  # all checkpoints of a run have one format
        change_state(
            lambda values: values.update(format=number, state="of another shape"),
            CHECKPOINTS / step,
        )
    before = contents(RUN)
    for main, flags in ((eval.main, EVAL), (train.main, RESUME)):
        refused(run_one(main, flags), f"{NEWEST}/state.json: has format {number}, ")
    assert contents(RUN) == before


@dataclass
class LaterState(TrainState):
    """The training state with a field that a later version has added without a new format."""

    patience: int = field(default=7, metadata={"optional": True})


def test_a_state_may_lack_fields_that_were_added_later_and_no_other():
    values = json.loads((NEWEST / "state.json").read_text())["state"]
    assert LaterState.from_dict(values) == LaterState(**values, patience=7)
    assert LaterState.from_dict(values | {"patience": 3}).patience == 3
    del values["step"]
    with pytest.raises(ValueError, match="'step' is missing or malformed"):
        LaterState.from_dict(values)


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.bin"])
def test_a_manifest_that_does_not_name_a_needed_file_is_refused(name):
    listed = json.loads((NEWEST / "manifest.json").read_text())
    del listed["files"][name]
    (NEWEST / "manifest.json").write_text(json.dumps(listed, indent=1) + "\n")
    evaluated, problem = run_one(eval.main, EVAL), f"{NEWEST}/manifest.json: does not name {name}"
    if name == "optimizer.bin":  # which an evaluation does not read
        assert evaluated.code == 0, evaluated.err
        refused(run_one(train.main, RESUME), problem)
    else:
        refused(evaluated, problem)
        went_on(run_one(train.main, RESUME), f"{problem}; resuming from")


def test_a_pointer_that_is_a_fifo_or_huge_names_nothing():
    (CHECKPOINTS / "best").unlink()
    os.mkfifo(CHECKPOINTS / "best")
    (CHECKPOINTS / "latest").write_bytes(b" " * 10**6 + STEPS[0].encode())
    (outcome,) = run_ranks(1, eval.main, ("--ckpt", "runs/run"), seconds=30)
    assert outcome.code == 0 and outcome.value["step"] == 8, outcome.err


@pytest.mark.full
def test_settings_of_a_checkpoint_do_not_apply_to_this_machine():
    """Its own flags and defaults choose its folders and the number of processes."""
    settings = {"cache_dir": "stranger/cache", "output_dir": "stranger/runs", "num_workers": 4000,
                "threads": 9999, "timeout": 0.001, "interface": "stranger0", "run_name": "stranger",
                "backend": "nccl", "resume": "stranger",
                "init_method": "tcp://stranger:1"}  # fmt: skip
    mine = yaml.safe_load((NEWEST / "config.yaml").read_bytes()) | settings
    mine |= {"data": "synthetic/10x8x100", "image_size": 8}
    (NEWEST / "config.yaml").write_text(yaml.safe_dump(mine))
    rewrite_manifest(NEWEST)
    read = read_settings(NEWEST)
    assert read.model_args == {"hidden": 16}
    for name in settings:
        assert getattr(read, name) == getattr(TrainConfig, name), name
    more = words("--cache_dir mine --data synthetic/10x8x100 --split test")
    outcomes = run_ranks(2, eval.main, (*EVAL, *more))
    assert codes(outcomes) == [0, 0], outcomes[0].err
    assert not Path("stranger").exists() and Path("mine").is_dir()
    outcome = run_one(train.main, RESUME)
    assert outcome.code == 0, outcome.err
    assert not Path("stranger").exists() and "stranger" not in outcome.out
    assert "data was synthetic/10x8x100 in the checkpoint, now digits" in outcome.out


def test_a_model_that_would_be_fetched_from_a_stranger_is_refused():
    put("config.yaml", b"model: 'timm/hf-hub:stranger/model'")
    rewrite_manifest(NEWEST)
    refused(run_one(eval.main, EVAL), "--model timm/hf-hub:stranger/model: ")
