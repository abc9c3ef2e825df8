"""Recompute one update of a run in one process, and show the samples of one of its microbatches.
Or, on any number of processes, verify updates of a run, or compare two runs.

    python replay.py --run runs/NAME --update 120
    python replay.py --run runs/NAME --update 120 --microbatch 3 --pdb
    python replay.py --run runs/NAME --verify random:20
    python replay.py --run runs/NAME --against runs/OTHER

It starts from the newest checkpoint before the update, or from the initial weights. It changes
nothing in the run folder, except that it adds pictures in `replay/`. `python replay.py --help`
lists the settings.
"""

from utils.entry import guard_output  # the first import, see there

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

import train
from extras.show_update import show
from extras.verify import compare, verify
from utils.config import parse_args, require
from utils.data import Batch
from utils.files import expand
from utils.ranks import Ranks, Stopping, distributed_session
from utils.runs import beginnings, check_log, damage_of, read_log
from utils.runs.inference import given_settings
from utils.settings.scripts import ReplayConfig
from utils.settings.train import TrainConfig, read_config
from utils.training import Run, SyncInterval, synchronise


def main(argv: Sequence[str] | None = None) -> dict | None:
    """Show a microbatch, and return the numbers that were shown; or verify or compare."""
    guard_output()
    flags = parse_args(ReplayConfig, "replay.py", argv)
    with (
        TemporaryDirectory() as scratch,
        distributed_session("replay.py", flags) as ranks,
        Stopping(ranks) as stopping,
    ):
        check_mode(flags, ranks)
        ranks.join()

        def begin(folder: Path, update: int) -> Run:
            config = make_settings(flags, folder, update, ranks.gather(scratch)[0])
            ranks.threads = config.threads or ranks.threads
            torch.set_num_threads(ranks.threads)
            return train.build(config, ranks, stopping, given=None)

        if flags.update:
            return show_update(begin(expand(flags.run), flags.update), flags.update, flags)
        if flags.verify:
            verify(flags, ranks, begin, recompute)
        if flags.against:
            compare(flags, begin)
    return None


def check_mode(flags: ReplayConfig, ranks: Ranks) -> None:
    """Raise UserError unless exactly one of --update, --verify and --against is given."""
    given = [each for each in (flags.update, flags.verify, flags.against) if each]
    require(len(given) == 1, "replay.py does one thing", "give --update, --verify or --against")
    if flags.update:
        alone = ranks.topology.world_size == 1
        require(alone, "--update needs one process", "start it with plain python")


def show_update(run: Run, update: int, flags: ReplayConfig) -> dict:
    """Compute the updates of a run before `update`, then show one of its microbatches."""
    microbatch = flags.microbatch or 0
    last = run.plan.microbatches - 1
    require(update <= run.updates, f"--update {update}: the last one is {run.updates}")
    require(microbatch <= last, f"--microbatch {microbatch}: the last one is {last}")
    start = run.resumed_from or "the initial weights"
    print(f"replaying update {update} of {flags.run} from {start}")
    print(f"updates to compute before it: {update - 1 - run.state.step}")
    batches = iter(run.train_batches)
    for _ in recompute(run, batches, update - 1):
        pass
    return show(run, batches, flags)


def make_settings(flags: ReplayConfig, folder: Path, update: int, scratch: str) -> TrainConfig:
    """The settings that repeat a run from its newest checkpoint before an update."""
    records = read_log(folder)
    starts = [each for each in records if each["kind"] == "start" and each["step"] < update]
    config = read_config(folder / "config.yaml")
    saved = reversed(beginnings(folder, records).items())
    # not from that of update 0 with --verify, which fits a new head again
    good = (
        f"{path}"
        for step, path in saved
        if (step or flags.update) and step < update and not damage_of(path)
    )
    checkpoint = next(good, None)
    problem = f"{folder}: begins after update {update}, or the checkpoints before it are gone"
    require(starts and (checkpoint or not starts[0]["step"]), problem, "name a later update")
    start = starts[-1]
    if checkpoint is None:
        check_log(folder)
    return replace(
        config,
        **given_settings(flags),
        cpu=flags.cpu,
        plugin=flags.plugin,
        traceback=flags.traceback,
        output_dir=scratch,
        run_name=f"replay-{update}",
        resume=checkpoint,
        report_to=None,
        threads=flags.threads or start.get("threads"),
        grad_accum=None
        if config.microbatches
        else start.get("processes", 1) * start.get("grad_accum", 1),
    )


def recompute(run: Run, batches: Iterator[Batch], until: int) -> Iterator[None]:
    """Train up to update `until` as the run did, without evaluations; yields after each update;
    collective.
    """
    run.model.train()
    while run.state.step < until:
        train.train_update(run, batches)
        run.log.advance()
        synchronise(run, SyncInterval())
        yield


if __name__ == "__main__":
    main()
