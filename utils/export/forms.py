"""The forms of an exported model. Each function writes the files of a form and returns the code that loads them.

To add a form, write such a function and add it to `FORMS` and to ExportConfig.
"""

import importlib.util
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torchvision
from safetensors.torch import load_file, save_file

from utils.data.spec import InputSpec
from utils.errors import UserError
from utils.export.code import Code
from utils.export.loaded import Loaded, Probabilities, probabilities

_STEM = "or train a model of that library with --stem standard"
NEEDED = {"timm": ["timm"], "onnx": ["onnx", "onnxscript", "onnxruntime"]}
"""The packages that a form needs besides those of training."""


def check_packages(form: str) -> None:
    """Raise ValueError if a package that the form needs is missing."""
    for name in NEEDED.get(form, []):
        if importlib.util.find_spec(name) is None:
            raise UserError(f"--to {form}: {name} is not installed", f"pip install {' '.join(NEEDED[form])}")


def write_safetensors(loaded: Loaded, folder: Path) -> Code:
    """The weights for torchvision's own class, `model.safetensors`."""
    change: str = getattr(loaded.model, "stem_change", "")
    if loaded.library != "torchvision" or change:
        problem = f"--to safetensors: {loaded.name} does not have the layers of a torchvision model"
        raise UserError(problem, f"use --to {'timm, ' * (loaded.library == 'timm')}torch or onnx, {_STEM}")
    tensors = {name: tensor.contiguous() for name, tensor in loaded.model.state_dict().items()}
    save_file(tensors, folder / "model.safetensors")
    arguments = {"num_classes": loaded.task.outputs} | _of_torchvision(loaded)
    arguments |= {name: value for name, value in loaded.saved.settings.model_args.items() if name.isidentifier()}
    model = torchvision.models.get_model(loaded.name, **arguments)
    model.load_state_dict(load_file(folder / "model.safetensors"))
    texts = ", ".join(f"{name}={value!r}" for name, value in arguments.items())
    return Code(
        install=["torch", "torchvision", "safetensors", "numpy", "pillow"],
        imports=["import torch", "import torchvision", "from safetensors.torch import load_file"],
        loading=[
            f"model = torchvision.models.get_model({loaded.name!r}, {texts})",
            'model.load_state_dict(load_file(f"{folder}/model.safetensors"))',
            "model.eval()",
        ],
        predicting=_in_pytorch(loaded),
        predict=partial(probabilities, replace(loaded, model=model.eval())),
    )


def write_timm(loaded: Loaded, folder: Path) -> Code:
    """The weights and the configuration that timm loads from a folder or from the Hub."""
    import timm

    model, spec = loaded.model, loaded.spec
    arguments: dict[str, Any] = loaded.saved.settings.model_args
    if loaded.library != "timm":
        shape: dict[str, Any] = {"num_classes": loaded.task.outputs, "in_chans": spec.channels}
        try:  # for example ResNets, whose layers have the same names in both libraries
            model = timm.create_model(loaded.name, **shape, **arguments)
            model.load_state_dict(loaded.model.state_dict())
        except Exception as error:  # of any class, by the model's arguments
            problem = f"--to timm: {loaded.name} does not have the layers of a timm model"
            fix = f"use --to torch or onnx, {_STEM}"
            raise UserError(problem, fix) from error
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
    more = {"label_names": loaded.saved.class_names, "pretrained_cfg": shown}
    timm.models.save_for_hf(model, str(folder), more, model_args=arguments, safe_serialization=True)
    written = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    return Code(
        install=["timm", "numpy", "pillow"],
        imports=["import torch", "import timm"],
        loading=['model = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()'],
        predicting=_in_pytorch(loaded),
        predict=partial(probabilities, replace(loaded, model=written)),
    )


def write_torch(loaded: Loaded, folder: Path) -> Code:
    """The program of torch.export, `model.pt2`, from uint8 images to probabilities, for any number of images."""
    torch.export.save(_program(loaded), folder / "model.pt2")
    model = torch.export.load(folder / "model.pt2").module()
    return Code(
        install=[f"'torch>={torch.__version__.partition('+')[0]}'", "numpy", "pillow"],
        imports=["import torch"],
        loading=['model = torch.export.load(f"{folder}/model.pt2").module()'],
        predicting=["return model(torch.from_numpy(images)).numpy()"],
        predict=lambda images: model(torch.from_numpy(images)).numpy(),
    )


def write_onnx(loaded: Loaded, folder: Path) -> Code:
    """The program of `write_torch` in the ONNX format, `model.onnx`."""
    import onnxruntime

    names: dict[str, Any] = {"input_names": ["images"], "output_names": ["probabilities"]}
    program = torch.onnx.export(_program(loaded), dynamo=True, verbose=False, **names)
    assert program is not None
    program.save(folder / "model.onnx", external_data=False)
    session = onnxruntime.InferenceSession(folder / "model.onnx", providers=["CPUExecutionProvider"])
    return Code(
        install=["onnxruntime", "numpy", "pillow"],
        imports=["import onnxruntime"],
        loading=['session = onnxruntime.InferenceSession(f"{folder}/model.onnx", providers=["CPUExecutionProvider"])'],
        predicting=['return session.run(None, {"images": images})[0]'],
        predict=lambda images: session.run(None, {"images": images})[0],
    )


FORMS: dict[str, Callable[[Loaded, Path], Code]] = {
    "safetensors": write_safetensors,
    "torch": write_torch,
    "onnx": write_onnx,
    "timm": write_timm,
}


def _program(loaded: Loaded) -> torch.export.ExportedProgram:
    spec = loaded.spec
    example = torch.zeros(2, spec.height, spec.width, spec.channels, dtype=torch.uint8)
    sizes = ({0: torch.export.Dim("n")},)
    return torch.export.export(Probabilities(loaded).eval(), (example,), dynamic_shapes=sizes)


def _in_pytorch(loaded: Loaded) -> list[str]:
    """The body of `predict` for a module that takes normalised images."""
    activation = "softmax(1)" if loaded.task.activation == "softmax" else "sigmoid()"
    return [
        f"mean, std = torch.tensor({loaded.spec.mean}), torch.tensor({loaded.spec.std})",
        "values = ((torch.from_numpy(images) / 255 - mean) / std).permute(0, 3, 1, 2)",
        "with torch.inference_mode():",
        f"    return model(values.contiguous()).{activation}.numpy()",
    ]


def _of_torchvision(loaded: Loaded) -> dict[str, Any]:
    """The arguments that `build_model` gives besides --model_args."""
    return {"image_size": loaded.saved.spec.height} if loaded.name.startswith("vit_") else {}


def _crop_share(spec: InputSpec) -> float:
    """The crop_pct with which timm resizes the shorter side to the same number of pixels as the evaluation."""
    if spec.small:
        return 1.0
    if spec.resize is None:
        return 0.875
    side = min(spec.height, spec.width)
    share = side / spec.resize
    return share if math.floor(side / share) == spec.resize else math.nextafter(share, 0)
