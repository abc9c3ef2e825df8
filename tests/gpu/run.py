"""Check everything that needs a GPU, in parts of less than ten minutes each. No network is needed.

    python3 tests/gpu/run.py                    all parts; `make gpu` does the same
    python3 tests/gpu/run.py first speed        a quarter of an hour on one GPU; start with these
    python3 tests/gpu/run.py --list             the parts: what they need, how long they take

First it finds out whether two ranks can use NCCL, also on one GPU. A table is written to gpu.md and
gpu.json in --report after each check, and the output to gpu.log. A check that is not complete at its
own limit, or at the end of its part, fails or is skipped. A dry run on CPUs has an hour, so that it
skips none for lack of time.
"""

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from threading import Timer

ROOT = Path(__file__).parents[2]
ON_CPU = os.environ.get("LOCKSTEP_GPU_TESTS_ON_CPU") == "1"
SECONDS = 3600 if ON_CPU else 570
LANES = min(8, max(2, len(os.sched_getaffinity(0)) // 2))
LOG_BYTES = 8_000_000
SMOKE, RUNS, FAULTS, SHARDING, SPEED, STEPS = (
    f"tests/gpu/test_{name}_on_gpus.py"
    for name in ("smoke", "runs", "faults", "sharding", "speed", "steps")
)


@dataclass
class Step:
    """One call of pytest: files and marks choose the checks. `over` is the backend that it is about."""

    title: str
    files: list[str]
    marks: str = "gpu"
    seconds: int = SECONDS
    lanes: int = 1  # checks at a time; speed is measured alone
    over: str = ""


@dataclass
class Part:
    """Minutes on one H100 with 16 cores, as estimated; what it needs and answers; its steps."""

    minutes: int
    needs: str
    answers: str
    steps: list[Step]
    pairs: bool = field(default=True)  # two ranks take part, so it matters what they can use


PARTS = {
    "first": Part(
        7,
        "one GPU, 16 cores; NCCL 2.30 to share the GPU (--nccl)",
        "what decides most: two ranks over NCCL, FSDP2, equal bits, lost ranks; photographs; features",
        [
            Step("two ranks", [RUNS, SHARDING, FAULTS], "gpu and first", 230, 5, "nccl"),
            Step("what failed on the first GPU", [RUNS], "gpu and again", 95, 6, "gloo"),
            Step("photographs and cached features", [SPEED], "gpu and first", 120),
        ],
    ),
    "speed": Part(
        5,
        "one GPU; CIFAR-10 (--cifar10)",
        "CUDA graphs, search for kernels, timm, compiled models, CIFAR-10",
        [Step("updates", [STEPS])],
        pairs=False,
    ),
    "runs": Part(
        5,
        "one GPU",
        "right numbers: CPU, precisions, two ranks, same bits, resume, faults",
        [Step("runs", [RUNS, FAULTS], lanes=LANES)],
    ),
    "peers": Part(
        6,
        "one GPU; two for DataParallel",
        "speed and memory beside timm and a bare step",
        [Step("peers", [SPEED], "gpu and peers")],
        pairs=False,
    ),
    "photographs": Part(
        7,
        "one GPU, many cores",
        "do photographs arrive in time; speed beside timm's loader",
        [Step("photographs", [SPEED], "gpu and photographs")],
        pairs=False,
    ),
    "sharding": Part(
        4,
        "two GPUs, or one and NCCL 2.30",
        "FSDP2: losses of DDP, checkpoints, offload, memory and speed",
        [Step("sharding", [SHARDING])],
    ),
    "waits": Part(
        5,
        "one GPU; two for the exchange",
        "does the host or the GPU wait for anything",
        [Step("waits", [SPEED], "gpu and waits")],
    ),
}


GLOO = {"backend": "gloo", "reason": "no check needs two ranks", "settings": {}, "code": 0}


class Log:
    """Prints, and keeps what is printed in a file."""

    def __init__(self, path: Path):
        path.parent.mkdir(parents=True, exist_ok=True)
        self.file = path.open("a")

    def say(self, text: str) -> None:
        print(text, flush=True)
        if self.file.tell() < LOG_BYTES:
            self.file.write(f"{text}\n")
            self.file.flush()


def say_missing(log: Log) -> None:
    """Print which packages are missing, and how to bring them to a machine without a network."""
    tested = dict(re.findall(r"^([\w-]+)==(\S+)", (ROOT / "constraints.txt").read_text(), re.M))
    missing = [name for name in tested if name not in ("mpich", "coverage") and not _has(name)]
    fetch = "pip download --no-deps --only-binary=:all: --python-version {}.{} -d wheels".format(
        *sys.version_info
    )
    if missing:
        pinned = " ".join(f"{name}=={tested[name]}" for name in missing)
        log.say(
            f"missing: {', '.join(missing)}; with a network: {fetch} {pinned}; then here: --wheels wheels"
        )


def _has(name: str) -> bool:
    try:
        return bool(version(name))
    except PackageNotFoundError:
        return False


def install_wheels(folder: Path, site: Path) -> None:
    """Install the wheels of a folder for this call only, without a network."""
    wheels = [str(path) for path in sorted(folder.glob("*.whl"))]
    if not wheels:
        raise SystemExit(f"run.py: error: --wheels {folder} has no .whl file")
    quiet = shlex.split("-m pip install -q --no-index --no-deps --no-compile --no-cache-dir")
    subprocess.run([sys.executable, *quiet, "--target", str(site), *wheels], check=True)
    sys.path.insert(0, str(site))
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = f"{site}:{before}" if before else str(site)


def unpack_nccl(file: Path, folder: Path) -> str:
    """The path of NCCL's library, whose file may end in .xz."""
    if file.suffix != ".xz":
        return str(file.absolute())
    import lzma
    import shutil

    folder.mkdir()
    target = folder / "libnccl.so.2"
    with lzma.open(file) as packed, target.open("wb") as unpacked:
        shutil.copyfileobj(packed, unpacked)
    return str(target)


def say_what_this_is(args: argparse.Namespace, log: Log) -> int:
    """Write about.json: the command, the commit, the machine and the versions. Returns the number of
    GPUs.
    """
    asked = subprocess.run(
        [sys.executable, "tests/gpu/about.py"], cwd=ROOT, capture_output=True, text=True
    )
    if asked.returncode:
        raise SystemExit(f"run.py: error: about.py failed\n{asked.stderr[-3000:]}")
    git = ["git", "-C", str(ROOT), "rev-parse", "HEAD"]
    commit = None
    with suppress(OSError, subprocess.CalledProcessError):  # a copy without the repository
        commit = subprocess.check_output(git, text=True, stderr=subprocess.DEVNULL).strip()
    about = {
        "command": shlex.join(["python3", "tests/gpu/run.py", *sys.argv[1:]]),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "commit": commit,
    } | json.loads(asked.stdout.splitlines()[-1])
    (args.report / "about.json").write_text(json.dumps(about, indent=1) + "\n")
    os.environ["LOCKSTEP_GPU_COUNT"] = str(about["gpus"])
    os.environ["LOCKSTEP_GPU_MACHINE"] = about["machine"]
    os.environ["LOCKSTEP_GPU_SHARED"] = "1" if about["gpus"] == 1 else "0"
    log.say(about["machine"])
    return about["gpus"]


def decide(until: float, library: dict[str, str], log: Log, work: Path) -> dict:
    """Find out once whether two ranks can use NCCL, and with which settings; say why."""
    file = work / "decision.json"
    env = {"LOCKSTEP_GPU_DECISION": str(file)} | library
    step = Step("do two ranks talk over NCCL", [SMOKE], seconds=SECONDS if ON_CPU else 130)
    code = run_step(step, until, env, log)
    decision = GLOO | {"reason": "the check of NCCL did not end"}
    if file.exists():
        decision = json.loads(file.read_text())
    log.say(f"two ranks use {decision['backend']}: {decision['reason']}")
    return decision | {"code": code}


def run_part(part: Part, until: float, decision: dict, library: dict[str, str], log: Log) -> int:
    """Run the steps of a part until the time is over; 0 if nothing failed."""
    code = 0
    for step in part.steps:
        over = step.over or decision["backend"]
        env = {}
        if over == "nccl" and decision["backend"] == "nccl":
            env |= library | decision["settings"]
        chosen = "gloo" if step.over == "gloo" else decision["backend"]
        reason = "this step is about it" if chosen != decision["backend"] else decision["reason"]
        env |= {"LOCKSTEP_GPU_BACKEND": chosen, "LOCKSTEP_GPU_BACKEND_REASON": reason}
        if step.over == "gloo" and decision["backend"] == "gloo":
            step.marks += " and not first"  # those have run over gloo
        code |= run_step(step, until, env, log)
    return code


def run_step(step: Step, until: float, env: dict[str, str], log: Log) -> int:
    """Run pytest on the checks of a step. Those that do not fit into the time are skipped."""
    until = min(until, time.time() + (SECONDS if ON_CPU else step.seconds))
    log.say(f"== {time.strftime('%H:%M:%S')} {step.title}, {max(0.0, until - time.time()):.0f} s")
    words = [sys.executable, "-m", "pytest", "-m", step.marks, "-p", "no:cacheprovider"]
    words += ["-vv", "-rfEs", "--tb=short", *step.files]
    lanes = LANES if ON_CPU and step.files != [SMOKE] else step.lanes
    if lanes > 1:  # the first checks of a part start first
        words += ["-n", str(lanes), "--dist", "load", "--maxschedchunk", "1"]
    env = os.environ | env | {"LOCKSTEP_GPU_UNTIL": str(until), "PYTHONUNBUFFERED": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(words, cwd=ROOT, env=env, errors="replace", **pipes) as process:
        # checks end by themselves; this is for what hangs
        clock = Timer(max(30.0, until - time.time() + 15), kill, [process.pid])
        clock.start()
        try:
            for line in process.stdout:
                log.say(line.rstrip("\n"))
            code = process.wait()
        finally:
            clock.cancel()
    return int(code != 0)  # below 0 if it was killed, 5 if no check has the marks


def kill(number: int) -> None:
    """Kill a process and all that it has started."""
    import psutil

    with suppress(psutil.NoSuchProcess):
        parent = psutil.Process(number)
        for process in [*parent.children(recursive=True), parent]:
            with suppress(psutil.NoSuchProcess):
                process.kill()


def listed() -> str:
    """The parts, with what each needs, takes and answers."""
    return "\n".join(
        f"{name:12} {part.minutes} minutes; needs {part.needs}; {part.answers}"
        for name, part in PARTS.items()
    )


def read_flags() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)} (default: all)"
    )
    parser.add_argument(
        "--report",
        type=Path,
        # a folder that is brought home from a machine that is lent
        default=Path(os.environ.get("OUT") or ROOT / "build"),
        help="folder of the table (default: $OUT, or build)",
    )
    parser.add_argument(
        "--seconds", type=float, default=SECONDS, help="of each part (default: %(default)s)"
    )
    parser.add_argument("--wheels", type=Path, help="folder of packages to install for this call")
    parser.add_argument("--nccl", type=Path, help="NCCL's library, also as .xz, for two ranks")
    parser.add_argument("--cifar10", type=Path, help="folder of CIFAR-10's parquet files")
    parser.add_argument("--list", action="store_true", help="print the parts")
    args = parser.parse_args()
    if unknown := set(args.parts) - set(PARTS):
        parser.error(f"{unknown.pop()}: the parts are {', '.join(PARTS)}")
    for path in filter(None, (args.wheels, args.nccl, args.cifar10)):
        if not path.exists():
            parser.error(f"{path} does not exist")
    args.report = args.report.absolute()
    return args


def main() -> None:
    args = read_flags()
    if args.list:
        print(listed())
        return
    begun = time.time()
    log = Log(args.report / "gpu.log")
    with tempfile.TemporaryDirectory(prefix="lockstep-") as folder:
        work = Path(folder)
        if args.wheels:
            install_wheels(args.wheels, work / "site")
        say_missing(log)
        library = {"LD_PRELOAD": unpack_nccl(args.nccl, work / "nccl")} if args.nccl else {}
        os.environ["LOCKSTEP_GPU_REPORT"] = str(args.report)
        if args.cifar10:
            os.environ["LOCKSTEP_GPU_CIFAR10"] = str(args.cifar10.absolute())
        gpus = say_what_this_is(args, log)
        names, decision = args.parts or list(PARTS), GLOO
        if (gpus or ON_CPU) and any(PARTS[name].pairs for name in names):
            decision = decide(begun + args.seconds, library, log, work)
        code = decision["code"]
        for number, name in enumerate(names):
            until = (begun if number == 0 else time.time()) + args.seconds
            code |= run_part(PARTS[name], until, decision, library, log)
    table = args.report / "gpu.md"
    print(table.read_text() if table.exists() else f"no check ended, so there is no {table}")
    raise SystemExit(code)


if __name__ == "__main__":
    main()
