"""The forms of an exported model. Each function writes the files of a form and returns the code
that loads them.

To add a form, write such a function and add it to `FORMS` and to ExportConfig.
"""

import importlib.util
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from utils.data.spec import InputSpec
from utils.errors import UserError
from utils.export.loaded import Loaded, Probabilities, probabilities

NEEDED = {"timm": ["timm"], "onnx": ["onnx", "onnxscript", "onnxruntime"]}
"""The packages that a form needs besides those of training."""


@dataclass(frozen=True)
class Code:
    """How to use a form in Python: packages to install, imports, lines that load the model, and the
    body of `predict`.

    `predict` does the same as these lines: from uint8 images [n, H, W, C] to probabilities, float32
    [n, outputs].
    """

    install: str
    imports: str
    loading: str
    predicting: str
    predict: Callable[[np.ndarray], np.ndarray]


def check_packages(form: str) -> None:
    """Raise ValueError if a package that the form needs is missing."""
    for name in NEEDED.get(form, []):
        if importlib.util.find_spec(name) is None:
            fix = f"pip install -c constraints.txt {' '.join(NEEDED[form])}"
            raise UserError(f"--to {form}: {name} is not installed", fix)


def write_timm(loaded: Loaded, folder: Path) -> Code:
    """The weights and the configuration that timm loads from a folder or from the Hub."""
    import timm

    model, spec = loaded.model, loaded.spec
    arguments: dict[str, Any] = loaded.saved.config.model_args
    if loaded.library != "timm":
        shape: dict[str, Any] = {"num_classes": loaded.task.outputs, "in_chans": spec.channels}
        try:  # for example ResNets, whose layers have the same names in both libraries
            model = timm.create_model(loaded.name, **shape, **arguments)
            model.load_state_dict(loaded.model.state_dict())
        except Exception as error:  # of any class, by the model's arguments
            problem = f"--to timm: {loaded.name} does not have the layers of a timm model"
            raise UserError(
                problem, "use --to torch or onnx, or train a timm model with --stem standard"
            ) from error
    shown = {
        "input_size": (spec.channels, spec.height, spec.width),
        "mean": spec.mean,
        "std": spec.std,
        "interpolation": "bilinear" if spec.small else spec.interpolation,
        "crop_pct": _crop_share(spec),
        "crop_mode": "squash" if spec.squash else "center",
        "test_input_size": None,
        "test_crop_pct": None,
    }
    more = {"label_names": loaded.task.class_names, "pretrained_cfg": shown}
    timm.models.save_for_hf(model, str(folder), more, model_args=arguments, safe_serialization=True)
    activation = "softmax(1)" if loaded.task.activation == "softmax" else "sigmoid()"
    written = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    return Code(
        install="'timm>=1.0.26'",  # older versions cannot load a folder
        imports="import timm\nimport torch",
        loading='model = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()',
        predicting=f"""mean, std = torch.tensor({spec.mean}), torch.tensor({spec.std})
    values = ((torch.from_numpy(images) / 255 - mean) / std).permute(0, 3, 1, 2)
    with torch.inference_mode():
        return model(values.contiguous()).{activation}.numpy()""",
        predict=partial(probabilities, replace(loaded, model=written)),
    )


def write_torch(loaded: Loaded, folder: Path) -> Code:
    """The program of torch.export, `model.pt2`, from uint8 images to probabilities, for any number
    of images.
    """
    torch.export.save(_program(loaded), folder / "model.pt2")
    model = torch.export.load(folder / "model.pt2").module()
    return Code(
        install=f"'torch>={torch.__version__.partition('+')[0]}'",
        imports="import torch",
        loading='model = torch.export.load(f"{folder}/model.pt2").module()',
        predicting="return model(torch.from_numpy(images)).numpy()",
        predict=lambda images: model(torch.from_numpy(images)).numpy(),
    )


def write_onnx(loaded: Loaded, folder: Path) -> Code:
    """The program of `write_torch` in the ONNX format, `model.onnx`."""
    import onnxruntime

    names: dict[str, Any] = {"input_names": ["images"], "output_names": ["probabilities"]}
    program = torch.onnx.export(_program(loaded), dynamo=True, verbose=False, **names)
    assert program is not None
    program.save(folder / "model.onnx", external_data=False)
    session = onnxruntime.InferenceSession(
        folder / "model.onnx", providers=["CPUExecutionProvider"]
    )
    return Code(
        install="onnxruntime",
        imports="import onnxruntime",
        loading='session = onnxruntime.InferenceSession(f"{folder}/model.onnx", providers=["CPUExecutionProvider"])',
        predicting='return session.run(None, {"images": images})[0]',
        predict=lambda images: session.run(None, {"images": images})[0],
    )


FORMS: dict[str, Callable[[Loaded, Path], Code]] = {
    "torch": write_torch,
    "onnx": write_onnx,
    "timm": write_timm,
}


def _program(loaded: Loaded) -> torch.export.ExportedProgram:
    spec = loaded.spec
    example = torch.zeros(2, spec.height, spec.width, spec.channels, dtype=torch.uint8)
    sizes = ({0: torch.export.Dim("n")},)
    return torch.export.export(Probabilities(loaded).eval(), (example,), dynamic_shapes=sizes)


def _crop_share(spec: InputSpec) -> float:
    """The crop_pct with which timm resizes the shorter side to the same number of pixels as the
    evaluation.
    """
    exact = math.floor(min(spec.size) / spec.crop)
    return spec.crop if spec.resize in (None, exact) else math.nextafter(spec.crop, 0)
