"""replay.py --verify never accepts a run folder that was changed or damaged.

What contradicts itself is refused without computing anything; the rest is computed again. A test
forges 45 run folders, or with `-m full` 1,000.
"""

import contextlib
import io
import json
import random
import re
import shutil
import signal
from pathlib import Path

import pytest
import torch
import yaml
from helpers.ranks import returned, run_ranks, start_ranks
from helpers.training_runs import (
    full,
    records,
    refused,
    rewrite_manifest,
    slow_train,
    train_run,
    words,
)
from helpers.waiting import newest, until
from safetensors.torch import load_file, save_file

import replay
from extras.verify import read_run
from utils.settings.train import OF_THIS_MACHINE, TrainConfig

FLAGS = words("--data digits --model mlp --max_train_samples 96 --max_eval_samples 16 --threads 1")
FLAGS += words("--global_batch_size 16 --warmup_steps 0 --report false --microbatches 2")
FLAGS += words("--max_steps 9 --log_every 4 --eval_every 3 --ema_decay 0.9 --keep all")
ENDS_EARLY = [*FLAGS, *words("--early_stopping 1 --lr 1e-9")]  # after update 6
RUN = Path("runs/run")
VERIFY = words("--run runs/run --verify")
ALL = "equal in updates 1 to 6, and in the weights of step-00000003, step-00000006"


def log_of(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]


def write_log(run: Path, lines: list) -> None:
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    (run / "log.jsonl").write_text("".join(text + "\n" for text in texts))


def verified(*flags: str) -> str:
    """What a verification of runs/run prints, which ends with exit code 0."""
    (outcome,) = run_ranks(1, replay.main, [*VERIFY, *flags])
    assert (outcome.code, outcome.err) == (0, ""), outcome.err
    return outcome.out


# Honest runs


def test_a_run_that_ended_early_is_verified_up_to_its_last_checkpoint():
    """Updates 5 and 6 have their digests in the last checkpoint alone."""
    train_run(1, "run", *ENDS_EARLY)
    assert [len(record["digest"]) for record in records("run", "train")] == [4]
    assert verified("all").endswith(f"{ALL}; not compared: nothing\n")
    part = "equal in updates 4 to 5, and in the weights of none; not compared: "
    rest = "step-00000003, step-00000006, 1, 2, 3, 6\n"
    assert verified("5").endswith(part + rest)
    train_run(1, "run", *ENDS_EARLY, *words("--early_stopping 9 --resume auto"))
    line = "equal in updates 1 to 9, and in the weights of step-00000003, step-00000006, step-"
    assert f"{line}00000009; not compared: nothing" in verified("all")


@pytest.mark.parametrize("number", [signal.SIGTERM, full(signal.SIGKILL)])
def test_a_run_that_was_stopped_or_killed_is_verified_up_to_its_last_checkpoint(number):
    """A stopped one stops after an evaluation at the latest, before the next record."""
    flags = [*FLAGS, *words("--save_every 3 --log_every 5 --max_steps 14")]
    launch = start_ranks(1, slow_train, flags, 0.0, 6)
    until(Path("held-0").exists)
    until((RUN / "checkpoints/step-00000006").is_dir)
    launch.kill(number)
    Path("go").touch()
    launch.finish()
    assert [len(record["digest"]) for record in records("run", "train")] == [5]
    assert newest() in ([6] if number == signal.SIGKILL else [7, 8, 9])
    line = f"equal in updates 1 to {newest()}, and in the weights of step-00000003, step-00000006"
    assert line in verified("all")


# Forged runs


def a_digest(chance: random.Random, run: Path) -> None:
    """A digest of a record is another, or malformed, or there is one more or fewer."""
    lines = log_of(run)
    digests = chance.choice([line["digest"] for line in lines if "digest" in line])
    place = chance.randrange(len(digests))
    old = digests[place]
    digit = chance.randrange(16)
    flipped = f"{int(old[digit], 16) ^ chance.randrange(1, 16):x}"
    values = [None, 5, 0.5, True, [], {}, "", "x" * 16, old[1:], old + "0", old.upper() + " "]
    values += [old[:digit] + flipped + old[digit + 1 :]] * 12
    kind = chance.randrange(6)
    if kind == 0:
        del digests[place]
    elif kind == 1:
        digests.insert(place, f"{chance.getrandbits(64):016x}")
    elif kind == 2:
        digests.insert(0, old)
    else:
        digests[place] = chance.choice(values)
    write_log(run, lines)


def all_digests(chance: random.Random, run: Path) -> None:
    """All digests of a record are something else, or gone."""
    lines = log_of(run)
    (line,) = [line for line in lines if "digest" in line]
    line["digest"] = chance.choice([None, 7, "digest", {}, [], line["digest"][::-1], [None] * 4])
    if chance.random() < 0.2:
        del line["digest"]
    write_log(run, lines)


def a_step(chance: random.Random, run: Path) -> None:
    """The step of a start or of a train record is another, or malformed."""
    lines = log_of(run)
    line = chance.choice([line for line in lines if line["kind"] in ("start", "train")])
    old = line["step"]
    values = [f"{old}", float(old), old + 0.5, True, None, [old], -1, 10**9, 2**70, "x"]
    line["step"] = chance.choice([*values, old + 1, old + 2, max(0, old - 1) or 3])
    if chance.random() < 0.1:
        del line["step"]
    write_log(run, lines)


def lines_of_the_log(chance: random.Random, run: Path) -> None:
    """Lines of the log are gone, double, in another order or not JSON."""
    lines = log_of(run)
    trained = next(n for n, line in enumerate(lines) if line["kind"] == "train")
    kind = chance.randrange(6)
    if kind == 0:  # the end is cut off
        lines = lines[: chance.randrange(trained + 1)]
    elif kind == 1:
        del lines[trained]
    elif kind == 2:
        lines.insert(chance.randrange(trained + 1, len(lines) + 1), lines[trained])
    elif kind == 3:
        lines.insert(
            chance.randrange(len(lines)), chance.choice(["{", "null", "5", "[]", "[" * 9999, ""])
        )
    elif kind == 4:
        lines = [line for line in lines if line["kind"] != "start"]
    else:
        more = {"kind": "train", "step": chance.choice([7, 9, 10, 10**9])}
        lines.append(more | {"digest": [f"{chance.getrandbits(64):016x}"] * chance.randint(1, 5)})
    write_log(run, lines)


def a_setting(chance: random.Random, run: Path) -> None:
    """A setting in config.yaml, or in that of a checkpoint, is another, malformed or gone."""
    place = chance.choice([run, *sorted(run.glob("checkpoints/step-*"))])
    path = place / "config.yaml"
    values = yaml.safe_load(path.read_text())
    default = vars(TrainConfig())
    names = [name for name in values if name in default and name not in OF_THIS_MACHINE]
    name = chance.choice(["microbatches", *names])
    value = values[name]
    others = [7, 0.25, "x", "mlp", "constant", True, False, None, 10**9, [1], ["x"], {}, "null"]
    if chance.random() < 0.3 and value != default[name]:
        del values[name]
    else:
        values[name] = chance.choice([each for each in others if each not in (value, [value])])
        if values[name] is None or default[name] is None:
            values[name] = {"a": object.__name__}  # of no type that a setting has
    path.write_text(yaml.safe_dump(values))
    if place != run:
        rewrite_manifest(place)


def a_file(chance: random.Random, run: Path) -> None:
    """A file that a verification needs is gone, empty, cut or has other bytes."""
    paths = [run / "log.jsonl", run / "config.yaml", *run.glob("checkpoints/step-*/*")]
    path = chance.choice(sorted(path for path in paths if path.name != "samples.parquet"))
    data = bytearray(path.read_bytes())
    kind = chance.randrange(3 if path.name == "log.jsonl" else 4)  # it has texts, and other numbers
    if kind == 0:
        path.unlink()
    elif kind == 1:
        path.write_bytes(b"")
    elif kind == 2:
        path.write_bytes(data[: chance.randrange(len(data) // 2)])
    else:
        data[chance.randrange(len(data))] ^= 0x80  # no ASCII character any more
        path.write_bytes(data)


def a_state(chance: random.Random, run: Path) -> None:
    """The step or the digests in a checkpoint are others, or malformed; its manifest fits."""
    checkpoint = chance.choice(sorted(run.glob("checkpoints/step-*")))
    path = checkpoint / "state.json"
    values = json.loads(path.read_text())
    state = values["state"]
    if chance.random() < 0.4:
        new = [state["step"] + 1, state["step"] - 1, 10**9, "6", 6.0, None, True]
        state["step"] = chance.choice(new)
    else:
        other = [f"{chance.getrandbits(64):016x}" for _ in state["digest"]]
        new = [
            other,
            None,
            5,
            [5],
            [None],
            [*state["digest"], other[0]],
            state["digest"][1:] + other[:1],
        ]
        new += [[other[0], *state["digest"]], ["x" * 16] * len(other)]
        state["digest"] = chance.choice(new)
    path.write_text(json.dumps(values))
    rewrite_manifest(checkpoint)


def weights(chance: random.Random, run: Path) -> None:
    """Weights of a checkpoint, or their average, are others; its manifest fits."""
    checkpoint = chance.choice(sorted(run.glob("checkpoints/step-*")))
    path = checkpoint / chance.choice(["model.safetensors", "ema.safetensors"])
    tensors = load_file(path)
    name = chance.choice(sorted(tensors))
    flat = tensors[name].reshape(-1)
    kind = chance.randrange(8)
    if kind == 0:
        del tensors[name]
    elif kind == 1:
        tensors["another"] = torch.ones(3)
    elif kind == 2:
        tensors[f"{name}_"] = tensors.pop(name)
    elif kind == 3:
        tensors[name] = tensors[name].double()
    elif kind == 4:
        tensors.clear()
    else:  # one bit
        flat.view(torch.int32)[chance.randrange(len(flat))] ^= 1 << chance.randrange(31)
    save_file(tensors, path, {"format": "pt"})
    if chance.random() < 0.1:
        path.unlink()
    rewrite_manifest(checkpoint)


def a_name(chance: random.Random, run: Path) -> None:
    """A checkpoint has the name of another update."""
    checkpoint = chance.choice(sorted(run.glob("checkpoints/step-*")))
    other = chance.choice([1, 2, 4, 5, 7, 9, 12, 10**7])
    checkpoint.rename(checkpoint.with_name(f"step-{other:08d}"))


FORGERIES = [
    a_digest,
    all_digests,
    a_step,
    lines_of_the_log,
    a_setting,
    a_file,
    a_state,
    weights,
    a_name,
]


def verify_all(names: list[str]) -> dict[str, str]:
    """The error of the verification of each of these runs, or what it said."""
    found = {}
    for name in names:
        errors, out = io.StringIO(), io.StringIO()
        code = None
        with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(out):
            try:
                replay.main(["--run", f"runs/{name}", "--verify", "all"])
            except SystemExit as error:
                code = error.code
        found[name] = errors.getvalue() if code == 2 else f"code {code}: {out.getvalue()}"
    return found


@pytest.mark.parametrize("count", [45, full(300), pytest.param(1000, marks=pytest.mark.slow)])
def test_no_forged_run_is_verified(count):
    train_run(1, "run", *ENDS_EARLY)
    assert ALL in returned(1, verify_all, ["run"])[0]["run"]
    about, again = {}, []
    for number in range(count):
        chance = random.Random(number)
        forge = FORGERIES[number % len(FORGERIES)]
        name = f"forged-{number}"
        shutil.copytree(RUN, f"runs/{name}")
        forge(chance, Path(f"runs/{name}"))
        about[name] = f"{forge.__name__}, number {number}"
        try:
            read_run(Path(f"runs/{name}"), "all")
        except (ValueError, OSError):
            if number % 20:  # some are given to the command, too
                shutil.rmtree(f"runs/{name}")
                continue
        again.append(name)
    assert len(again) < count / 2
    (found,) = returned(1, verify_all, again, seconds=3000)
    lines = {name: re.fullmatch(r"replay.py: error: .*\n", text) for name, text in found.items()}
    assert not [(about[name], found[name]) for name, line in lines.items() if not line]


def test_what_is_wrong_is_named():
    train_run(1, "run", *ENDS_EARLY)
    log = RUN / "log.jsonl"
    text = log.read_text()
    (train,) = records("run", "train")
    for name, value, said in (
        ("digest", None, "log.jsonl: line 4 is damaged"),
        ("step", "4", "log.jsonl: line 4 is damaged"),
        ("step", 10**9, "no digests of updates 4, 7, 8"),
        ("digest", ["0" * 16] * 4, "the digests of the log and the checkpoints differ"),
    ):
        changed = train | {name: value}
        write_log(RUN, [changed if line == train else line for line in log_of(RUN)])
        assert said in refused(replay.main, *VERIFY, "all"), value
        log.write_text(text)
    log.write_text("")
    assert "log.jsonl: its records are not in order" in refused(
        replay.main, *VERIFY, "all", processes=2
    )
    write_log(RUN, [json.loads(line) for line in text.splitlines() if '"train"' not in line])
    assert "no digests of updates 4 are saved" in refused(replay.main, *VERIFY, "all")
    log.write_text(text)
    config = RUN / "config.yaml"
    config.write_text(config.read_text().replace("microbatches: 2\n", ""))
    line = refused(replay.main, *VERIFY, "all")
    assert (
        "step-00000003: has update 3, or other settings than config.yaml: ['microbatches']" in line
    )
