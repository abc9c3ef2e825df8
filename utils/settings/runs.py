"""Settings of the run folder and its checkpoints."""

import os
import re
from dataclasses import dataclass
from typing import Annotated, Literal

from utils.config import Bound, Machine, OneStart, PositiveInt
from utils.settings.shared import SharedSettings


def _can_name_a_folder(name: str) -> bool:
    is_plain = re.match(r"[^./-][^/]*$", name) and name.isprintable()
    # The limit is 255 bytes; longer names are derived from it.
    return bool(is_plain) and len(os.fsencode(name)) <= 200


_PLAIN = Bound("a plain name of at most 200 bytes, such as mnist-1", _can_name_a_folder)
RunName = Annotated[str, _PLAIN]


@dataclass(kw_only=True)
class RunSettings(SharedSettings):
    """What `utils.runs` reads besides the settings that it saves."""

    run_name: OneStart[RunName | None] = None
    """Name of the run folder (default: DATA-MODEL-TIME)."""
    resume: OneStart[str | None] = None
    """auto resumes the run --run_name from its newest valid checkpoint, or starts it if there is
    none. The path of a checkpoint or run resumes from it in a new run folder, or in the same one if
    --run_name names it. Data and settings that are not given are those of the checkpoint."""
    output_dir: Machine[str] = "runs"
    """Folder that contains the run folders."""
    keep: PositiveInt | Literal["all"] = 2
    """Number of newest checkpoints to keep, besides the best one; all keeps every checkpoint."""
    report_to: Machine[str | None] = None
    """Trackers, separated by commas, that also get the records of the log."""

    @property
    def trackers(self) -> list[str]:
        """The trackers that --report_to names."""
        return (self.report_to or "").replace(",", " ").split()
