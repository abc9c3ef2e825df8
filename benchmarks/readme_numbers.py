"""Write the measured numbers of README.md and docs/ from the records in benchmarks/records/.

    python benchmarks/readme_numbers.py     write them again, after a benchmark has written a record

A benchmark writes a record with --json benchmarks/records/NAME.json. Each part of a page that shows
numbers of a record stands between `<!-- NAME: written by benchmarks/readme_numbers.py -->` and
`<!-- end -->`. tests/repository/test_records.py fails if a page differs from what this writes.
"""

import json
import re
from collections.abc import Callable, Mapping
from statistics import median
from textwrap import fill

from common import ROOT, markdown, over, parse_flags, spread

RECORDS = ROOT / "benchmarks/records"
PART = re.compile(
    r"(<!-- ([\w-]+): written by benchmarks/readme_numbers.py -->\n).*?(\n<!-- end -->)", re.S
)
NAMES = {
    "ours": "Lockstep",
    "tutorial": "plain DDP, as in PyTorch's tutorials",
    "hugging_face": "Hugging Face's style (Accelerate)",
    "hugging_face_decoded": "the same, images decoded beforehand",
    "timm": "timm's loader and optimizer",
    "lightning": "Lightning's `Trainer`",
    "bare_step": "the step alone, without data",
}
ORDER = list(NAMES)


def ordered(results: Mapping[str, list]) -> list[str]:
    """The keys of a record's results, such as `epoch, tutorial, 2`, in the order of NAMES."""
    return sorted(results, key=lambda key: ORDER.index(key.split(", ")[1]))


def under(record: dict, rounds: str) -> str:
    """Where and how a record was measured."""
    machine, versions = record["machine"], record["versions"]
    cpu = " ".join(re.sub(r"\(R\)|\(TM\)|Processor|CPU", "", machine["cpu"]).split())
    where = f"{machine['cores']} cores of an {cpu} ({machine['cpu_capability']})"
    libraries = ", ".join(f"{name} {versions[name].split('+')[0]}" for name in LIBRARIES)
    commit = record["commit"][:8]
    text = (
        f"{record['date']}, {rounds}; {where}; {libraries}; commit {commit}; `{record['command']}`"
    )
    return wrapped(text)


def wrapped(text: str) -> str:
    return fill(text, 120, break_long_words=False, break_on_hyphens=False)


def speed(record: dict) -> str:
    """Images per second beside other training scripts, and how many times as many are ours."""
    results = record["results"]
    ours = results["epoch, ours, 2"]
    rows = [[NAMES["ours"], spread(ours), ""]]
    for key in ordered(results):
        kind, name, _ = key.split(", ")
        if kind == "epoch" and name != "ours":
            rows.append([NAMES[name], spread(results[key]), over(ours, results[key])])
    table = markdown(["MNIST, two processes", "images/s", "Lockstep over it"], rows)
    return f"{table}\n\n{under(record, f'{len(ours)} rounds')}"


def bare_step(record: dict) -> str:
    """Images per second beside the training step alone."""
    ours, bare = (record["results"][f"pair, {name}, 2"] for name in ("ours", "bare_step"))
    rows = [[NAMES["bare_step"], spread(ours), spread(bare), over(ours, bare)]]
    return markdown(
        ["two processes, against", "ours, images/s", "theirs", "ours over theirs"], rows
    )


def time_to_accuracy(record: dict) -> str:
    """Seconds from the start of a command to an accuracy, under both conditions."""
    columns: dict[str, dict[str, list[dict]]] = {}
    for key in ordered(record["results"]):
        condition, name = key.split(", ")
        columns.setdefault(name, {})[condition] = record["results"][key]
    rows = [
        [NAMES[name], *(reached(found[condition]) for condition in CONDITIONS)]
        for name, found in columns.items()
    ]
    table = markdown(["seconds, with the start", *CONDITIONS.values()], rows)
    rounds = len(record["results"]["recipe, ours"])
    return f"{table}\n\n{under(record, f'{rounds} rounds')}"


def reached(runs: list[dict]) -> str:
    """The seconds of all rounds; JSON has Infinity for a round that did not reach the accuracy."""
    seconds = [run["reached"] for run in runs]
    if max(seconds) == float("inf"):
        return f"not in {sum(time == float('inf') for time in seconds)} of {len(seconds)} rounds"
    return spread(seconds, ".0f")


def photos(record: dict) -> str:
    """A sentence about a classifier of photographs."""
    runs = record["results"]["head only, from nothing"]
    training, count = runs[0]["training"], runs[0]["count"]
    seconds = f"{median(run['s'] for run in runs):.0f} seconds"
    accuracy = f"{1 - median(run['wrong'] for run in runs) / count:.1%}"
    cores = f"{record['machine']['cores']} CPU cores"
    return wrapped(
        f"A classifier of ants and bees was trained on {training} photographs in {seconds} on"
        f" {cores}, starting from published weights. Its accuracy on {count} other photographs is"
        f" {accuracy}."
    )


def first_run(record: dict) -> str:
    """A part of the output of the first run."""
    shown = [line for line in record["results"]["output"] if line.startswith(SHOWN)]
    return "\n".join(["```", *shown, "```"])


LIBRARIES = ("torch", "torchvision", "accelerate", "datasets", "timm", "lightning")
CONDITIONS = {
    "tutorial": "to 90 %, network and learning rate of the tutorials",
    "recipe": "to 98.5 %, network and learning rate of `mnist_fast.yaml`",
}
SHOWN = ("Lockstep", "─", "rank ", "batch", "optimizer", "updates", "update 260", "Done")
SHOWN += ("accuracy", "always", "training", "page", "evaluate it")
# By the name of a part: the record's name, and the function that writes it.
PARTS: dict[str, tuple[str, Callable[[dict], str]]] = {
    "first-run": ("first_run", first_run),
    "photos": ("photos", photos),
    "speed": ("against_peers", speed),
    "bare-step": ("against_peers", bare_step),
    "time-to-accuracy": ("time_to_accuracy", time_to_accuracy),
}


def written(page: str) -> str:
    """The text of a page, with its parts written again."""

    def replace(match: re.Match) -> str:
        record, write = PARTS[match[2]]
        return f"{match[1]}{write(json.loads((RECORDS / f'{record}.json').read_text()))}{match[3]}"

    return PART.sub(replace, page)


def main() -> None:
    parse_flags(__doc__, rounds=None)
    for page in PAGES:
        page.write_text(written(page.read_text()))
        print(page.relative_to(ROOT))


PAGES = [ROOT / "README.md", ROOT / "docs/benchmarks.md", ROOT / "docs/photos.md"]


if __name__ == "__main__":
    main()
