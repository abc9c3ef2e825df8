"""The finished part of a file of predictions, from which an interrupted prediction continues."""

import fcntl
import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from utils.errors import UserError
from utils.files import naming_file
from utils.predictions.rows import Row


class Partial:
    """FILE.partial beside the file of predictions: `about` as a line of JSON, then a list of rows on each line.

    `rows` has the finished rows. `about` has fingerprints of everything that they depend on. Raises UserError if those
    in the file differ, or if another process writes it. The file is locked until this process exits.
    """

    def __init__(self, out: Path, about: dict[str, str]):
        self.path = out.with_name(f"{out.name}.partial")
        self.rows: list[Row] = []
        with naming_file(self.path):
            self.file = self.path.open("a+b", buffering=0)
            self._lock()
            self.file.seek(0)
            lines = self.file.read().splitlines(keepends=True)
            whole = self._read(lines, json.dumps(about) + "\n")
            self.file.truncate(whole)  # a killed process may have left half a line
            if not whole:
                self._write(about)

    def _lock(self) -> None:
        try:
            fcntl.lockf(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"{self.path}: another process writes it", "wait for it, or give another --out") from None
        except OSError:  # some network file systems have no locks
            pass

    def _read(self, lines: Sequence[bytes], header: str) -> int:
        """Take the rows of the complete lines; returns the number of bytes in these lines."""
        if not lines or not lines[0].endswith(b"\n"):
            return 0
        if lines[0] != header.encode():
            differs = "something else"
            with suppress(ValueError, AttributeError):
                found, wanted = json.loads(lines[0]), json.loads(header)
                differs = ", ".join(f"other {name}" for name in wanted if found.get(name) != wanted[name])
            fix = "delete it to start again, or give another --out"
            raise UserError(f"{self.path}: has predictions of {differs}", fix)
        size = len(lines[0])
        for line in lines[1:]:
            try:
                rows = [Row(*row) for row in json.loads(line)] if line.endswith(b"\n") else None
            except (ValueError, TypeError):
                rows = None
            if rows is None:
                break
            self.rows += rows
            size += len(line)
        return size

    def append(self, rows: Sequence[Row]) -> None:
        """Add the rows of the next images."""
        self.rows += rows
        with naming_file(self.path):
            self._write(rows)

    def _write(self, value: object) -> None:
        line = (json.dumps(value) + "\n").encode()
        written = 0
        while written < len(line):  # a disk that is nearly full may take a part of the line
            written += self.file.write(line[written:])

    def delete(self) -> None:
        """Delete the file; all rows are in the file of predictions."""
        self.path.unlink(missing_ok=True)
        self.file.close()
