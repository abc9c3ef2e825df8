"""Commands of the documentation are run by a test, or say why not; their flags exist.

A block of commands without a mark is run here as it stands, in fewer updates. `<!-- run by
FILE::TEST -->` above a block or a table names the test that runs it, and `<!-- not run: WHY -->`
says why none does.
"""

import importlib
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from accelerate.commands.launch import launch_command_parser
from helpers.launched_runs import end_commands
from helpers.make_data import image_folder
from helpers.ranks import free_port, returned
from helpers.training_runs import BIN, MLP, ROOT, records, start, train_run, working_in
from helpers.waiting import PATIENCE
from torch.distributed.run import get_args_parser

import eval as eval_script
import predict
import train
from utils.config.cli import parse_args
from utils.settings import scripts
from utils.settings import train as settings

PAGES = [ROOT / "README.md", ROOT / "README.zh-CN.md", ROOT / "CONTRIBUTING.md"]
PAGES += sorted((ROOT / "docs").glob("*.md"))
WHY = ("needs ", "takes hours", "installs packages")
SCRIPTS = re.compile(r"(\w+)\.py\b")
LAUNCH = re.compile(
    r"^(\w+=\S+ )*(accelerate launch|torchrun|srun|mpirun|sbatch|python3?) "
    r".*\b(\w+\.py|\w+\.sbatch)"
)


def blocks() -> list[tuple[str, str, str]]:
    """The place of each block of commands and each table of launches, the mark above it, and its
    text.
    """
    found = []
    for page in PAGES:
        marked = r"(?:^<!-- ([^\n]*) -->\n)?"
        for kind in (r"^```bash\n(.*?)^```$", r"^((?:\|[^\n]*\n)+)"):
            for match in re.finditer(marked + kind, page.read_text(), re.M | re.S):
                is_table = match[2].startswith("|")
                if not is_table or any(map(LAUNCH.match, inline(match[2]))):
                    name = f"{page.name}:{match[2].splitlines()[0][:60]}"
                    found.append((name, match[1] or "", match[2]))
    return found


def inline(text: str) -> list[str]:
    """The texts in backticks."""
    return [" ".join(code.split()) for code in re.findall(r"`([^`]+)`", text)]


def commands(block: str) -> list[str]:
    """The commands of a block, without comments."""
    lines = [re.sub(r"\s+#.*", "", line) for line in block.replace("\\\n", " ").splitlines()]
    return [command.strip() for line in lines for command in line.split("&&") if command.strip()]


BLOCKS = blocks()
RUN_HERE = sorted(
    {block: name for name, mark, block in BLOCKS if not mark and not block.startswith("|")}.items()
)
RUN_HERE = [
    (name, block) for block, name in RUN_HERE if any("pytest" not in c for c in commands(block))
]
PROSE = [re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S) for page in PAGES]
CODE_BLOCKS = [block for _, _, block in BLOCKS if not block.startswith("|")]
ALL = {command for block in CODE_BLOCKS for command in commands(block)}
TYPED = (text for page in PROSE for text in inline(page))
ALL |= {text for text in TYPED if LAUNCH.match(text) or SCRIPTS.match(text)}
ALL = sorted(command for command in ALL if "..." not in command)


def test_commands_are_found():
    assert len(BLOCKS) > 40 and len(ALL) > 60 and len(RUN_HERE) >= 4
    assert commands("a --b c  # d\nX=1 e \\\n  f && g\n") == ["a --b c", "X=1 e    f", "g"]


@pytest.mark.parametrize(("name", "mark", "block"), BLOCKS, ids=[name for name, _, _ in BLOCKS])
def test_a_block_of_commands_is_run_by_a_test_or_says_why_not(name, mark, block):
    for part in filter(None, mark.split("; not run") if mark.startswith("run by") else [mark]):
        if part.startswith("run by "):
            file, _, test = part.removeprefix("run by ").partition("::")
            assert f"\ndef {test}(" in (ROOT / file).read_text()
        else:
            assert part.removeprefix("not run").removeprefix(": ").startswith(WHY), part
    assert mark or not block.startswith("|"), "tables of commands are not run here: name the test"


@pytest.mark.parametrize("command", ALL)
def test_a_command_names_flags_and_files_that_exist(command, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    words = [re.sub(r"^[A-Z]$", "0", word) for word in shlex.split(command)]
    words = [word for word in words if not re.match(r"[A-Z_]+=", word)]
    for word in words:
        if re.match(r"(accelerate_configs|recipes|slurm|tests|benchmarks)/", word):
            assert Path(word).exists(), word
    found = [re.fullmatch(r"(benchmarks/)?\w+\.py", word) for word in words]
    index = next((place for place, match in enumerate(found) if match), None)
    if words[0] == "accelerate" and words[1] == "launch":
        launch_command_parser().parse_args([*words[2:], *["train.py"] * (index is None)])
    if words[0] == "torchrun":
        get_args_parser().parse_args(words[1:])
    if "pytest" in words and "-m" in words[words.index("pytest") :]:
        marker = words[words.index("-m", words.index("pytest")) + 1]
        assert f'"{marker}: ' in Path("pyproject.toml").read_text()
    if words[0] == "make" and len(words) > 1:
        assert re.search(rf"^{words[1]}:", Path("Makefile").read_text(), re.M)
    if index is not None:
        flags = [word for word in words[index + 1 :] if word != "--help"]
        check_flags(words[index], flags, monkeypatch, capsys)


# need its plug-in
EXTENDING = re.findall(r"^python \w+.py (.+)$", (ROOT / "docs/architecture.md").read_text(), re.M)


def check_flags(script: str, flags: list[str], monkeypatch, capsys) -> None:
    name = Path(script).stem
    if script.startswith("benchmarks/"):
        monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
        monkeypatch.setattr(sys, "argv", [script, "--help"])
        with pytest.raises(SystemExit):
            importlib.import_module(name).main()
        listed = capsys.readouterr().out
        assert all(re.search(rf"{flag}\b", listed) for flag in flags if flag.startswith("--"))
    elif (
        flags
        and (ROOT / script).exists()
        and shlex.join(flags) not in map(shlex.join, map(shlex.split, EXTENDING))
    ):
        if "--" in flags:
            place = flags.index("--")
            parse_args(settings.TrainConfig, "train.py", flags[place + 1 :], train.REGISTRIES)
            flags = flags[:place]
        cls = getattr(scripts, f"{name.capitalize()}Config", settings.TrainConfig)
        run = ["--ckpt", "runs/NAME"]
        missing = {  # what a command in the text leaves out, such as `replay.py --pdb`
            "replay.py": shlex.split("--run runs/NAME --update 1") * ("--run" not in flags),
            "predict.py": [*run * ("--ckpt" not in flags), "photos"],
            "eval.py": (["--data", "digits"] if "--model" in flags else run)
            * ("--ckpt" not in flags),
        }.get(script, [])
        parse_args(cls, script, [*missing, *flags], train.REGISTRIES if name == "train" else ())


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder like the repository's, with photographs and a finished run."""
    folder = tmp_path_factory.mktemp("repository")
    for path in ROOT.iterdir():
        if path.name not in ("runs", ".git"):
            (folder / path.name).symlink_to(path)
    with working_in(folder):
        for split, each in (("train", 10), ("val", 4)):
            image_folder(f"photos/{split}", {"cat": each, "dog": each}, (40, 40), "jpeg")
        train_run(1, "NAME", *MLP, "--max_steps", "4")
    return folder


def run_command(command: str) -> None:
    """Run a command for two updates at most: a script in a fork of this process, anything else in a
    shell.
    """
    if "train.py" in command and not re.search("--max_steps|--dry_run", command):
        command += " --max_steps 2"
    words = shlex.split(command)
    if words[0] == "python" and words[1] in MAINS:
        returned(1, MAINS[words[1]], words[2:])
        return
    code, _, err = start("/bin/bash", "-c", command, PATH=f"{BIN}:{os.environ['PATH']}")
    assert code == 0, err[-3000:]


MAINS = {"train.py": train.main, "eval.py": eval_script.main, "predict.py": predict.main}


LONG = re.compile(r"accelerate launch|export\.py")
CASES = [
    pytest.param(name, block, id=name, marks=[pytest.mark.full] * bool(LONG.search(block)))
    for name, block in RUN_HERE
]


@pytest.mark.full
@pytest.mark.parametrize(("name", "block"), CASES)
def test_the_commands_of_the_documentation_run(name, block, trained, monkeypatch):
    monkeypatch.chdir(trained)
    for command in commands(block):
        run_command(command)
    if "--run_name one" in block:  # the page says how both end
        for run in ("one", "two"):
            last = records(run, "eval")[-1]
            said = f"an accuracy of {last['accuracy']:.4f} and a loss of {last['loss']:.4f}"
            assert said in " ".join((ROOT / "docs/launching.md").read_text().split())


# PyTorch's words, which readers search for
UNUSED = "Expected to have finished reduction in the prior iteration"
TROUBLES = (ROOT / "docs/troubleshooting.md").read_text()
MESSAGES = re.findall(r"^train\.py: error: (.*)", TROUBLES, re.M)
INSERTED = (
    r"[;,()] ?|\b(?:[A-Z]+|gloo|\d+\w*)\b|/dev/shm| (?=at update)"  # between texts of the code
)
SOURCES = [*(ROOT / "utils").rglob("*.py"), *(ROOT / "extras").rglob("*.py")]
CODE = " ".join(re.sub(r'"\s*f?"', "", path.read_text()) for path in SOURCES)
CODE = " ".join(CODE.split())


@pytest.mark.parametrize("message", MESSAGES)
def test_messages_of_the_troubleshooting_page_are_those_of_the_code(message):
    texts = [text.strip() for text in re.split(INSERTED, message)]
    assert [text for text in texts if text not in CODE] == []


def test_the_troubleshooting_page_lists_each_section():
    assert len(MESSAGES) >= 12 and UNUSED in TROUBLES
    listed = re.findall(r"\(#(\S+)\) \|$", TROUBLES, re.M)
    headings = re.findall(r"^## (.+)$", TROUBLES, re.M)
    assert listed == [heading.lower().replace(" ", "-") for heading in headings]


def test_links_between_the_pages_lead_to_headings_that_exist():
    def anchors(page: Path) -> set[str]:
        headings = re.findall(r"^#+ (.+)$", page.read_text(), re.M)
        return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}

    for page in PAGES:
        for file, anchor in re.findall(
            r"\]\((?!http)([^)#\s]*)(?:#([^)\s]+))?\)", page.read_text()
        ):
            target = (page.parent / file).resolve() if file else page
            assert target.exists(), (page.name, file)
            assert not anchor or anchor in anchors(target), (page.name, file, anchor)


def test_the_readme_has_the_size_of_the_code():
    text = " ".join((ROOT / "README.md").read_text().split())
    for folder, form in (
        ("utils", r"([\d,]+) lines in `utils/`"),
        ("extras", r"`extras/`, ([\d,]+)"),
    ):
        lines = sum(len(file.read_text().splitlines()) for file in (ROOT / folder).rglob("*.py"))
        written = int(re.search(form, text)[1].replace(",", ""))
        assert lines == pytest.approx(written, rel=0.05)
        assert f"{written:,}" in (ROOT / "README.zh-CN.md").read_text()
    assert len((ROOT / "README.md").read_text().splitlines()) <= 175
    assert len(list((ROOT / "utils").glob("*/__init__.py"))) == 9 and "[nine packages]" in text
    lines = len((ROOT / "train.py").read_text().splitlines())
    assert lines <= 276 and f"`train.py` is {lines} lines" in text


@pytest.mark.parametrize("page", ["README.md", "README.zh-CN.md"])
def test_the_loop_in_the_readme_is_that_of_train_py(page):
    loop = re.search(r"```python\n(.*?)```", (ROOT / page).read_text(), re.S)[1]
    assert loop in (ROOT / "train.py").read_text() and len(loop.splitlines()) == 13


@pytest.mark.full
def test_one_of_two_processes_stops_in_a_debugger_and_the_other_waits():
    (block,) = [block for _, _, block in BLOCKS if "-m pdb" in block]
    block = block.replace("29500", str(free_port())).replace("train.py", str(ROOT / "train.py"))
    export, first, second = commands(block)
    more = f" {shlex.join(MLP)} --max_steps 2 --run_name run"
    environment = {**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}"}
    other = subprocess.Popen(["bash", "-c", f"{export}\n{second}{more}"], env=environment)
    typed = "b train_update\nc\np 6 * 7, run.ranks.topology.world_size\ncl 1\nc\nq\n"
    try:
        command = ["bash", "-c", f"{export}\n{first}{more}"]
        how = {"env": environment, "capture_output": True, "text": True}
        debugged = subprocess.run(command, input=typed, **how)
        assert "(42, 2)" in debugged.stdout, debugged.stderr
        assert "The program finished" in debugged.stdout
        assert other.wait(PATIENCE) == 0
        assert records("run", "start")[0]["processes"] == 2
    finally:
        end_commands([other])
