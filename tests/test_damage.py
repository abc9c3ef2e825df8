"""A damaged checkpoint is found out before anything changes, and a malicious one executes nothing."""

import contextlib
import errno
import hashlib
import io
import itertools
import json
import math
import os
import pickle
import random
import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
import yaml
from helpers.ranks import run_ranks
from helpers.training_runs import records, train_run, weights

import eval
import train
from utils.config.settings import TrainConfig
from utils.runs.manifest import damage_of, newest_good, write_manifest
from utils.runs.metadata import read_settings
from utils.runs.state import TrainState

FLAGS = ("--data", "digits", "--model", "mlp", "--model_args", "{hidden: 16}", "--threads", "1", "--keep", "9")
FLAGS += ("--lr_schedule", "constant", "--save_every", "2", "--eval_every", "99")
FRESH = (*FLAGS, "--global_batch_size", "120")
RESUME = ("--run_name", "run", *FLAGS, "--resume", "auto", "--max_steps", "10")
STEPS = ("step-00000002", "step-00000004", "step-00000006", "step-00000008")
RUN, CHECKPOINTS, NEWEST = (Path("runs/run", *parts) for parts in ((), ("checkpoints",), ("checkpoints", STEPS[-1])))
NOBODY = 65534  # a user and a group without rights


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with `run`, which has the four checkpoints, and `whole`, which went on without a stop."""
    folder = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(folder))
        patch.chdir(folder)
        train_run(1, "whole", *FRESH, "--max_steps", "10")
        train_run(1, "run", *FRESH, "--max_steps", "8")
    return folder / "runs"


@pytest.fixture(autouse=True)
def fresh_copy(own_folders, trained):
    """runs/run and runs/whole in the test's own folder."""
    shutil.copytree(trained, "runs")


def contents(folder):
    """Everything below a folder, except the lock file, which changes with each run, and the page, with eval.py."""
    files = (path for path in sorted(folder.rglob("*")) if path.name != ".lock" and path.stem != "report")
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in files}


def refused(outcome, *texts):
    """Assert that a rank ended with code 2 and one line that says all of this."""
    assert outcome.code == 2, (outcome.code, outcome.err, outcome.out)
    assert outcome.err.count("\n") == 1 and "Traceback" not in outcome.err + outcome.out, outcome.err
    assert all(text in outcome.err for text in texts), outcome.err


# Each damages one checkpoint, given as its folder, with the random numbers of its first argument.


def truncate(rng, checkpoint):
    path = rng.choice(files_of(checkpoint))
    os.truncate(path, rng.randrange(path.stat().st_size))


def flip_a_bit(rng, checkpoint):
    path = rng.choice(files_of(checkpoint))
    data = bytearray(path.read_bytes())
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)


def delete(rng, checkpoint):
    rng.choice(files_of(checkpoint)).unlink()


def swap(rng, checkpoint):
    one, other = rng.sample(files_of(checkpoint), 2)
    exchange(one, other)


def swap_with_another_checkpoint(rng, checkpoint):
    """With the one before; only files that an update changes, the others may be the same in both."""
    name = rng.choice(["model.safetensors", "optimizer.bin", "state.json", "manifest.json"])
    exchange(checkpoint / name, CHECKPOINTS / STEPS[STEPS.index(checkpoint.name) - 1] / name)


def empty(rng, checkpoint):
    rng.choice(files_of(checkpoint)).write_bytes(b"")


def overwrite(rng, checkpoint):
    path = rng.choice(files_of(checkpoint))
    path.write_bytes(rng.randbytes(path.stat().st_size))


def append(rng, checkpoint):
    with rng.choice(files_of(checkpoint)).open("ab") as file:
        file.write(rng.randbytes(1))


def put_a_folder_there(rng, checkpoint):
    path = rng.choice(files_of(checkpoint))
    path.unlink()
    path.mkdir()


def put_a_broken_link_there(rng, checkpoint):
    path = rng.choice(files_of(checkpoint))
    path.unlink()
    path.symlink_to("nowhere")


def put_a_file_in_its_own_place(rng, checkpoint):
    shutil.rmtree(checkpoint)
    checkpoint.write_bytes(rng.randbytes(9))


def flip_a_bit_of_the_manifest(rng, checkpoint):
    data = bytearray((checkpoint / "manifest.json").read_bytes())
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    (checkpoint / "manifest.json").write_bytes(data)


def delete_the_manifest(rng, checkpoint):
    (checkpoint / "manifest.json").unlink()


DAMAGES = [truncate, flip_a_bit, delete, swap, swap_with_another_checkpoint, empty, overwrite, append]
DAMAGES += [put_a_folder_there, put_a_broken_link_there, put_a_file_in_its_own_place]
DAMAGES += [flip_a_bit_of_the_manifest, delete_the_manifest]
QUICK = (flip_a_bit, delete, put_a_broken_link_there, delete_the_manifest)
SOME_DAMAGES = [pytest.param(damage, marks=[pytest.mark.full] * (damage not in QUICK)) for damage in DAMAGES]
POINTERS = [b"", b"\xff\xfe\x00", b"../..\n", b"/\n", b"step-99999999\n", b"step-00000002\n", b"rubbish", None]


def files_of(checkpoint):
    return sorted(checkpoint.iterdir())


def exchange(one, other):
    first, second = one.read_bytes(), other.read_bytes()
    one.write_bytes(second)
    other.write_bytes(first)


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.full)])
def test_each_of_260_random_damages_is_named_and_the_newest_good_checkpoint_is_taken(trained, damage, seed):
    rng = random.Random(f"{damage.__name__} {seed}")
    for _ in range(10):
        shutil.rmtree("runs")
        shutil.copytree(trained / "run", RUN)
        for name in STEPS[-1 : -rng.choice([2, 2, 3]) : -1]:
            damage(rng, CHECKPOINTS / name)
        for pointer in rng.choice([(), ("latest",), ("best",), ("latest", "best")]):
            (CHECKPOINTS / pointer).unlink()
            if content := rng.choice(POINTERS):
                (CHECKPOINTS / pointer).write_bytes(content)
        changed = {name: changed_files(trained, name) for name in reversed(STEPS)}
        assert changed[STEPS[-1]]  # no damage left everything as it was
        good = next(name for name in changed if not changed[name])
        found, damages = newest_good(CHECKPOINTS)
        assert found == CHECKPOINTS / good
        assert len(damages) == list(changed).index(good)
        for name, line in zip(changed, damages, strict=False):
            assert line == damage_of(CHECKPOINTS / name) and "\n" not in line
            assert "manifest.json" in changed[name] or any(
                line.startswith(f"{CHECKPOINTS / name / file}: ") for file in changed[name]
            ), (line, changed[name])


def changed_files(trained, name):
    """Of a checkpoint, the names of the files that are not as they were written."""
    before, after = contents(trained / "run/checkpoints" / name), contents(CHECKPOINTS / name)
    return [file for file in before if after.get(file) != before[file]]


def test_each_change_of_one_byte_of_a_manifest_is_seen(tmp_path):
    """Each bit flipped, and each byte replaced by one that a reader of text or of JSON might take for the same."""
    checkpoint = tmp_path / "step-00000001"
    checkpoint.mkdir()
    (checkpoint / "a").write_text("a")
    write_manifest(checkpoint)
    assert damage_of(checkpoint, needed=["a"]) is None
    path, manifest = checkpoint / "manifest.json", (checkpoint / "manifest.json").read_bytes()
    for position, byte in enumerate(manifest):
        for other in {byte ^ 1 << bit for bit in range(8)} | set(b"\r\n ") - {byte}:
            path.write_bytes(manifest[:position] + bytes([other]) + manifest[position + 1 :])
            assert str(checkpoint) in (damage_of(checkpoint, needed=["a"]) or ""), (position, byte, other)
    for other in (manifest.replace(b"\n", b"\r\n"), manifest[:-1], manifest + b"\n", b" " + manifest):
        path.write_bytes(other)
        assert damage_of(checkpoint, needed=["a"]) is not None


@pytest.mark.parametrize("position", range(3))
def test_a_disk_that_cannot_read_counts_as_damage_and_the_file_is_named(monkeypatch, position):
    names = ["labels.json", "model.safetensors", "state.json"]
    real = hashlib.file_digest

    def digest(file, kind):
        if file.name == str(NEWEST / names[position]):
            raise OSError(errno.EIO, "Input/output error")  # as read() raises it: without the name
        return real(file, kind)

    monkeypatch.setattr(hashlib, "file_digest", digest)
    found, (line,) = newest_good(CHECKPOINTS)
    assert found == CHECKPOINTS / STEPS[-2]
    assert line.startswith(f"{NEWEST / names[position]}: ") and "Input/output error" in line


# The same through train.py and eval.py.


@pytest.mark.parametrize("damage", SOME_DAMAGES, ids=lambda damage: damage.__name__)
def test_a_run_goes_on_from_the_newest_good_checkpoint_as_if_it_had_never_stopped(trained, damage):
    damage(random.Random(damage.__name__), NEWEST)
    before = {name for name in reversed(STEPS) if not changed_files(trained, name)}
    (outcome,) = run_ranks(1, train.main, RESUME)
    went_on(outcome, CHECKPOINTS / max(before))


@pytest.mark.parametrize("content", [pytest.param(b"\xff\xfe\x00", marks=pytest.mark.full), b"../..\n", None], ids=repr)
def test_pointers_matter_to_no_resume_and_are_fixed_by_it(content):
    for name in ("latest", "best"):
        (CHECKPOINTS / name).unlink()
        if content is not None:
            (CHECKPOINTS / name).write_bytes(content)
    (evaluated,) = run_ranks(1, eval.main, ("--ckpt", "runs/run"))
    assert evaluated.code == 0 and evaluated.value["step"] == 8, evaluated.err
    (outcome,) = run_ranks(1, train.main, RESUME)
    assert outcome.code == 0 and outcome.err == "" and f"resuming from {NEWEST}\n" in outcome.out
    assert all(torch.equal(weights("whole")[name], tensor) for name, tensor in weights("run").items())
    state = json.loads((CHECKPOINTS / "step-00000010/state.json").read_text())["state"]
    assert (CHECKPOINTS / "latest").read_text() == "step-00000010\n"
    assert (CHECKPOINTS / "best").read_text() == f"step-{state['best_step']:08d}\n"


def test_two_processes_go_on_from_the_newest_good_checkpoint():
    shutil.rmtree("runs")
    train_run(2, "whole", *FRESH, "--max_steps", "10")
    train_run(2, "run", *FRESH, "--max_steps", "8")
    flip_a_bit(random.Random(0), NEWEST)
    outcomes = run_ranks(2, train.main, RESUME)
    went_on(outcomes[0], CHECKPOINTS / STEPS[-2])
    assert outcomes[1].code == 0 and outcomes[1].err + outcomes[1].out == ""


def went_on(outcome, good):
    """Assert that a rank said what was damaged, went on from this checkpoint, and ended where `whole` did."""
    assert outcome.code == 0 and outcome.err == "" and "Traceback" not in outcome.out, outcome.err + outcome.out
    said = [line for line in outcome.out.splitlines() if line.endswith(f"; resuming from {good} instead")]
    assert len(said) == (int(STEPS[-1][5:]) - int(good.name[5:])) / 2, outcome.out
    assert said[0].startswith(str(NEWEST))
    assert [record["step"] for record in records("run", "start")][-1] == int(good.name[5:])
    ours, uninterrupted = weights("run"), weights("whole")
    assert ours.keys() == uninterrupted.keys()
    assert all(torch.equal(ours[name], uninterrupted[name]) for name in ours)
    assert damage_of(CHECKPOINTS / "step-00000008") is None  # made anew


@pytest.mark.parametrize("processes", [pytest.param(1, marks=pytest.mark.full), 2])
def test_without_a_good_checkpoint_nothing_is_trained_and_nothing_changes(processes):
    for number, name in enumerate(STEPS):
        DAMAGES[number](random.Random(number), CHECKPOINTS / name)
    before = contents(RUN)
    outcomes = run_ranks(processes, train.main, RESUME)
    refused(outcomes[0], f"{NEWEST}/", "all checkpoints are damaged; start a new run with another --run_name")
    assert all(outcome.code == 2 and outcome.err == "" for outcome in outcomes[1:])
    assert contents(RUN) == before


def test_a_run_that_lost_its_checkpoints_says_that_it_begins_anew():
    for name in STEPS:
        shutil.rmtree(CHECKPOINTS / name)
    (outcome,) = run_ranks(1, train.main, (*RESUME, "--global_batch_size", "120"))
    assert outcome.code == 0 and "no checkpoint" in outcome.out, outcome.err + outcome.out


@pytest.mark.parametrize(
    "damage",
    [flip_a_bit, pytest.param(delete, marks=pytest.mark.full), delete_the_manifest],
    ids=lambda damage: damage.__name__,
)
def test_a_damaged_checkpoint_asked_for_by_its_path_is_refused(damage):
    damage(random.Random(0), NEWEST)
    before = contents(RUN)
    flags = ("--run_name", "run", *FLAGS, "--resume", str(NEWEST), "--max_steps", "10")
    for main, arguments in (
        (train.main, flags),
        (eval.main, ("--ckpt", str(NEWEST))),
        (eval.main, ("--ckpt", "runs/run")),
    ):
        (outcome,) = run_ranks(1, main, arguments)
        refused(outcome, f"{NEWEST}/", f"{CHECKPOINTS / STEPS[-2]} is good")
    assert contents(RUN) == before


def test_all_is_verified_before_anything_is_loaded():
    flip_a_bit(random.Random(0), NEWEST)
    (outcome,) = run_ranks(1, _order_of_events, train.main, RESUME)
    good = CHECKPOINTS / STEPS[-2]
    assert outcome.value[:2] == [("verified", NEWEST, False), ("verified", good, True)], outcome.err
    *before, aside = outcome.value[2:]
    assert before[-3:] == [
        ("read", good / "model.safetensors"), ("read", good / "optimizer.bin"), ("loaded", "Module"),
    ]  # fmt: skip
    assert {event[0] for event in before[:-3]} <= {"loaded"}  # Accelerate gives the optimizer its own state
    assert aside == ("verified", NEWEST, False) and NEWEST.with_name(f"{NEWEST.name}.damaged").is_dir()


def _order_of_events(main, flags):
    """What main verifies, reads and loads, in that order."""
    from utils.runs import loading, manifest, writing

    events = []

    def watch(owner, name, note):
        real = getattr(owner, name)

        def watched(*arguments, **named):
            result = real(*arguments, **named)
            events.append(note(arguments[0], result))
            return result

        setattr(owner, name, watched)

    for module in (manifest, writing):  # to find a checkpoint, and to put damaged ones aside
        watch(module, "damage_of", lambda folder, damage: ("verified", folder, damage is None))
    watch(loading, "load_file", lambda path, _: ("read", path))
    watch(torch, "load", lambda path, _: ("read", path))
    watch(torch.nn.Module, "load_state_dict", lambda *_: ("loaded", "Module"))
    watch(torch.optim.Optimizer, "load_state_dict", lambda optimizer, _: ("loaded", type(optimizer).__name__))
    main(flags)
    return events


# Permissions, as a user who is not root.


@pytest.fixture
def of_nobody(trained, monkeypatch):
    """The runs in a folder that an unprivileged user owns and can reach; the tests' own are closed to others."""
    folder = Path(tempfile.mkdtemp(dir="/tmp", prefix="lockstep-of-nobody-"))
    shutil.copytree(trained, folder / "runs")
    shutil.copytree(trained / "run", folder / "runs/warm")
    if os.geteuid() == 0:
        for path in (folder, *folder.rglob("*")):
            os.chown(path, NOBODY, NOBODY)
    monkeypatch.setenv("HOME", str(folder / "home"))
    monkeypatch.setenv("HF_HOME", str(folder / "home"))
    monkeypatch.chdir(folder)
    yield folder
    for path in (RUN, CHECKPOINTS, *CHECKPOINTS.iterdir()):
        path.chmod(0o700)
    shutil.rmtree(folder)


def _without_privileges(main, flags):
    with contextlib.redirect_stdout(io.StringIO()):
        train.main([*RESUME, "--run_name", "warm"])  # imports what is imported late: Python itself may lie in /root
    if os.geteuid() == 0:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
    main(flags)


@pytest.mark.parametrize(
    "name",
    [
        "model.safetensors",
        pytest.param("manifest.json", marks=pytest.mark.full),
        "",
    ],
)
def test_what_may_not_be_read_counts_as_damaged(of_nobody, name):
    (NEWEST / name).chmod(0)
    (outcome,) = run_ranks(1, _without_privileges, train.main, RESUME)
    assert f"{NEWEST / (name or 'manifest.json')}: Permission denied; resuming from" in outcome.out
    went_on(outcome, CHECKPOINTS / STEPS[-2])


@pytest.mark.parametrize(
    ("folder", "mode"),
    [
        (CHECKPOINTS, 0),
        pytest.param(CHECKPOINTS, 0o300, marks=pytest.mark.full),
        pytest.param(CHECKPOINTS, 0o400, marks=pytest.mark.full),
        (RUN, 0),
    ],
)
def test_a_folder_that_may_not_be_listed_or_entered_is_no_fresh_start(of_nobody, folder, mode):
    before = contents(RUN)
    folder.chmod(mode)
    (outcome,) = run_ranks(1, _without_privileges, train.main, RESUME)
    folder.chmod(0o700)
    refused(outcome, str(folder), "Permission denied")
    assert contents(RUN) == before


def test_evaluation_says_what_may_not_be_read(of_nobody):
    for path in (NEWEST / "model.safetensors", CHECKPOINTS):
        path.chmod(0)
        (outcome,) = run_ranks(1, _without_privileges, eval.main, ("--ckpt", "runs/run"))
        path.chmod(0o700)
        refused(outcome, str(path), "Permission denied")


# Malicious files under a manifest that matches.


class Payload:
    def __reduce__(self):
        return (os.mkdir, ("executed",))


def as_torch_writes_it(path):
    torch.save(Payload(), path)


def as_torch_wrote_it_once(path):
    torch.save(Payload(), path, _use_new_zipfile_serialization=False)


def as_pickle_writes_it(path):
    path.write_bytes(pickle.dumps(Payload()))


def as_pickle_of_text(path):
    path.write_bytes(pickle.dumps(Payload(), protocol=0))


def inside_a_state(path):
    momentum = {"momentum_buffer": Payload()}
    torch.save(
        {"state": {0: momentum}, "param_groups": [{"params": [0]}, {"params": [1]}], "fc.weight": Payload()}, path
    )


def as_yaml(path):
    path.write_text("model: !!python/object/apply:os.mkdir [executed]\n")


PICKLES = [as_torch_writes_it, as_torch_wrote_it_once, as_pickle_writes_it, as_pickle_of_text, inside_a_state, as_yaml]
CODES = {  # of train.py and of eval.py when a file is something else than it should be
    "model.safetensors": (2, 2),
    "optimizer.bin": (2, 0),
    "random_states_0.pkl": (0, 0),  # of Accelerate, for its load_state
    "state.json": (2, 2),
    "config.yaml": (2, 2),
    "labels.json": (2, 2),
}


def by_time(cases, is_quick, is_full):
    """The cases: those that `make test` runs, those of `make test-all`, and the others, which are slow together."""
    for case in cases:
        marks = [] if is_quick(*case) else [pytest.mark.full if is_full(*case) else pytest.mark.slow]
        yield pytest.param(*case, marks=marks)


def both(train_code, eval_code):
    """Assert that train.py and eval.py end so (None: with 0 or 2), and where they refuse, in one line without a trace.

    They are given the newest checkpoint, under a manifest that is made to match.
    """
    (NEWEST / "manifest.json").unlink()
    write_manifest(NEWEST)
    before = contents(RUN)
    for main, flags, code in ((eval.main, ("--ckpt", str(NEWEST)), eval_code), (train.main, RESUME, train_code)):
        (outcome,) = run_ranks(1, main, flags)
        assert not Path("executed").exists()
        assert outcome.code in ((0, 2) if code is None else (code,)), (main, outcome.code, outcome.out + outcome.err)
        if outcome.code == 2:
            refused(outcome, str(NEWEST))
            assert contents(RUN) == before
        assert "Traceback" not in outcome.out + outcome.err, (main, outcome.out + outcome.err)


def test_the_pickles_would_be_executed_by_who_loads_them_carelessly():
    for write in PICKLES:
        write(Path("pickle"))
        with contextlib.suppress(Exception):
            torch.load("pickle", weights_only=False)
        if not Path("executed").exists():
            with contextlib.suppress(Exception):
                yaml.unsafe_load(Path("pickle").read_text())
        assert Path("executed").is_dir(), f"{write.__name__} is harmless and shows nothing"
        Path("executed").rmdir()


QUICK_PICKLES = [
    ("optimizer.bin", as_torch_writes_it),
    ("optimizer.bin", as_pickle_writes_it),
    ("config.yaml", as_yaml),
]
QUICK_PICKLES += [("random_states_0.pkl", as_torch_writes_it), ("model.safetensors", as_torch_writes_it)]


@pytest.mark.parametrize(
    ("name", "write"),
    by_time(
        itertools.product(CODES, PICKLES),
        lambda *case: case in QUICK_PICKLES,
        lambda *case: case[1] is as_torch_writes_it or case == ("optimizer.bin", as_torch_wrote_it_once),
    ),
)
def test_no_file_of_a_checkpoint_is_executed(name, write):
    write(NEWEST / name)
    both(*CODES[name])


def test_an_optimizer_file_with_code_is_refused_as_such():
    as_torch_writes_it(NEWEST / "optimizer.bin")
    (NEWEST / "manifest.json").unlink()
    write_manifest(NEWEST)
    (outcome,) = run_ranks(1, train.main, RESUME)
    refused(outcome, f"{NEWEST / 'optimizer.bin'}: is refused, because it contains objects whose loading would execute")


MALFORMED = {  # the first of each is quick, the second is in `make test-all`
    "state.json": [
        b"[" * 100_000, b"9" * 5000, b"{}", b"", b"null", b"[]", b'{"state": ' * 20_000, b"\xff\xfe", b"NaN",
    ],
    "labels.json": [
        b"null", b"[[]]", b"9" * 5000, b"", b"3", b"{}", b"[]", b'"abcdefghij"', b"[1, 2]", b"[" * 100_000, b"\xff",
    ],
    "config.yaml": [
        b"[" * 500, b"model: !!bool x", b"lr: {}", b"", b"3", b"[]", b"a: &a [*a]", b"model: !!timestamp x", b"\xff",
        b"1: 2", b"epochs: x", b"std: [x]", b"eval_batch_size: x", b"num_workers: []", b"lr: .nan", b"model: 3",
        b"lr: 1" + 5000 * b"0",
    ],
    "optimizer.bin": [b".", b"", b"\x80\x02.", b"0.", b"PK\x03\x04", b"PK\x05\x06" + bytes(18), b"(" * 1000],
    "model.safetensors": [b"\xff" * 8, b"", b"\x02" + bytes(7) + b"{}", bytes(8), b"\x02" + bytes(7) + b"[]"],
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "content"),
    by_time(
        [(name, content) for name, contents in MALFORMED.items() for content in contents],
        lambda name, content: content == MALFORMED[name][0],
        lambda name, content: content == MALFORMED[name][1],
    ),
    ids=lambda part: repr(part)[:30],
)
def test_a_malformed_file_is_named_in_one_line(name, content):
    put(name, content)
    both(*CODES[name])


def put(name, content):
    """Write the file; into config.yaml a line in the place of the setting's own."""
    if name == "config.yaml" and b": " in content:
        settings = yaml.safe_load((NEWEST / name).read_bytes())
        settings.pop(content.split(b":")[0].decode(), None)
        content = yaml.safe_dump(settings).encode() + content + b"\n"
    (NEWEST / name).write_bytes(content)


@pytest.mark.parametrize(
    ("setting", "eval_code"),
    by_time(
        [
            *((setting, 2) for setting in ("data: 3", "model_args: []", "mixed_precision: 7", "data: [digits]")),
            *(
                (setting, 2)
                for setting in ("model_args: {1: 2}", "model: [mlp]", "loss: nothing", "max_eval_samples: x")
            ),
            *((setting, None) for setting in ("seed: x", "flip: 3", "mean: x", "data_subset: 7", "cache_dir: 3")),
            *((setting, None) for setting in ("optimizer: nothing", "channels_last: x", "eval_fraction: x")),
        ],
        lambda setting, _: setting == "model_args: []",
        lambda setting, _: setting == "data: 3",
    ),
)
def test_a_setting_of_the_wrong_kind_is_named_in_one_line_where_it_matters(setting, eval_code):
    put("config.yaml", setting.encode())
    both(None, eval_code)


WRONG = [  # in state.json: one for each kind of check
    *(("state", value) for value in (None, [], {})),
    *(("state.step", value) for value in (-1, 10**18, "x", 7, 1.5, True, 10**30)),
    *(("state.position", value) for value in (-1, 7, 1e300)),
    *(("state.seconds", value) for value in (math.nan, math.inf, -1, 10**400)),
    *(("state.best", value) for value in ("x", math.nan)),
    *(("state.since_log", value) for value in ({"speed": 1}, {"loss": "x"}, [])),
    ("state.owes_evaluation", 1),
    *(("state.evaluations", value) for value in ([1], [{}], [{"step": "x"}], [{"step": 1, "loss": math.nan}])),
    ("state.batch_size", 0),
    *(("format", value) for value in (0, "1", None)),
    *(("global_batch_size", value) for value in (0, 10**30)),
    *(("labels", value) for value in (None, 1)),
    ("versions", []),
    ("device", 3),
    *(("input", value) for value in ({}, None, {"height": 8})),
    *(("input.height", value) for value in (0, 8.5, 10**12)),
    *(("input.std", value) for value in ("x", [0.0], [0.5, 0.5], [math.nan])),
]
QUICK_WRONG = ["state None", "state.step -1", "state.since_log {'speed': 1}", "format 0", "input.height 0"]
QUICK_WRONG += [f"global_batch_size {10**30}"]


@pytest.mark.parametrize(
    ("key", "value"),
    by_time(WRONG, lambda key, value: f"{key} {value}" in QUICK_WRONG, lambda *_: True),
    ids=lambda part: repr(part)[:30],
)
def test_a_value_of_the_wrong_kind_is_one_line(key, value):
    path = NEWEST / "state.json"
    saved = json.loads(path.read_text())
    *folders, last = key.split(".")
    place = saved
    for name in folders:
        place = place[name]
    place[last] = value
    path.write_text(json.dumps(saved))
    both(2, None)  # eval.py uses no plan, which some of the values contradict


def change_state(change, checkpoint=NEWEST):
    """Let `change` edit the contents of state.json, under a manifest that is made to match."""
    path = checkpoint / "state.json"
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))
    (checkpoint / "manifest.json").unlink()
    write_manifest(checkpoint)


def test_a_newer_format_is_refused_with_the_version_that_wrote_it():
    for main, flags, wrote, writer in (
        (eval.main, ("--ckpt", str(NEWEST)), {"lockstep": "9.8"}, "Lockstep 9.8"),
        (train.main, RESUME, None, "a newer Lockstep"),
    ):
        change_state(lambda values, wrote=wrote: values.update(format=2, state="of another shape", versions=wrote))
        before = contents(RUN)
        (outcome,) = run_ranks(1, main, flags)
        problem = f"format 2, written by {writer}, is newer than format 1, which this version reads"
        refused(outcome, f"{NEWEST}/state.json: {problem}; update Lockstep")
        assert contents(RUN) == before


@dataclass
class LaterState(TrainState):
    """The training state with a field that a later version has added to format 1."""

    patience: int = field(default=7, metadata={"optional": True})


def test_a_state_may_lack_fields_that_were_added_later_and_no_other():
    values = json.loads((NEWEST / "state.json").read_text())["state"]
    assert LaterState.from_dict(values) == LaterState(**values, patience=7)
    assert LaterState.from_dict(values | {"patience": 3}).patience == 3
    for name in values:
        with pytest.raises(ValueError, match=f"'{name}' is missing or malformed"):
            LaterState.from_dict({key: value for key, value in values.items() if key != name})


def test_a_resumed_run_forgets_the_evaluations_after_its_checkpoint():
    def add_later(values):
        values["state"]["evaluations"] += [{"step": step, "accuracy": 0.5} for step in (8, 9, 10)]

    change_state(add_later)
    train_run(1, "run", *RESUME[2:])
    found, expected = (
        [
            evaluation["step"]
            for evaluation in json.loads((folder / "step-00000010/state.json").read_text())["state"]["evaluations"]
        ]
        for folder in (CHECKPOINTS, Path("runs/whole/checkpoints"))
    )
    assert expected == [10] and found == [8, 8, 10]  # update 8 had one already


@pytest.mark.full
def test_two_processes_say_once_that_a_file_is_malformed():
    (NEWEST / "state.json").write_text("{}")
    (NEWEST / "manifest.json").unlink()
    write_manifest(NEWEST)
    for main, flags in ((eval.main, ("--ckpt", str(NEWEST))), (train.main, RESUME)):
        first, second = run_ranks(2, main, flags)
        refused(first, f"{NEWEST}/state.json")
        assert second.code == 2 and second.err == ""


# Checkpoints of strangers, with a manifest that matches


def bomb(width=9, depth=9) -> bytes:
    """YAML of a few hundred bytes that stands for 9 ** 9 values."""
    lines = [f"a0: &a0 [{', '.join(['x'] * width)}]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * width)}]" for n in range(1, depth)]
    return ("model_args: {" + ", ".join(lines) + "}\n").encode()


@pytest.mark.parametrize(
    ("name", "content", "what"),
    [
        ("config.yaml", bomb(), "config.yaml: not valid YAML"),
        pytest.param(
            "config.yaml", b"model_args: " + b"[" * 3000, "config.yaml: not valid YAML", marks=pytest.mark.full
        ),
        ("config.yaml", b"#" * 2**20, "config.yaml: is larger than 128 KiB"),
        pytest.param(
            "labels.json",
            b"[" + b" " * 2**23 + b"]",
            "labels.json: is larger than 8192 KiB",
            marks=pytest.mark.full,
        ),
        ("state.json", b'{"state": ' + b"1" * 10**6 + b"}", "state.json: not valid JSON"),
    ],
    ids=["bomb", "nesting", "settings", "classes", "digits"],
)
def test_a_file_that_would_take_all_time_or_memory_is_refused(name, content, what):
    if b"model_args" in content:
        put(name, content)
    else:
        (NEWEST / name).write_bytes(content)
    (NEWEST / "manifest.json").unlink()
    write_manifest(NEWEST)
    for main, flags in ((eval.main, ("--ckpt", str(NEWEST))), (train.main, RESUME)):
        (outcome,) = run_ranks(1, main, flags, seconds=40)
        refused(outcome, f"{NEWEST}/{what}")


@pytest.mark.parametrize(
    "name",
    [
        "model.safetensors",
        *(pytest.param(name, marks=pytest.mark.full) for name in ("state.json", "config.yaml", "labels.json")),
        "optimizer.bin",
    ],
)
def test_a_manifest_that_does_not_name_a_needed_file_is_refused(name):
    manifest = json.loads((NEWEST / "manifest.json").read_text())
    del manifest["files"][name]
    (NEWEST / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")
    (evaluated,) = run_ranks(1, eval.main, ("--ckpt", str(NEWEST)))
    if name == "optimizer.bin":  # which an evaluation does not read
        assert evaluated.code == 0, evaluated.err
    else:
        refused(evaluated, f"{NEWEST}/manifest.json: does not name {name}")
    (outcome,) = run_ranks(1, train.main, RESUME)
    went_on(outcome, CHECKPOINTS / STEPS[-2])
    assert f"{NEWEST}/manifest.json: does not name {name}; resuming from" in outcome.out


def test_a_pointer_that_is_a_fifo_or_huge_names_nothing():
    for name in ("latest", "best"):
        (CHECKPOINTS / name).unlink()
    os.mkfifo(CHECKPOINTS / "best")
    (CHECKPOINTS / "latest").write_bytes(b" " * 10**6 + STEPS[0].encode())
    (outcome,) = run_ranks(1, eval.main, ("--ckpt", "runs/run"), seconds=30)
    assert outcome.code == 0 and outcome.value["step"] == 8, outcome.err


def test_settings_of_a_checkpoint_do_not_apply_to_this_machine():
    """Its own flags and defaults choose its folders and the number of processes."""
    settings = {"cache_dir": "stranger/cache", "data_dir": "stranger/data", "output_dir": "stranger/runs"}
    settings |= {
        "num_workers": 4000,
        "data_on_device": "yes",
        "threads": 9999,
        "timeout": 0.001,
        "interface": "stranger0",
        "run_name": "stranger",
    }
    settings |= {"backend": "nccl", "init_method": "file:///stranger", "resume": "stranger", "profile": True}
    mine = yaml.safe_load((NEWEST / "config.yaml").read_bytes()) | settings
    mine |= {"data": "synthetic/10x8x100", "image_size": 8}
    (NEWEST / "config.yaml").write_text(yaml.safe_dump(mine))
    (NEWEST / "manifest.json").unlink()
    write_manifest(NEWEST)
    read = read_settings(NEWEST)
    assert read.model_args == {"hidden": 16}
    for name in settings:
        assert getattr(read, name) == getattr(TrainConfig, name), name
    outcomes = run_ranks(2, eval.main, ("--ckpt", str(NEWEST), "--cache_dir", "mine"))
    assert [outcome.code for outcome in outcomes] == [0, 0], outcomes[0].err
    assert not Path("stranger").exists() and Path("mine").is_dir()
    given = [*RESUME, "--data", "digits"]
    (outcome,) = run_ranks(1, train.main, given)
    assert outcome.code == 0, outcome.err
    assert not Path("stranger").exists() and "stranger" not in outcome.out
    assert "data was synthetic/10x8x100 in the checkpoint, now digits" in outcome.out


def test_a_model_that_would_be_fetched_from_a_stranger_is_refused():
    for model in ("timm/hf-hub:stranger/model", "hf-hub:stranger/model"):
        put("config.yaml", f"model: '{model}'".encode())
        (NEWEST / "manifest.json").unlink()
        write_manifest(NEWEST)
        (outcome,) = run_ranks(1, eval.main, ("--ckpt", str(NEWEST)))
        assert outcome.code == 2 and f"--model {model}: " in outcome.err and outcome.err.count("\n") == 1, outcome.err
