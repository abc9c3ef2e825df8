"""Findings of the checks: merge those of all ranks, and show them as a table or as JSON."""

import json
import socket
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace

from utils.console import table
from utils.errors import split_error
from utils.ranks import Ranks

_WIDTH = 84  # of a value
_MARKS = {True: "✓", False: "✗", None: " "}


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    `ok` is True (green), False (red) or None (information only). `fix` says what a red finding
    means and how to fix it. `numbers` are for programs that read the findings.
    """

    name: str
    value: str
    ok: bool | None = None
    fix: str = ""
    numbers: dict = field(default_factory=dict)

    @property
    def red(self) -> bool:
        return self.ok is False

    @classmethod
    def of(cls, name: str, error: BaseException) -> "Finding":
        """A red finding from an error."""
        problem, fix = split_error(error)
        return cls(name, problem, False, fix)


def any_red(findings: Sequence[Finding]) -> bool:
    """Whether any finding is red."""
    return any(finding.red for finding in findings)


def merge(ranks: Ranks, findings: Sequence[Finding]) -> list[Finding]:
    """The main process's findings, and the red findings of other ranks; collective."""
    (_, result), *others = ranks.gather((socket.gethostname(), list(findings)))
    for rank, (host, found) in enumerate(others, 1):
        result += [
            replace(each, value=f"rank {rank} on {host}: {each.value}")
            for each in found
            if each.red
        ]
    return result


def show(title: str, findings: Sequence[Finding]) -> str:
    """The findings as a table. Each red one is followed by its fix."""
    rows: list[tuple[str, str]] = []
    for finding in findings:
        text = f"{_MARKS[finding.ok]} {finding.value}"
        if finding.red and finding.fix:
            text += f"\n→ {finding.fix}"
        paragraphs = text.replace("\n", "\n  ").split("\n")
        lines = [
            line
            for each in paragraphs
            for line in textwrap.wrap(each, _WIDTH, subsequent_indent="    ")
        ]
        rows += zip([finding.name, *[""] * len(lines)], lines, strict=False)
    return "\n".join(line.rstrip() for line in table(title, rows).splitlines())


def as_json(findings: Sequence[Finding]) -> str:
    """The findings as JSON, for programs."""
    entries = [
        asdict(finding) | {"fix": finding.fix if finding.red else ""} for finding in findings
    ]
    return json.dumps({"healthy": not any_red(findings), "findings": entries}, indent=1) + "\n"
