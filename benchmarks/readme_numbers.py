"""Write the measured numbers of README.md and docs/ from the records in benchmarks/records/.

    python benchmarks/readme_numbers.py     write them again, after a benchmark has written a record

A benchmark writes a record with --json benchmarks/records/NAME.json. Each part of a page that shows
numbers of a record stands between `<!-- NAME: written by benchmarks/readme_numbers.py -->` and
`<!-- end -->`. tests/repository/test_records.py fails if a page differs from what this writes.
"""

import json
import re
from collections.abc import Callable
from statistics import median

from common import RECORDS, ROOT, markdown, over, paragraph, parse_flags, spread
from scipy.stats import binomtest

PAGES = [ROOT / "README.md", ROOT / "docs/benchmarks.md", ROOT / "docs/photos.md"]
PART = re.compile(
    r"(<!-- ([\w-]+): written by benchmarks/readme_numbers.py -->\n).*?(<!-- end -->)", re.S
)
NAMES = {
    "ours": "Lockstep",
    "tutorial": "plain DDP, as in PyTorch's tutorials",
    "hugging_face": "Hugging Face's style (Accelerate)",
    "hugging_face_decoded": "Hugging Face's style, images decoded beforehand",
    "timm": "timm's loader and optimizer",
    "lightning": "Lightning's `Trainer`",
    "bare_step": "the step alone, without data",
}

LIBRARIES = ("torch", "torchvision", "accelerate", "datasets", "timm", "lightning")
HOW = "Medians, with the lowest and highest of the rounds; a ratio is that of a round."
CONDITIONS = {
    "tutorial": "s to 90 %, tutorials' settings",
    "recipe": "s to 98.5 %, our recipe",
}
SHOWN = ("update 260  eval", "accuracy", "always", "training")


def machine(record: dict) -> str:
    """The hardware and the library versions of a record."""
    found, versions = record["machine"], record["versions"]
    cpu = " ".join(re.sub(r"\(R\)|\(TM\)|Processor|CPU", "", found["cpu"]).split())
    libraries = ", ".join(f"{name} {versions[name].split('+')[0]}" for name in LIBRARIES)
    return f"{found['cores']} cores, {cpu} ({found['cpu_capability']}); {libraries}"


def command(record: dict) -> str:
    """The command of a record, without where it wrote the record."""
    return re.sub(r" --json \S+", "", record["command"])


def when(record: dict, rounds: int) -> str:
    """When a record was measured, and how."""
    commit = record["commit"][:8]
    return f"{record['date']}, {rounds} rounds, commit {commit}: `{command(record)}`"


def speed(rates: dict, times: dict) -> str:
    """Images per second of the scripts, and the seconds to an accuracy under both conditions."""
    ours, rows = rates["results"]["epoch, ours, 2"], []
    for name, text in NAMES.items():
        theirs = rates["results"].get(f"epoch, {name}, 2")
        if theirs:
            ratio = "" if name == "ours" else over(ours, theirs)
            runs = [times["results"][f"{condition}, {name}"] for condition in CONDITIONS]
            rows.append([text, spread(theirs), ratio, *map(reached, runs)])
    table = markdown(["", "images/s", "Lockstep's speed / this", *CONDITIONS.values()], rows)
    measured = [
        machine(rates),
        when(rates, len(ours)),
        when(times, len(times["results"]["recipe, ours"])),
    ]
    return f"{table}\n\n{paragraph(f'{HOW} ' + '; '.join(measured))}"


def reached(runs: list[dict]) -> str:
    """The seconds of all rounds; JSON has Infinity for a round that did not reach the accuracy."""
    seconds = [run["reached"] for run in runs]
    if max(seconds) == float("inf"):
        return f"not in {sum(time == float('inf') for time in seconds)} of {len(seconds)} rounds"
    return spread(seconds, ".0f")


def bare_step(record: dict) -> str:
    """Images per second beside the training step alone."""
    ours, bare = (record["results"][f"pair, {name}, 2"] for name in ("ours", "bare_step"))
    table = markdown(
        ["two processes", "images/s", "Lockstep's speed / this"],
        [["Lockstep", spread(ours), ""], [NAMES["bare_step"], spread(bare), over(ours, bare)]],
    )
    return f"{table}\n\n{paragraph(when(record, len(ours)))}"


def photos(record: dict) -> str:
    """A sentence about a classifier of photographs."""
    runs = record["results"]["head only, from nothing"]
    training, count = runs[0]["training"], runs[0]["count"]
    seconds = f"{median(run['s'] for run in runs):.0f} seconds"
    right = count - round(median(run["wrong"] for run in runs))
    interval = binomtest(right, count).proportion_ci(method="wilson")
    accuracy = f"{100 * right / count:.1f} %, with a 95 % interval of {100 * interval.low:.1f} to"
    cores = f"{record['machine']['cores']} CPU cores"
    return paragraph(
        f"A classifier of ants and bees was trained on {training} photographs in {seconds} on"
        f" {cores}, starting from published weights of EfficientNet-Lite0. Its accuracy on {count}"
        f" other photographs is {accuracy} {100 * interval.high:.1f} (`{command(record)}`)."
    )


def first_run(record: dict) -> str:
    """A part of the output of the first run."""
    shown = [line for line in record["results"]["output"] if line.startswith(SHOWN)]
    return "\n".join(["```", *shown, "```"])


# The name of a part -> the function that writes it, and the records that it reads.
PARTS: dict[str, tuple[Callable[..., str], list[str]]] = {
    "first-run": (first_run, ["first_run"]),
    "photos": (photos, ["photos"]),
    "speed": (speed, ["against_peers", "time_to_accuracy"]),
    "bare-step": (bare_step, ["against_peers"]),
}


def written(page: str) -> str:
    """The text of a page, with its parts written again."""

    def replace(match: re.Match) -> str:
        write, names = PARTS[match[2]]
        records = [json.loads((RECORDS / f"{name}.json").read_text()) for name in names]
        return f"{match[1]}{write(*records)}\n{match[3]}"

    return PART.sub(replace, page)


def main() -> None:
    parse_flags(__doc__, rounds=None)
    for page in PAGES:
        page.write_text(written(page.read_text()))
        print(page.relative_to(ROOT))


if __name__ == "__main__":
    main()
