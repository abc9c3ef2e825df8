"""The Python code of a model card, which uses an exported folder without Lockstep."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from utils.data.decode import EVAL_CROP
from utils.data.spec import InputSpec
from utils.export.loaded import Loaded

_SHOW_BEST = """
for index in probabilities.argsort()[::-1][:5]:
    print(f"{probabilities[index]:.4f}  {labels[index]}")
"""
_SHOW_EACH = """
for label, probability in zip(labels[-OUTPUTS:], probabilities):
    mark = "  (predicted)" if probability > THRESHOLD else ""
    print(f"{probability:.4f}  {label}{mark}")
"""


@dataclass(frozen=True)
class Code:
    """How to use a form: packages to install, imports, lines that load the model, and the body of `predict`.

    `predict` does the same as these lines: from uint8 images [n, H, W, C] to probabilities, float32 [n, outputs].
    """

    install: list[str]
    imports: list[str]
    loading: list[str]
    predicting: list[str]
    predict: Callable[[np.ndarray], np.ndarray]


def card_code(loaded: Loaded, code: Code) -> str:
    """The code that defines `preprocess` and `predict`, and classifies a photograph with them."""
    spec, outputs = loaded.spec, str(loaded.task.outputs)
    imports = ["import numpy as np", "from PIL import Image, ImageOps", *code.imports]
    shown = _SHOW_BEST
    if loaded.task.cut is not None:
        threshold = str(loaded.saved.settings.threshold)
        shown = _SHOW_EACH.replace("OUTPUTS", outputs).replace("THRESHOLD", threshold)
    lines = [
        "import json",
        "",
        *sorted(imports, key=lambda line: (line.startswith("from"), line)),
        "",
        'folder = "."  # with the files of this model',
        'labels = json.load(open(f"{folder}/config.json"))["labels"]',
        *code.loading,
        "",
        "",
        preprocessing(spec),
        "",
        "def predict(images):",
        f'    """Probabilities [n, {outputs}] of uint8 images [n, {spec.height}, {spec.width}, {spec.channels}]."""',
        *(f"    {line}" for line in code.predicting),
        "",
        "",
        'probabilities = predict(preprocess("photo.jpg")[None])[0]',
    ]
    return "\n".join(lines) + shown


def preprocessing(spec: InputSpec) -> str:
    """The source of `preprocess`, which uses Pillow and NumPy. Its pixels are those of evaluation, up to rounding.

    See `center` and `center_of_photograph` of utils/data/decode.py.
    """
    height, width, shorter = spec.height, spec.width, min(spec.height, spec.width)
    resized = shorter if spec.small else spec.resize or shorter / EVAL_CROP
    rows, columns = (f"{side * resized / shorter:.17g}" for side in (height, width))
    round_down = spec.resize is not None and not spec.small
    if spec.squash and round_down:
        steps = [f"width, height = {round(float(columns))}, {round(float(rows))}"]
    else:
        sides = [f"image.{name} * scale" for name in ("width", "height")]
        sides = [f"int({side} + 1e-6)" if round_down else f"round({side})" for side in sides]
        steps = [f"scale = max({columns} / image.width, {rows} / image.height)", f"width, height = {', '.join(sides)}"]
    kind = "BICUBIC" if spec.interpolation == "bicubic" and not spec.small else "BILINEAR"
    body = [
        f'"""An image file as the model\'s input, uint8 [{height}, {width}, {spec.channels}]."""',
        f'image = ImageOps.exif_transpose(Image.open(file)).convert("{"L" if spec.channels == 1 else "RGB"}")',
        *steps,
        f"left, top = round((width - {width}) / 2), round((height - {height}) / 2)",
        f"image = image.resize((width, height), Image.Resampling.{kind})",
        f"box = left, top, left + {width}, top + {height}",
        f"return np.array(image.crop(box)).reshape({height}, {width}, {spec.channels})",
    ]
    return "\n".join(["def preprocess(file):", *(f"    {line}" for line in body), ""])
