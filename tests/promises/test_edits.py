"""Edits of `train_update` do to the promises what the table of docs/architecture.md says."""

import re
from types import ModuleType

import pytest
from helpers.ranks import Outcome, run_ranks
from helpers.training_runs import (
    MLP,
    ROOT,
    await_save,
    codes,
    kill_myself,
    records,
    same_tensors,
    weights,
    words,
)
from torch.utils._python_dispatch import TorchDispatchMode

PAGE = (ROOT / "docs/architecture.md").read_text().split("## Edits of the loop")[1]
CODE = (ROOT / "train.py").read_text()
LINES = {letter: line for line, letter in re.findall(r"^( .*\S)  # ([A-F])$", PAGE, re.M)}
EDIT = r"^\| (after|in place of) ([A-F]): `(.+?)` \| (.+?) \| (.+?) \| (.+) \|$"
ROWS = re.findall(EDIT, PAGE, re.M)
FLAGS = [*MLP, *words("--max_steps 6 --eval_every 9 --save_every 3 --log_every 1 --momentum 0.9")]
EXACT, ACCUMULATED = words("--microbatches 4"), words("--grad_accum 2")


def edited(place: str, letter: str, code: str) -> str:
    """The text of train.py after an edit."""
    line = LINES[letter]
    indent = re.match(" *", line)[0]
    new = indent + code
    assert CODE.count(f"\n{line}\n") == 1
    text = CODE.replace(f"\n{line}\n", f"\n{line}\n{new}\n" if place == "after" else f"\n{new}\n")
    return text.replace("import math\n", "import math\nimport random\nimport torch\n", 1)


class Reads(TorchDispatchMode):
    """Counts the numbers that the host reads from tensors."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += "_local_scalar_dense" in str(function)
        return function(*args, **(kwargs or {}))


def train_edited(code: str, flags: list[str], dies_at: int | None = None) -> int:
    """Train with this text of train.py; returns the reads of its updates but the first."""
    module, reads = ModuleType("edited"), Reads()
    module.__file__ = str(ROOT / "train.py")
    exec(compile(code, "edited.py", "exec"), module.__dict__)
    update = module.train_update

    def watched(run, batches):
        if run.state.step == dies_at:
            await_save(run)
            kill_myself()
        if run.state.step == 0:  # the loader draws a seed
            return update(run, batches)
        with reads:
            update(run, batches)

    module.train_update = watched
    module.main(flags)
    return reads.count


def is_same(name: str, other: str, exact: bool) -> bool:
    """Whether two runs have the same losses to rounding, or the same bits."""
    losses = [[record["loss"] for record in records(run, "train")] for run in (name, other)]
    if exact:
        return losses[0] == losses[1] and same_tensors(weights(name), weights(other))
    return losses[0] == pytest.approx(losses[1], rel=1e-4)


CASES = [
    pytest.param(*row, marks=[pytest.mark.full] * ("TrainState" not in row[-1])) for row in ROWS
]


@pytest.mark.full
@pytest.mark.parametrize("place, letter, code, same, resumes, note", CASES)
def test_an_edit_does_what_the_page_says(place, letter, code, same, resumes, note):
    text = edited(place, letter, code)
    limit = ["--timeout", "15"] * ("--timeout" in note)

    def train(processes: int, name: str, *flags: str, dies_at: int | None = None) -> list[Outcome]:
        return run_ranks(
            processes, train_edited, text, [*FLAGS, "--run_name", name, *flags], dies_at
        )

    found, failed = {}, False
    for kind, flags in (("exact", EXACT), ("plain", ACCUMULATED)):
        (alone,) = train(1, f"{kind}-1", *flags)
        assert alone.code == 0 and bool(alone.value) == ("host waits" in note), alone.err
        ended = [code != 0 for code in codes(train(2, f"{kind}-2", *flags, *limit))]
        assert ended[0] == ended[1]
        failed |= ended[0]
        found[kind] = not ended[0] and is_same(f"{kind}-1", f"{kind}-2", kind == "exact")
    answers = {(True, True): "yes", (True, False): "with `--microbatches`", (False, False): "no"}
    assert answers.get((found["exact"], found["plain"])) == same
    assert failed == ("error" in note)
    train(1, "resumed", *EXACT, "--stop_after", "2")
    train(1, "resumed", *EXACT, "--resume", "auto", dies_at=4)
    assert codes(train(1, "resumed", *EXACT, "--resume", "auto")) == [0]
    assert is_same("exact-1", "resumed", True) == (resumes == "yes")


def test_the_page_has_the_lines_of_train_update():
    assert len(ROWS) > 10 and "".join(LINES) == "ABCDEF"
    block = re.findall(r"^```python\n(.*?)```", PAGE, re.M | re.S)[0]
    assert re.sub(r"  # [A-F]$", "", block, flags=re.M) in CODE
