"""Images per second on MNIST, on an idle machine and beside a busy loop, if OpenMP's threads sleep
or spin.

    python benchmarks/busy_cores.py --mnist DIR --rounds 5 --json FILE

OpenMP's threads wait for each other. *passive* is train.py as it is: they sleep while they wait.
*spinning* is train.py with PyTorch's default (GOMP_SPINCOUNT=300000). *plain* is a loop of PyTorch
alone, with its defaults and the tutorials' network, on one batch in memory. All use batches of 128
per process and all cores. The busy loop is one Python process.

A rate is the median over stretches of 20 updates, without the first. A ratio compares rates of the
same round. The load average shows how busy the machine was before.
"""

import os
import subprocess
import sys
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median

from common import (
    flags,
    in_turns,
    kill,
    last_json,
    numbers,
    over,
    parse_flags,
    rates,
    report,
    spread,
    train,
)

STRETCH, STRETCHES = 20, 4
# libgomp's default in PyTorch's wheels
WAITING = {"passive": {}, "spinning": {"GOMP_SPINCOUNT": "300000"}}
PLAIN = """
import json, statistics, sys, time, torch
from torch import nn
batch, stretch, stretches = map(int, sys.argv[1:])
model = nn.Sequential(nn.Conv2d(1, 32, 3), nn.MaxPool2d(2), nn.ReLU(), nn.Conv2d(32, 64, 3),
                      nn.Dropout2d(0.5), nn.MaxPool2d(2), nn.ReLU(), nn.Flatten(),
                      nn.Linear(1600, 500), nn.ReLU(), nn.Dropout(0.5),
                      nn.Linear(500, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
images, labels = torch.randn(batch, 1, 28, 28), torch.randint(10, (batch,))
found = []
for _ in range(stretches):
    begun = time.perf_counter()
    for _ in range(stretch):
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
    found.append(stretch * batch / (time.perf_counter() - begun))
print(json.dumps({"images_per_second": statistics.median(found[1:])}))
"""


def rate(side: str, processes: int, load: str, mnist: Path) -> dict:
    """Images per second of a side, and the load average before it began."""
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"])] if load == "busy" else []
    try:
        before = os.getloadavg()[0]
        found = plain_rate() if side == "plain" else our_rate(processes, WAITING[side], mnist)
        return {"images_per_second": found, "load": before}
    finally:
        for process in busy:
            kill(process.pid)
            process.wait()


def our_rate(processes: int, env: dict, mnist: Path) -> float:
    sgd = flags(model="mnist_cnn", batch_size=128, lr=0.01, lr_schedule="constant")
    much = flags(max_steps=STRETCH * STRETCHES, log_every=STRETCH, max_eval_samples=256)
    return median(rates(train(processes, *flags(data=mnist), *sgd, *much, env=env)))


def plain_rate() -> float:
    plain = [sys.executable, "-c", PLAIN, 128, STRETCH, STRETCHES]
    return last_json(plain)["images_per_second"]


def main() -> None:
    data, how_many = (Path, "folder with MNIST's parquet files"), ("1,2", "numbers of processes")
    args = parse_flags(__doc__, ["mnist"], mnist=data, processes=how_many)
    cases = [*product(WAITING, numbers(args.processes)), ("plain", 1)]
    keys = [(*case, load) for case in cases for load in ("idle", "busy")]
    results = in_turns({key: partial(rate, *key, args.mnist) for key in keys}, args.rounds)
    found = {key: [turn["images_per_second"] for turn in turns] for key, turns in results.items()}
    rows = []
    for key in keys:
        ours = over(found["passive", *key[1:]], found[key])
        loads = [turn["load"] for turn in results[key]]
        rows.append([*key, spread(found[key]), ours, spread(loads, ".1f")])
    header = ["side", "processes", "beside", "images/s", "passive over this", "load average"]
    report(args, header, rows, results)


if __name__ == "__main__":
    main()
