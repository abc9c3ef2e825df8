"""The time and memory that a resumed run needs until its first update, at 1 % and at 99 % of a long
epoch.

    python benchmarks/resume_startup.py --json FILE                          10 million samples, about eight minutes
    python benchmarks/resume_startup.py --samples 100000 --rounds 2          a trial of one minute

It trains a small network to 1 % of an epoch of synthetic images, and resumes that run to 99 %. Then
it resumes from both checkpoints in turn, each time in a new run, for one update, which is a
hundredth of the epoch. With each resume, it also computes the order of the epoch alone, each time
in a new process: by `permutation`, which does not depend on the position, so that its two columns
differ only by noise, and by `UpdateSampler`, until its first microbatch.

Everything runs in one thread. If other programs slow the machine down, compare the processor times.
Memory is resident memory in MB of 10^6 bytes. The memory of the order does not include what the
process used before.
"""

import multiprocessing
import os
import subprocess
import sys
import time
from collections import defaultdict
from concurrent.futures import ProcessPoolExecutor
from math import sqrt
from pathlib import Path
from statistics import mean, stdev

import psutil
from common import ROOT, flags, parse_flags, report, spread, temporary
from tqdm import tqdm

sys.path.insert(0, str(ROOT))
from utils.data.order import Plan, UpdateSampler, permutation

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
        "Resume, start of the process to the end of its first update, s": updated - begun,
        "Resume, processor time until then, s": used.user + used.system,
        "Resume, peak memory of the process, MB": usage.ru_maxrss * 1024 / 1e6,
    }


def make_order(samples: int, step: int, whole: bool) -> dict[str, float]:
    """Compute the `whole` order, or the sampler's first microbatch of update `step`; returns time
    and memory.
    """
    permutation(1, seed=0, epoch=0)  # numpy imports its random module on first use
    plan = Plan(samples, samples // 100, microbatches=samples // 100 // BATCH, seed=0)
    before = resident("VmRSS")
    begun = time.process_time()
    if whole:
        name, held = "Order alone", permutation(samples, plan.seed, epoch=0)
    else:
        name, held = "Sampler's first microbatch", iter(UpdateSampler(plan, 1, 1, step))
        next(held)
    return {
        f"{name}, processor time, s": time.process_time() - begun,
        f"{name}, peak memory, MB": resident("VmHWM") - before,
        f"{name}, memory kept, MB": resident("VmRSS") - before,
    }


def resident(field: str) -> float:
    """This process's resident memory in MB: VmRSS now, VmHWM at its peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) * 1024 / 1e6


def measure(samples: int, rounds: int) -> dict[str, dict[str, list[float]]]:
    """The numbers of all rounds, by quantity and by place."""
    results = defaultdict(lambda: {place: [] for place in PLACES})
    fresh = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), max_tasks_per_child=1)
    bar = tqdm(total=len(PLACES) * (1 + rounds))
    with temporary() as folder, fresh, bar:
        for place, step in PLACES.items():
            bar.set_description(f"training to {place}")
            train(samples, folder, run_name="whole", resume="auto", max_steps=step)
            bar.update()
        for number in range(rounds):
            # in alternating order, so that a drift cancels out
            for place in sorted(PLACES, reverse=number % 2 == 1):
                bar.set_description(f"resuming at {place}")
                step = PLACES[place]
                checkpoint = folder / f"whole/checkpoints/step-{step:08d}"
                run = {"run_name": f"{number}-from-{step}", "max_steps": step + 1}
                taken = train(samples, folder, resume=checkpoint, **run)
                for whole in (True, False):
                    taken |= fresh.submit(make_order, samples, step, whole).result()
                for what, value in taken.items():
                    results[what][place].append(value)
                bar.update()
    return results


def main() -> None:
    args = parse_flags(__doc__, rounds=7, samples=(10_000_000, "a multiple of 100000"))
    if args.samples < 1 or args.samples % (100 * BATCH) or args.rounds < 2:
        raise SystemExit(f"--samples must be a multiple of {100 * BATCH}, and --rounds at least 2")
    results, rows = measure(args.samples, args.rounds), []
    for what, at in results.items():
        later = [last - first for first, last in zip(*at.values(), strict=True)]
        error = stdev(later) / sqrt(len(later))
        cells = [spread(values, ".2f") for values in at.values()]
        rows.append([what, *cells, f"{mean(later):+.2f} ± {error:.2f}"])
    header = [f"{args.samples} samples", *PLACES, "99 % less 1 %, mean ± standard error"]
    report(args, header, rows, results)


if __name__ == "__main__":
    main()
