"""How long an elastic run takes to continue after a machine joins, leaves or is lost, by stage.

    python benchmarks/come_back.py --mnist DIR --json FILE          MNIST's parquet files in DIR
    python benchmarks/come_back.py --mnist DIR --before CHECKOUT    in turn with another checkout

Launchers on this machine stand for up to three machines, with one rank each. They train
recipes/mnist.yaml with the command of docs/clusters.md. Each round starts two. Then a third one
joins and leaves twice; the second join is counted:

* joined: a third launcher starts. The time begins when the others stop for it.
* notice: the third launcher gets SIGTERM, as from a cloud that takes the machine back.
* lost: a third launcher and its rank are killed with SIGKILL.

A stage lasts until the slowest rank has finished it. The whole time ends with the first update of
the new ranks.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import closing, suppress
from functools import partial
from pathlib import Path

import psutil
from common import (
    ROOT,
    flags,
    in_turns,
    kill,
    note_times,
    parse_flags,
    report,
    spread,
    temporary,
)

BEGUN = time.time()  # before the slow imports
EVENTS = ("joined", "notice", "lost")
# the mark that ends each stage; the first two are of the old ranks, the others of the new ones
STAGES = {
    "signal or error, last update, save": "train",
    "end of the processes": "exited",
    "heartbeats, rendezvous of the launchers": "begun",
    "imports": "imported",
    "ranks connect": "join",
    "checkpoint found and verified": "newest",
    "data": "make_datasets",
    "model, optimizer, checkpoint loaded": "build",
    "first update": "train_update",
}
CONF = "store_type=file,last_call_timeout=3,keep_alive_interval=2,keep_alive_max_attempt=3"


def run_rank(folder: Path, root: Path, argv: list[str]) -> None:
    """Train with these arguments; append the times of the stages to a file in `folder`."""
    sys.path.insert(0, str(root))
    with (folder / f"rank-{os.getpid()}.jsonl").open("a", buffering=1) as file:
        noted = set()

        def note(name: str, at: float) -> None:
            if name not in noted:
                noted.add(name)
                file.write(json.dumps([name.removesuffix(" ended"), at]) + "\n")

        note("begun", BEGUN)
        import train

        note("imported", time.time())
        note_times(train.Ranks, "join", note)
        note_times(train.CheckpointManager, "newest", note)
        for name in ("make_datasets", "build", "train_update", "train"):
            note_times(train, name, note)
        train.main(argv)


def times_of(folder: Path, pid: int) -> dict[str, float]:
    """When the rank with this process ID has finished its stages so far."""
    file = folder / f"rank-{pid}.jsonl"
    return dict(map(json.loads, file.read_text().splitlines())) if file.exists() else {}


class Launchers:
    """The launchers of one run."""

    def __init__(self, folder: Path, root: Path, settings: list[str]):
        self.folder, self.root, self.settings = folder, root, [*settings, *flags(output_dir=folder)]
        # Only scripts in the folder of train.py end as train.py does.
        self.script = Path(shutil.copy(__file__, root / f"come_back_{os.getpid()}.py"))
        self.running: list[subprocess.Popen] = []

    def start(self) -> None:
        options = flags(nnodes="1:3", nproc_per_node=1, max_restarts=100, rdzv_backend="c10d")
        options += flags(rdzv_id="run", rdzv_endpoint=self.folder / "store", rdzv_conf=CONF)
        command = [Path(sys.executable).with_name("torchrun"), *options, self.script]
        command += ["--rank", self.folder, self.root, *self.settings]
        shared = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "TORCH_ELASTIC_WORKER_IDENTICAL": "1"}
        shared["PYTHONPATH"] = str(ROOT / "benchmarks")
        with (self.folder / f"launcher-{len(self.running)}.txt").open("a") as out:
            self.running.append(
                subprocess.Popen(
                    list(map(str, command)), env=os.environ | shared, stdout=out, stderr=out
                )
            )

    def ranks(self) -> list[int]:
        """The process IDs of the ranks, in the order of the launchers."""
        found = []
        for launcher in self.running:
            with suppress(psutil.NoSuchProcess):  # it has just ended
                ranks = psutil.Process(launcher.pid).children()
                found += [rank.pid for rank in ranks if rank.status() != "zombie"]
        return found

    def wait_until(self, count: int, other_than: set[int] = frozenset()) -> list[int]:
        """Wait until that many ranks, none of them one of `other_than`, have finished an update;
        returns them.
        """
        deadline = time.time() + 300
        while time.time() < deadline:
            ranks = [pid for pid in self.ranks() if pid not in other_than]
            updated = ["train_update" in times_of(self.folder, pid) for pid in ranks]
            if len(ranks) == count and all(updated):
                return ranks
            time.sleep(0.05)
        outputs = self.folder.glob("launcher-*.txt")
        raise SystemExit("\n".join(file.read_text()[-3000:] for file in outputs))

    def close(self) -> None:
        self.script.unlink()
        for launcher in self.running:
            kill(launcher.pid)
            launcher.wait()


def measure(root: Path, settings: list[str]) -> dict[str, dict[str, float]]:
    """The seconds of each stage, by event."""
    found = {}
    with temporary() as folder, closing(Launchers(folder, root, settings)) as machines:
        machines.start()
        machines.start()
        ranks = machines.wait_until(2)
        for event in ("joined", "notice", "joined", "lost"):
            time.sleep(3)
            survivors, began = ranks[:2], time.time()
            if event == "joined":
                machines.start()
            else:
                third = machines.running.pop()
                if event == "lost":
                    os.kill(ranks[2], signal.SIGKILL)
                third.send_signal(signal.SIGTERM if event == "notice" else signal.SIGKILL)
            exited = max(map(wait_for_exit, survivors))
            new = machines.wait_until(3 if event == "joined" else 2, set(ranks))
            old = [times_of(machines.folder, rank) for rank in survivors]
            at = [times_of(machines.folder, rank) for rank in new]
            ends = {name: max(each[name] for each in at) for name in at[0]}
            ends |= {"train": max(each["train"] for each in old), "exited": exited}
            now = first = min(each["train"] for each in old) if event == "joined" else began
            seconds = {}
            for stage, name in STAGES.items():
                seconds[stage], now = max(0.0, ends[name] - now), max(now, ends[name])
            found[event] = seconds | {"whole": ends["train_update"] - first}
            if event != "joined":
                third.wait()
            ranks = new
    return found


def wait_for_exit(rank: int) -> float:
    """Wait until the process has ended, reaped or not; returns the time."""
    with suppress(psutil.NoSuchProcess):
        while psutil.Process(rank).status() != psutil.STATUS_ZOMBIE:
            time.sleep(0.02)
    return time.time()


def main() -> None:
    if sys.argv[1:2] == ["--rank"]:
        return run_rank(Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:])
    data, before = (Path, "folder with MNIST's parquet files"), (Path, "another checkout")
    args = parse_flags(__doc__, ["mnist"], mnist=data, before=before)
    settings = flags(config=ROOT / "recipes/mnist.yaml", data=args.mnist, run_name="run")
    settings += flags(resume="auto", microbatches=4, epochs=1000, save_seconds=5, log_every=1)
    sides = {"now": partial(measure, ROOT, settings)}
    if args.before:
        sides["before"] = partial(measure, args.before.resolve(), settings)
    results = in_turns(sides, args.rounds)
    columns = [(event, side) for event in EVENTS for side in sides]
    rows = [
        [
            stage,
            *(
                spread([each[event][stage] for each in results[side]], ".1f")
                for event, side in columns
            ),
        ]
        for stage in [*STAGES, "whole"]
    ]
    report(args, ["Seconds", *map(", ".join, columns)], rows, results)


if __name__ == "__main__":
    main()
