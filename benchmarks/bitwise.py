"""What --microbatches costs, and whether its weights are the same bits on any number of processes.

    python benchmarks/bitwise.py --rounds 3 --processes 1,2,4 --json bitwise.json

Each model trains on generated images with the same global batch on each number of processes, with
--microbatches 8 and as usual. As usual, a process computes its share of the batch at once. For a
comparison of the exchange alone, it also trains with the same microbatches by accumulation. Each
process has one thread. The hashes are those of the weights after the last update, the first ten
digits of SHA-256. A ratio compares rates of the same round.
"""

import hashlib
from functools import partial
from pathlib import Path
from statistics import harmonic_mean

from common import (
    flags,
    in_turns,
    latest_checkpoint,
    numbers,
    over,
    parse_flags,
    rates,
    report,
    spread,
    train,
)

MICROBATCHES = 8
MODELS = {
    "mnist_cnn": flags(
        data="synthetic/10x28x6400", channels=1, model="mnist_cnn", max_steps=60, log_every=10
    ),
    "resnet18": flags(data="synthetic/10x32x640", model="resnet18", max_steps=6, log_every=2),
}
FIXED, ACCUMULATED, USUAL = "--microbatches 8", "accumulation", "as usual"


def measure(model: str, kind: str, processes: int) -> dict:
    """Images per second of a run without its first record, and the hash of its weights."""
    settings = [
        *MODELS[model],
        *flags(global_batch_size=128, threads=1, max_eval_samples=64, eval_every=10**6),
    ]
    if kind == FIXED:
        settings += flags(microbatches=MICROBATCHES)
    elif kind == ACCUMULATED:
        settings += flags(grad_accum=MICROBATCHES // processes)
    found: list[str] = []

    def hash_weights(folder: Path) -> None:
        weights = (latest_checkpoint(folder) / "model.safetensors").read_bytes()
        found.append(hashlib.sha256(weights).hexdigest()[:10])

    records = train(processes, *settings, then=hash_weights)
    return {"rate": harmonic_mean(rates(records)), "hash": found[0]}


def rows(results: dict[tuple[str, str, int], list[dict]]) -> list[list]:
    """The table: a row for each model and number of processes."""
    lines = []
    for model, kind, processes in results:
        if kind != FIXED:
            continue
        by = {
            k: [run["rate"] for run in results[model, k, processes]]
            for k in (FIXED, ACCUMULATED, USUAL)
        }
        hashes = {
            k: ", ".join(sorted({run["hash"] for run in results[model, k, processes]})) for k in by
        }
        costs = [over(by[FIXED], by[k]) for k in (ACCUMULATED, USUAL)]
        lines.append([model, processes, hashes[FIXED], hashes[USUAL], spread(by[FIXED]), *costs])
    return lines


def main() -> None:
    how_many, models = ("1,2,4", "how many"), (",".join(MODELS), "which")
    args = parse_flags(__doc__, rounds=3, processes=how_many, models=models)
    kinds, counts = (FIXED, ACCUMULATED, USUAL), numbers(args.processes)
    names = [(model, kind, n) for n in counts for model in args.models.split(",") for kind in kinds]
    results = in_turns({name: partial(measure, *name) for name in names}, args.rounds)
    header = ["model", "processes", "weights with --microbatches 8", "weights as usual", "images/s"]
    header += ["against accumulation", "against the usual exchange"]
    report(args, header, rows(results), results)


if __name__ == "__main__":
    main()
