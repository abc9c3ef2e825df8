"""Records of what GPUs have run, and the tables of docs/launching.md that are written from them.

    python benchmarks/gpu_records.py                  write the page's tables again
    python benchmarks/gpu_records.py --raw FOLDER     make a record first, of raw/DATE-COMMIT

`tests/gpu/run.py --report FOLDER` writes about.json, gpu.json and logs. Copy them unchanged into a
folder DATE-COMMIT, with one subfolder for each call of run.py if there are several. Another machine
needs another folder: DATE-COMMIT-NAME. The record is benchmarks/records/DATE-COMMIT-gpu.json.
Unrecorded values are null.
"""

import argparse
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from common import RECORDS, ROOT, markdown, paragraph, parse_flags

sys.path.insert(0, str(ROOT))
from extras.doctor.processes import code_hash

PAGE = ROOT / "docs/launching.md"
BEGIN, END = "<!-- written by benchmarks/gpu_records.py -->", "<!-- end -->"
HEADER = ["Command", "Commit", "Result"]
NOT_COVERED = ["`adagrad` and `asgd`", "the notebook"]  # by tests/gpu/


def make_record(raw: Path) -> dict:
    """Make a record from a DATE-COMMIT folder."""
    named = re.fullmatch(r"(\d{4}-\d\d-\d\d)-([0-9a-f]{7,40})(-[\w.]+)?", raw.name)
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
        if call["about"]["dry_run"] or not call["about"]["gpus"]:
            raise SystemExit(
                "gpu_records.py: error: a dry run, or a run without a GPU, is not a record"
            )
        for what in ("code", "machine"):
            if call["about"][what] != first[what]:
                raise SystemExit(
                    f"gpu_records.py: error: the calls differ in their {what};"
                    " give each its own folder, such as DATE-COMMIT-NAME"
                )
    return {
        "date": named[1],
        "commit": named[2],
        "code": first["code"],
        "raw": str(raw.resolve().relative_to(ROOT)),
        "gpus": first["gpus"],
        "card": first["card"],
        "machine": first["processor"],
        "driver": first["driver"],
        "versions": first["versions"],
        "remarks": [],
        "all_checks": sorted({name for call in calls for name in call["about"]["checks"]}),
        "calls": [
            {"command": call["about"]["command"], "checks": call["checks"]} for call in calls
        ],
    }


def call_of(about: dict, table: Path) -> dict:
    """Return a run.py call and its checks."""
    tables = json.loads(table.read_text()) if table.exists() else {}
    return {"about": about, "checks": tables.get(about["machine"], {})}


def all_records() -> list[dict]:
    """Return the records, the newest first."""
    paths = sorted(RECORDS.glob("*gpu*.json"), reverse=True)
    return [json.loads(path.read_text()) for path in paths]


def not_run(records: list[dict], code: str) -> str:
    """Name what no GPU has run with this code."""
    records = [record for record in records if record["code"] == code]
    ran = {
        name
        for record in records
        for call in record["calls"]
        for name, row in call.get("checks", {}).items()
        if row["outcome"] in ("passed", "failed")
    }
    if not ran:
        return "everything: no GPU has run this version of the code"
    known = {name for record in records for name in record["all_checks"]}
    backends = {
        name: [backend for backend in ("", "nccl", "gloo") if over(name, backend) in ran]
        for name in sorted(known)
    }
    missing = by_title([name for name, found in backends.items() if not found])
    if not known:
        missing = ["unknown: pytest could not list the checks"]
    only_gloo = by_title([name for name, found in backends.items() if found == ["gloo"]])
    if only_gloo:
        missing.append(f"over NCCL: {', '.join(only_gloo)}")
    if all(record["gpus"] < 2 for record in records):
        missing.append("more than one GPU")
    return clean("; ".join([*missing, *NOT_COVERED]))


def over(name: str, backend: str) -> str:
    """Return the name of a check's row, which ends with the backend of two ranks."""
    return f"{name} over {backend}" if backend else name


def by_title(names: list[str]) -> list[str]:
    """Join the cases of each check: `title (case; case)`."""
    cases: dict[str, list[str]] = {}
    for name in names:
        title, _, case = name.removesuffix("]").partition("[")
        cases.setdefault(title, []).extend([case] if case else [])
    return [f"{title} ({'; '.join(found)})" if found else title for title, found in cases.items()]


def rows_of(record: dict) -> Iterator[list[str]]:
    """Yield the rows of a record; each command is shown once."""
    for call in record["calls"]:
        cells = [
            f"`{call['command']}`{call.get('how', '')}",
            record["commit"] or "unknown",
        ]
        for result in [*call.get("results", []), *results_of(call.get("checks", {}))]:
            yield [*cells, result]
            cells = ["", ""]


def results_of(checks: dict[str, dict]) -> Iterator[str]:
    """Yield the results of a call: figures and failures first."""
    others: dict[str, list[str]] = {"passed": [], "skipped": []}
    for name, row in checks.items():
        title = re.sub(r"\[(.*)\]", r" (\1)", name)
        figures = ", ".join(f"{key} {value}" for key, value in row["figures"].items())
        if row["outcome"] in ("failed", "not finished"):
            found = " ".join(filter(None, [figures, row["reason"]]))
            yield clean(f"**{row['outcome']}**: {title}: {found}")
        elif row["outcome"] == "passed" and figures:
            yield clean(f"{title}: {figures}")
        else:
            reason = row["reason"] and f" ({row['reason']})"
            others[row["outcome"]].append(clean(f"{title}{reason}"))
    for outcome, text in (("passed", "passed"), ("skipped", "not run")):
        if others[outcome]:
            yield f"{text}: {'; '.join(others[outcome])}"


def clean(text: str) -> str:
    """Escape text for a cell."""
    return " ".join(text.replace("|", "/").replace("<", "&lt;").split())


def about(record: dict) -> str:
    """Describe a record's machine in a paragraph."""
    versions = ", ".join(f"{name} {value}" for name, value in record["versions"].items() if value)
    parts = f"{record['gpus']} x {record['card']}", record["machine"]
    text = f"{record['date']}: {', '.join(parts)}; {versions}, driver {record['driver']}."
    return paragraph(" ".join([text, *record["remarks"]]))


def as_page(records: list[dict], code: str) -> str:
    """Write the generated part of the page: text and table of each record, the newest first."""
    parts = []
    for number, record in enumerate(records):
        rows = list(rows_of(record))
        if number == 0:
            rows.append(["not run with this code", "", not_run(records, code)])
        table = markdown(HEADER, rows)
        parts.append(f"{about(record)}\n\n<!-- not run: needs GPUs -->\n{table}")
    return "\n\n".join(parts)


def written(page: str, content: str) -> str:
    """Replace the text between the page's two marks."""
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
