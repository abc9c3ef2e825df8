"""Records of what GPUs have run, and the tables of docs/launching.md that are written from them.

    python benchmarks/gpu_records.py                                              write the page's tables again
    python benchmarks/gpu_records.py --raw benchmarks/records/raw/DATE-COMMIT     make a record first

`tests/gpu/run.py --report FOLDER` writes about.json, gpu.json and logs. Put them into a folder named
by the date and the commit, as they are; several calls of run.py have a folder each below it. The
record is benchmarks/records/DATE-COMMIT-gpu.json. What was not written down is null in it.
"""

import argparse
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from textwrap import fill

from common import ROOT, markdown, parse_flags

sys.path.insert(0, str(ROOT))
from utils.checks.processes import code_hash

RECORDS = ROOT / "benchmarks/records"
CHECKS = ROOT / "tests/gpu"
PAGE = ROOT / "docs/launching.md"
BEGIN, END = "<!-- written by benchmarks/gpu_records.py -->", "<!-- end -->"
HEADER = ["Command", "Commit", "Result"]
# what no check of tests/gpu/ is about
WITHOUT_A_CHECK = ["more than one GPU", "`adagrad` and `asgd`", "the notebook"]


def make_record(raw: Path) -> dict:
    """The record of a folder DATE-COMMIT with what run.py wrote."""
    named = re.fullmatch(r"(\d{4}-\d\d-\d\d)-([0-9a-f]{7,40})", raw.name)
    if not named:
        raise SystemExit(
            f"gpu_records.py: error: {raw.name} is not DATE-COMMIT, such as 2026-11-27-8b6a5f3b"
        )
    calls = [
        call_of(json.loads(about.read_text()), about.with_name("gpu.json"))
        for about in sorted(raw.rglob("about.json"))
    ]
    if not calls:
        raise SystemExit(f"gpu_records.py: error: {raw} has no about.json; run.py writes it")
    first = calls[0]["about"]
    for call in calls:
        if call["about"]["code"] != first["code"]:
            raise SystemExit(
                "gpu_records.py: error: the calls ran different code; give each its own folder"
            )
    return {
        "date": named[1],
        "commit": named[2],
        "code": first["code"],
        "raw": str(raw.resolve().relative_to(ROOT)),
        "card": first["card"],
        "machine": first["machine"],
        "driver": first["driver"],
        "versions": first["versions"],
        "remarks": [],
        "calls": [
            {"command": call["about"]["command"], "checks": call["checks"]} for call in calls
        ],
    }


def call_of(about: dict, table: Path) -> dict:
    """A call of run.py, with the checks that it ran on its machine."""
    tables = json.loads(table.read_text()) if table.exists() else {}
    return {"about": about, "checks": tables.get(about["machine"], {})}


def all_records() -> list[dict]:
    """The records, the newest first."""
    paths = sorted(RECORDS.glob("*gpu*.json"), reverse=True)
    return [json.loads(path.read_text()) for path in paths]


def titles() -> list[str]:
    """What the checks of tests/gpu/ are called in a table."""
    files = sorted(CHECKS.glob("test_*.py"))
    names = [
        name for file in files for name in re.findall(r"^def test_(\w+)", file.read_text(), re.M)
    ]
    return [name.replace("_", " ") for name in names]


def not_run(records: list[dict], code: str) -> str:
    """What no GPU has run with this code."""
    ran = [
        name
        for record in records
        if record["code"] == code
        for call in record["calls"]
        for name, row in call.get("checks", {}).items()
        if row["outcome"] != "skipped"
    ]
    if not ran:
        return "everything: no GPU has run this version of the code"
    missing = [title for title in titles() if not any(name.startswith(title) for name in ran)]
    return "; ".join([*missing, *WITHOUT_A_CHECK])


def rows_of(record: dict) -> Iterator[list[str]]:
    """The rows of a record; a command is named once."""
    for call in record["calls"]:
        cells = [
            f"`{call['command']}`{call.get('how', '')}",
            record["commit"] or "not written down",
        ]
        for result in [*call.get("results", []), *results_of(call.get("checks", {}))]:
            yield [*cells, result]
            cells = ["", ""]


def results_of(checks: dict[str, dict]) -> Iterator[str]:
    """What the checks of a call found: those with figures or a failure, then the others."""
    others: dict[str, list[str]] = {"passed": [], "skipped": []}
    for name, row in checks.items():
        title = re.sub(r"\[(.*)\]", r" (\1)", name)
        figures = ", ".join(f"{key} {value}" for key, value in row["figures"].items())
        if row["outcome"] == "failed":
            yield clean(f"**failed**: {title}: {' '.join(filter(None, [figures, row['reason']]))}")
        elif row["outcome"] == "passed" and figures:
            yield clean(f"{title}: {figures}")
        else:
            reason = row["reason"] and f" ({row['reason']})"
            others[row["outcome"]].append(clean(f"{title}{reason}"))
    for outcome, text in (("passed", "passed"), ("skipped", "not run")):
        if others[outcome]:
            yield f"{text}: {'; '.join(others[outcome])}"


def clean(text: str) -> str:
    """A text that fits into a cell."""
    return " ".join(text.replace("|", "/").replace("<", "&lt;").split())


def about(record: dict) -> str:
    """The machine of a record, in a paragraph."""
    versions = ", ".join(f"{name} {value}" for name, value in record["versions"].items() if value)
    parts = [record["card"], record["machine"]]
    text = f"{record['date']}: {', '.join(filter(None, parts))}; {versions}, driver {record['driver']}."
    return fill(
        " ".join([text, *record["remarks"]]), 120, break_long_words=False, break_on_hyphens=False
    )


def as_page(records: list[dict], code: str) -> str:
    """The generated part of the page: a paragraph and a table for each record, the newest first."""
    parts = []
    for number, record in enumerate(records):
        rows = list(rows_of(record))
        if number == 0:
            rows.append(["not run at HEAD", "", not_run(records, code)])
        table = markdown(HEADER, rows)
        parts.append(f"{about(record)}\n\n<!-- not run: needs GPUs -->\n{table}")
    return "\n\n".join(parts)


def written(page: str, content: str) -> str:
    """The page with this content between its two marks."""
    before, rest = page.split(BEGIN)
    return f"{before}{BEGIN}\n\n{content}\n\n{END}{rest.split(END)[1]}"


def read_flags() -> argparse.Namespace:
    return parse_flags(
        __doc__, rounds=None, raw=(Path, "a folder DATE-COMMIT with what run.py wrote")
    )


def main() -> None:
    args = read_flags()
    if args.raw:
        path = RECORDS / f"{args.raw.resolve().name}-gpu.json"
        path.write_text(json.dumps(make_record(args.raw), indent=1) + "\n")
        print(path)
    PAGE.write_text(written(PAGE.read_text(), as_page(all_records(), code_hash())))
    print(PAGE)


if __name__ == "__main__":
    main()
