"""config.json and the model card of an exported folder, with Python code that uses it without
Lockstep.
"""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from extras.export.formats import Code, Loaded, Probabilities
from utils.console import join_names, printable
from utils.data import InputSpec
from utils.tasks import score_rows
from utils.version import VERSION

TOLERANCE = 1e-5  # in probability


def config_of(loaded: Loaded) -> dict:
    """The contents of config.json: architecture, classes and preprocessing."""
    config = loaded.saved.config
    task = loaded.task
    shape = asdict(loaded.spec)
    del shape["evaluation"]  # it is this one
    return {
        "architecture": config.model,
        "model_args": config.model_args,
        "num_classes": task.outputs,
        "labels": task.class_names,
        "task": config.task,
        "activation": task.activation,
        "threshold": None if task.cut is None else config.threshold,
        "input": shape,
        "weights": "ema" if loaded.is_average else "raw",
        "lockstep": VERSION,
    }


def compare(loaded: Loaded, code: Code, folder: Path) -> float:
    """The largest difference in a probability between the checkpoint and the code of the card, run
    in `folder`.

    They are compared on random pixels, in batches of 1, 2 and 7 images. Raises ValueError if they
    differ by over 1e-5. From the checkpoint, the code contains only numbers and one of two
    words, which were checked when it was read.
    """
    names: dict = {}
    exec(definitions(loaded, code, repr(str(folder))), names)
    spec = loaded.spec
    random = np.random.default_rng(0)
    worst = 0.0
    for count in (1, 2, 7):
        images = random.integers(0, 256, (count, *spec.size, spec.channels), np.uint8)
        with torch.inference_mode():
            expected = Probabilities(loaded)(torch.from_numpy(images)).numpy()
        found = names["predict"](images)
        difference = float(np.abs(found - expected).max()) if found.shape == expected.shape else 1.0
        if not difference <= TOLERANCE:  # NaN is not
            problem = f"its probabilities differ by {difference:.2g} from the checkpoint's"
            raise ValueError(f"{problem}; check that the weights are finite")
        worst = max(worst, difference)
    return worst


def card(loaded: Loaded, code: Code, difference: float) -> str:
    """README.md: what the model is, its measured numbers, and the code that uses it.

    `difference` is the result of `compare`.
    """
    saved = loaded.saved
    title = f"{loaded.saved.config.model} trained on {data_name(loaded)}"
    weights = "the moving average of its weights" if loaded.is_average else "the model"
    return f"""---
pipeline_tag: image-classification
tags:
- image-classification
- lockstep
---

# {title}

An image classifier, trained with Lockstep and exported by its version {VERSION}. This is {weights}
after update {saved.origin["step"]}, in epoch {saved.origin["epoch"]}.

| | |
| --- | --- |
{_rows(_facts(loaded))}

## Measured

{_measured(loaded)}

## Use

```bash
pip install {code.install} numpy pillow
```

```python
{definitions(loaded, code)}

probabilities = predict(preprocess("photo.jpg")[None])[0]
{_printing(loaded)}```

On the same pixels (random ones), the probabilities are those of the checkpoint in float32;
the largest difference found was {difference:.1e}.

## Licence

The author has not stated a licence. To state one, add a line such as `license: mit` to the first
lines of this file.
"""


def definitions(loaded: Loaded, code: Code, folder: str = '"."') -> str:
    """The source of `preprocess` and `predict` for the files in `folder`, a literal of Python."""
    spec = loaded.spec
    outputs = loaded.task.outputs
    shape = f"{spec.height}, {spec.width}, {spec.channels}"
    return f'''import json

import numpy as np
{code.imports}
from PIL import Image, ImageOps

folder = {folder}  # with the files of this model
labels = json.load(open(f"{{folder}}/config.json"))["labels"]
{code.loading}


{preprocessing(spec)}

def predict(images):
    """Probabilities [n, {outputs}] of uint8 images [n, {shape}]."""
    {code.predicting}
'''


def _printing(loaded: Loaded) -> str:
    """The lines that print `probabilities`."""
    if loaded.task.cut is None:
        return """for index in probabilities.argsort()[::-1][:5]:
    print(f"{probabilities[index]:.4f}  {labels[index]}")
"""
    return f"""for label, probability in zip(labels[-{loaded.task.outputs}:], probabilities):
    mark = "  (predicted)" if probability > {loaded.saved.config.threshold} else ""
    print(f"{{probability:.4f}}  {{label}}{{mark}}")
"""


def preprocessing(spec: InputSpec) -> str:
    """The source of `preprocess`, which uses Pillow and NumPy. Its pixels are those of evaluation,
    up to rounding.

    See `center` of utils/data/decode.py.
    """
    height = spec.height
    width = spec.width
    shorter = min(spec.height, spec.width)
    resized = spec.resize or shorter / spec.crop
    mode = "L" if spec.channels == 1 else "RGB"
    rows, columns = (f"{side * resized / shorter:.17g}" for side in (height, width))
    if spec.squash and spec.resize:
        sides = f"width, height = {round(float(columns))}, {round(float(rows))}"
    else:
        rounded = "int(image.{} * scale + 1e-6)" if spec.resize else "round(image.{} * scale)"
        sides = f"""scale = max({columns} / image.width, {rows} / image.height)
    width, height = {rounded.format("width")}, {rounded.format("height")}"""
    return f'''def preprocess(file):
    """An image file as the model's input, uint8 [{height}, {width}, {spec.channels}]."""
    image = ImageOps.exif_transpose(Image.open(file)).convert("RGBA")
    white = Image.new("RGB", image.size, "white")
    white.paste(image, mask=image)  # where it is transparent
    image = white.convert("{mode}")
    {sides}
    left, top = round((width - {width}) / 2), round((height - {height}) / 2)
    image = image.resize((width, height), Image.Resampling.{spec.interpolation.upper()})
    box = left, top, left + {width}, top + {height}
    return np.array(image.crop(box)).reshape({height}, {width}, {spec.channels})
'''


def data_name(loaded: Loaded) -> str:
    """The name of the data set, without the folders that contain it."""
    path = Path(loaded.saved.config.data)
    return printable(path.name if path.is_absolute() else f"{path}")


def _facts(loaded: Loaded) -> list[tuple[str, Any]]:
    task = loaded.task
    names = loaded.task.class_names
    change = getattr(loaded.model, "stem_change", "").partition(" (")[0]
    which = "each" if task.outputs == len(names) else "the second"
    output = f"the probability of {which} class ({task.activation})"
    if task.cut is not None:
        output += f"; predicted above {loaded.saved.config.threshold}"
    stem = f", with a {change}" if change else ""
    return [
        ("Architecture", f"{loaded.saved.config.model}{stem}"),
        ("Input", f"{loaded.spec.describe()}, {loaded.spec.describe_pixels()}"),
        ("Output", output),
        ("Classes", f"{len(names)}: {join_names(names)}"),
    ]


def _rows(rows: list[tuple[str, Any]]) -> str:
    """Rows of a table; values may have characters that mean something in Markdown and HTML."""
    marks = str.maketrans(
        {"\\": "\\\\", "|": "\\|", "<": "&lt;", "&": "&amp;", "`": "\\`", "*": "\\*", "[": "\\["}
    )
    return "\n".join(f"| {name} | {str(value).translate(marks)} |" for name, value in rows)


def _measured(loaded: Loaded) -> str:
    """The last evaluation of these weights.

    With --ema_decay, state.json has only those of the average.
    """
    saved = loaded.saved
    precision = loaded.saved.config.mixed_precision
    if not saved.evaluation:
        return "The checkpoint has no evaluation of these weights."
    found = saved.evaluation
    where = f"`{data_name(loaded)}`, "
    if split := printable(saved.evaluated_on):
        where += f"split `{split}`, "
    where += f"{found['count']} images, each counted once"
    if precision in ("bf16", "fp16"):
        where += f", in {precision}"
    return f"On {where}:\n\n| | |\n| --- | --- |\n{_rows(score_rows(found))}"
