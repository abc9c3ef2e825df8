"""Draw docs/images/same_run.svg: a run on one process, on two, and on two that are killed and
continue as one.

    python docs/images/same_run.py

The samples are those that `utils/data/order.py` gives to each rank: 32 samples, 8 in an update.
"""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1]))

from utils.data import Plan, UpdateSampler  # noqa: E402

SIDE, GAP, LEFT = 20, 30, 118  # of a sample, between updates, of the names of ranks
COLOURS = ("#4c78a8", "#e08214", "#54a24b", "#b279a2")  # of the updates
UPDATES, BATCH = 4, 8
TITLE = "The same samples form each update on one process, on two, and after a resume"
UPDATE = BATCH * SIDE + GAP


def samples(processes: int, rank: int, update: int) -> list[tuple[int, int]]:
    """The place in the update and the index of each sample of a rank."""
    plan = Plan(samples=32, global_batch_size=BATCH, microbatches=4, seed=0)
    found = []
    for number, batch in enumerate(UpdateSampler(plan, processes, 1, update)):
        if number % processes == rank:  # as Accelerate assigns them
            found += [(2 * batch.number + place, i) for place, i in enumerate(batch.indices)]
    return found


def text(x: float, y: float, words: str, more: str = "") -> str:
    return f'<text x="{x}" y="{y}" {more}>{words}</text>'


def row(top: float, processes: int, rank: int, updates: range, lost: int = -1) -> list[str]:
    """The samples that a rank computes; those of the update `lost` are pale."""
    parts = [text(0, top + 15, f"process {rank}")]
    for update in updates:
        parts.append(f'<g opacity="{0.3 if update == lost else 1}">')
        for place, index in samples(processes, rank, update):
            x = LEFT + update * UPDATE + place * SIDE
            size = f'width="{SIDE - 2}" height="{SIDE - 2}" rx="3"'
            parts.append(f'<rect x="{x}" y="{top}" {size} fill="{COLOURS[update]}"/>')
            centre = f"{x + SIDE / 2 - 1:g}"
            parts.append(text(centre, top + 13, str(index), 'class="sample"'))
        parts.append("</g>")
    return parts


def line(x: float, top: float, bottom: float, words: str, colour: str) -> list[str]:
    """A dashed line between two updates, with words above it."""
    ends = f'x1="{x}" x2="{x}" y1="{top}" y2="{bottom}"'
    style = f'fill="{colour}" text-anchor="middle"'
    dashes = f'stroke="{colour}" stroke-width="2" stroke-dasharray="4 3"'
    return [f"<line {ends} {dashes}/>", text(x, top - 5, words, style)]


def draw() -> str:
    parts = []
    for update in range(UPDATES):
        x = LEFT + update * UPDATE + BATCH * SIDE / 2
        middle = f'text-anchor="middle" fill="{COLOURS[update]}" font-weight="bold"'
        parts.append(text(x, 16, f"update {update + 1}", middle))
    everything = range(UPDATES)
    parts.append(text(0, 46, "One process", 'font-weight="bold"'))
    parts += row(56, 1, 0, everything)
    parts.append(text(0, 110, "Two processes", 'font-weight="bold"'))
    parts += row(120, 2, 0, everything) + row(144, 2, 1, everything)
    heading = "Two processes are killed in update 3, and the run continues on one process"
    parts.append(text(0, 198, heading, 'font-weight="bold"'))
    for rank, top in enumerate((226, 250)):
        parts += row(top, 2, rank, range(3), lost=2)
    saved = LEFT + 2 * UPDATE - GAP / 2 - 1
    parts += line(saved, 220, 276, "checkpoint", "#333")
    parts += line(LEFT + 2 * UPDATE + 5.5 * SIDE, 220, 276, "kill -9", "#c00")
    parts += row(292, 1, 0, range(2, UPDATES))
    resumed = LEFT + 2 * UPDATE - GAP / 2
    parts.append(text(resumed - 6, 307, "resumes at the next sample", 'text-anchor="end"'))
    width, height = LEFT + UPDATES * UPDATE - GAP + 2, 322
    style = "text{font:13px sans-serif}.sample{font-size:10px;fill:#fff;text-anchor:middle}"
    view = f'viewBox="-12 -8 {width + 24} {height + 8}" width="{width + 24}" height="{height + 8}"'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" {view} role="img" fill="#222">',
            f"<title>{TITLE}</title>",
            f"<style>{style}</style>",
            f'<rect x="-12" y="-8" width="{width + 24}" height="{height + 8}" fill="#fff"/>',
            *parts,
            "</svg>\n",
        ]
    )


if __name__ == "__main__":
    (HERE / "same_run.svg").write_text(draw())
