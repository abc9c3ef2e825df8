"""A page with images and their predictions, in a single file that loads nothing else."""

import base64
import io
from collections.abc import Sequence
from html import escape

from PIL import Image

from utils.console import printable
from utils.data.decode import decode
from utils.data.splits import Split
from utils.predictions.rows import Row

MOST = 1000  # images on the page; the thumbnail of each has about 5 kB
_SIDE = 192  # pixels of the longer side of a thumbnail

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark; --paper: #fff; --text: #1b1b1b; --soft: #666; --line: #ddd; }}
@media (prefers-color-scheme: dark) {{
  :root {{ --paper: #16181c; --text: #e6e6e6; --soft: #9aa0a6; --line: #33373d; }}
}}
body {{ margin: 1rem; background: var(--paper); color: var(--text); font: 15px/1.4 system-ui, sans-serif; }}
h1 {{ font-size: 1.25rem; margin: 0; }}
p {{ color: var(--soft); margin: .25rem 0 1rem; }}
main {{ display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 11rem), 1fr)); gap: 1rem; }}
figure {{ margin: 0; padding: .5rem; border: 1px solid var(--line); border-radius: .4rem; overflow-wrap: anywhere; }}
.frame {{ height: 10rem; display: flex; align-items: center; justify-content: center; color: var(--soft); }}
img {{ max-width: 100%; max-height: 100%; }}
.path {{ color: var(--soft); font-size: .8rem; }}
.row {{ display: flex; justify-content: space-between; gap: .5rem; font-size: .85rem; }}
.row span + span {{ white-space: nowrap; }}
meter {{ width: 100%; height: .4rem; display: block; }}
</style>
</head>
<body>
<h1>{title}</h1>
<p>{summary}</p>
<main>
{figures}
</main>
</body>
</html>
"""


def page(title: str, rows: Sequence[Row], split: Split) -> str:
    """The page of the first `MOST` images of a split with their rows, in HTML."""
    bad = sum(row.error is not None for row in rows)
    summary = f"{len(rows)} images" + f", {bad} of them cannot be read" * (bad > 0)
    summary += f"; the first {MOST} are shown" * (len(rows) > MOST)
    figures = [_figure(row, split, position) for position, row in enumerate(rows[:MOST])]
    return _PAGE.format(title=escape(printable(title)), summary=summary, figures="\n".join(figures))


def _figure(row: Row, split: Split, position: int) -> str:
    path = escape(_text(split.describe(position)))
    if row.error is not None:
        return f'<figure><div class="frame">{escape(_text(row.error))}</div><div class="path">{path}</div></figure>'
    predicted = ", ".join(row.predicted) if isinstance(row.predicted, list) else row.predicted or ""
    lines = [f'<div class="frame">{_thumbnail(split, position, path)}</div>']
    lines.append(f"<div><strong>{escape(_text(predicted) or 'no class')}</strong></div>")
    for name, probability in zip(row.classes, row.probabilities, strict=True):
        value = "NaN" if probability is None else f"{probability:.4f}"
        lines.append(f'<div class="row"><span>{escape(_text(name))}</span><span>{value}</span></div>')
        lines.append(f'<meter value="{probability or 0}"></meter>')
    return f'<figure>{"".join(lines)}<div class="path">{path}</div></figure>'


def _thumbnail(split: Split, position: int, alt: str) -> str:
    try:
        pixels = decode(split, position, 3, shrink=lambda height, width: max(height, width) / _SIDE)
    except (ValueError, OSError):  # changed since it was predicted
        return "can no longer be read"
    image, file = Image.fromarray(pixels.numpy()), io.BytesIO()
    image.thumbnail((_SIDE, _SIDE))
    image.save(file, "JPEG", quality=80)
    data = base64.b64encode(file.getvalue()).decode()
    return f'<img alt="{alt}" src="data:image/jpeg;base64,{data}">'


def _text(text: str) -> str:
    return printable(text.encode(errors="backslashreplace").decode())
