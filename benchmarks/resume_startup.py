"""The time and memory that a resumed run needs until its first update, at 1 % and at 99 % of a long
epoch.

    python benchmarks/resume_startup.py --json FILE                    10 million samples, 8 minutes
    python benchmarks/resume_startup.py --samples 100000 --rounds 2    a trial of one minute

It trains a small network to 1 % of an epoch of synthetic images, and resumes that run to 99 %. Then
it resumes from both checkpoints in turn, each time in a new run, for one update, which is a
hundredth of the epoch.

Everything runs in one thread. If other programs slow the machine down, compare the processor times.
Memory is resident memory in MB of 10^6 bytes.
"""

import os
import subprocess
import sys
import time
from functools import partial
from itertools import count
from math import sqrt
from pathlib import Path
from statistics import mean, stdev

import psutil
from common import ROOT, flags, in_turns, parse_flags, report, spread, temporary

PLACES = {"1 %": 1, "99 %": 99}  # finished updates of the hundred in the epoch
BATCH = 1000  # samples of one forward pass


def train(samples: int, runs: Path, **more) -> dict[str, float]:
    """Run train.py until it exits; returns the time and memory that it took."""
    work = flags(model="mlp", data=f"synthetic/10x1x{samples}", global_batch_size=samples // 100)
    work += flags(batch_size=BATCH, lr_schedule="constant", threads=1, max_eval_samples=100)
    place = flags(log_every=1, output_dir=runs, **more)
    command = [sys.executable, str(ROOT / "train.py"), *work, *place]
    updated, lines, begun = None, [], time.perf_counter()
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        try:
            for line in process.stdout:
                if updated is None and line.startswith("update "):
                    updated, used = time.perf_counter(), psutil.Process(process.pid).cpu_times()
                lines.append(line)
            _, status, usage = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
        finally:
            process.kill()  # does nothing if it has exited
    if process.returncode or updated is None:
        raise SystemExit(f"{' '.join(command)} failed:\n{''.join(lines[-20:])}")
    return {
        "start of the process to the end of its first update, s": updated - begun,
        "processor time until then, s": used.user + used.system,
        "peak memory of the process, MB": usage.ru_maxrss * 1024 / 1e6,
    }


def main() -> None:
    args = parse_flags(__doc__, rounds=7, samples=(10_000_000, "a multiple of 100000"))
    if args.samples < 1 or args.samples % (100 * BATCH) or args.rounds < 2:
        raise SystemExit(f"--samples must be a multiple of {100 * BATCH}, and --rounds at least 2")
    with temporary() as folder:
        for step in PLACES.values():
            train(args.samples, folder, run_name="whole", resume="auto", max_steps=step)
        numbers = count()

        def resume(step: int) -> dict[str, float]:
            checkpoint = folder / f"whole/checkpoints/step-{step:08d}"
            new = {"run_name": f"run-{next(numbers)}", "max_steps": step + 1}
            return train(args.samples, folder, resume=checkpoint, **new)

        sides = {place: partial(resume, step) for place, step in PLACES.items()}
        results = in_turns(sides, args.rounds)
    rows = []
    for what in results["1 %"][0]:
        first, last = ([taken[what] for taken in rounds] for rounds in results.values())
        later = [b - a for a, b in zip(first, last, strict=True)]
        error = stdev(later) / sqrt(len(later))
        cells = [spread(first, ".2f"), spread(last, ".2f"), f"{mean(later):+.2f} ± {error:.2f}"]
        rows.append([what, *cells])
    header = [f"{args.samples} samples", *PLACES, "99 % less 1 %, mean ± standard error"]
    report(args, header, rows, results)


if __name__ == "__main__":
    main()
