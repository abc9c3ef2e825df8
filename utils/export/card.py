"""config.json and the model card of an exported folder, with Python code that uses it without
Lockstep.
"""

from typing import Any

from utils.console import join_names, printable
from utils.data.spec import InputSpec
from utils.export.forms import Code
from utils.export.loaded import Loaded
from utils.files import expand
from utils.tasks.task import score_rows
from utils.version import VERSION


def config_of(loaded: Loaded) -> dict[str, Any]:
    """The contents of config.json: architecture, classes and preprocessing."""
    settings, names = (
        loaded.saved.settings,
        ("height", "width", "channels", "resize", "squash", "interpolation"),
    )
    shape = {name: getattr(loaded.spec, name) for name in (*names, "mean", "std")}
    if loaded.spec.small:
        shape |= {"resize": None, "interpolation": "bilinear"}
    return {
        "architecture": loaded.name,
        "library": loaded.library,
        "model_args": settings.model_args,
        "num_classes": loaded.task.outputs,
        "labels": loaded.saved.class_names,
        "task": settings.task,
        "activation": loaded.task.activation,
        "threshold": None if loaded.task.cut is None else settings.threshold,
        "input": shape,
        "weights": "ema" if loaded.is_average else "raw",
        "lockstep": VERSION,
    }


def card(loaded: Loaded, code: Code, difference: float) -> str:
    """README.md: what the model is, its measured numbers, and the code that uses it.

    `difference` is the result of `compare`.
    """
    saved, title = loaded.saved, f"{loaded.name} trained on {data_name(loaded)}"
    weights = "the moving average of its weights" if loaded.is_average else "the model"
    return f"""---
pipeline_tag: image-classification
tags:
- image-classification
- lockstep
---

# {title}

An image classifier, trained with Lockstep and exported by its version {VERSION}. This is {weights}
after update {saved.state.step}, in epoch {saved.state.epochs_begun}.

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
{_python(loaded, code)}```

On the same pixels (random ones), the probabilities are those of the checkpoint in float32;
the largest difference found was {difference:.1e}.

## Licence

The author has not stated a licence. To state one, add a line such as `license: mit` to the first lines of this file.
"""


def _python(loaded: Loaded, code: Code) -> str:
    """The code that defines `preprocess` and `predict`, and classifies a photograph with them."""
    spec, outputs = loaded.spec, loaded.task.outputs
    shown = """for index in probabilities.argsort()[::-1][:5]:
    print(f"{probabilities[index]:.4f}  {labels[index]}")
"""
    if loaded.task.cut is not None:
        shown = f"""for label, probability in zip(labels[-{outputs}:], probabilities):
    mark = "  (predicted)" if probability > {loaded.saved.settings.threshold} else ""
    print(f"{{probability:.4f}}  {{label}}{{mark}}")
"""
    return f'''import json

import numpy as np
{code.imports}
from PIL import Image, ImageOps

folder = "."  # with the files of this model
labels = json.load(open(f"{{folder}}/config.json"))["labels"]
{code.loading}


{preprocessing(spec)}

def predict(images):
    """Probabilities [n, {outputs}] of uint8 images [n, {spec.height}, {spec.width}, {spec.channels}]."""
    {code.predicting}


probabilities = predict(preprocess("photo.jpg")[None])[0]
{shown}'''


def preprocessing(spec: InputSpec) -> str:
    """The source of `preprocess`, which uses Pillow and NumPy. Its pixels are those of evaluation,
    up to rounding.

    See `center` of utils/data/decode.py.
    """
    height, width, shorter = spec.height, spec.width, min(spec.height, spec.width)
    resized = spec.resize or shorter / spec.crop
    rows, columns = (f"{side * resized / shorter:.17g}" for side in (height, width))
    round_down = spec.resize is not None and not spec.small
    if spec.squash and round_down:
        sides = f"width, height = {round(float(columns))}, {round(float(rows))}"
    else:
        rounded = "int(image.{} * scale + 1e-6)" if round_down else "round(image.{} * scale)"
        sides = f"""scale = max({columns} / image.width, {rows} / image.height)
    width, height = {rounded.format("width")}, {rounded.format("height")}"""
    kind = "BICUBIC" if spec.interpolation == "bicubic" and not spec.small else "BILINEAR"
    return f'''def preprocess(file):
    """An image file as the model's input, uint8 [{height}, {width}, {spec.channels}]."""
    image = ImageOps.exif_transpose(Image.open(file)).convert("{"L" if spec.channels == 1 else "RGB"}")
    {sides}
    left, top = round((width - {width}) / 2), round((height - {height}) / 2)
    image = image.resize((width, height), Image.Resampling.{kind})
    box = left, top, left + {width}, top + {height}
    return np.array(image.crop(box)).reshape({height}, {width}, {spec.channels})
'''


def data_name(loaded: Loaded) -> str:
    """The name of the data set, without the folders that contain it."""
    data = loaded.saved.settings.data
    return printable(expand(data).name if data.startswith(("/", "~", ".", "$")) else data)


def _facts(loaded: Loaded) -> list[tuple[str, Any]]:
    task, names = loaded.task, loaded.saved.class_names
    change = getattr(loaded.model, "stem_change", "").partition(" (")[0]
    output = f"the probability of {'each' if task.outputs == len(names) else 'the second'} class ({task.activation})"
    if task.cut is not None:
        output += f"; predicted above {loaded.saved.settings.threshold}"
    return [
        (
            "Architecture",
            f"{loaded.name} of {loaded.library}{f', with a {change}' if change else ''}",
        ),
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
    saved, precision = loaded.saved, loaded.saved.settings.mixed_precision
    found: dict[str, Any] = {}
    if saved.weights is None or loaded.is_average or not saved.weights.is_choice:
        found = next(
            (
                each
                for each in reversed(saved.state.evaluations)
                if each["step"] == saved.state.step
            ),
            {},
        )
    if not found:
        return "The checkpoint has no evaluation of these weights."
    split = printable(
        saved.record.evaluation.name
        if saved.record
        else saved.settings.eval_split or "evaluation split"
    )
    where = f"`{data_name(loaded)}`, split `{split}`, {found['count']} images, each counted once"
    where += f", in {precision}" if precision in ("bf16", "fp16") else ""
    return f"On {where}:\n\n| | |\n| --- | --- |\n{_rows(score_rows(found))}"
