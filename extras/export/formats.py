"""A checkpoint, ready for export, and the formats of an exported model.

To add a format, write a function that writes its files into a folder and returns the code that
loads them, and add it to `FORMATS` and to ExportConfig.
"""

import math
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from utils.data import InputSpec
from utils.ranks import Ranks
from utils.runs.inference import Inference, load_model
from utils.tasks import Task, make_task


@dataclass(frozen=True)
class Loaded:
    """A verified checkpoint: its model in evaluation mode on the CPU, and the model's input in
    evaluation.
    """

    saved: Inference
    task: Task
    spec: InputSpec
    model: nn.Module

    @property
    def is_average(self) -> bool:
        """Whether the weights are the moving average of --ema_decay."""
        return self.saved.origin.get("weights") == "ema"


def load(saved: Inference, ranks: Ranks) -> Loaded:
    """The model of a verified checkpoint, with its chosen weights.

    Raises ValueError if they do not fit.
    """
    _, task = make_task(saved.config, saved.class_names)
    task.check_predictions()
    model = load_model(saved, task, ranks)
    model.requires_grad_(False).to(memory_format=torch.contiguous_format)
    return Loaded(saved, task, saved.spec.for_evaluation(), model)


class Probabilities(nn.Module):
    """From uint8 images [n, H, W, C] to probabilities, float32 [n, outputs]: normalisation, model,
    activation.
    """

    def __init__(self, loaded: Loaded):
        super().__init__()
        self.model, self.activation = loaded.model, loaded.task.activation
        std = torch.tensor(loaded.spec.std)
        mean = torch.tensor(loaded.spec.mean)
        self.scale = 1 / (255 * std)
        self.shift = -mean / std

    def forward(self, images: Tensor) -> Tensor:
        values = (images.float() * self.scale + self.shift).permute(0, 3, 1, 2)
        logits = self.model(values.contiguous())
        return logits.softmax(1) if self.activation == "softmax" else logits.sigmoid()


@dataclass(frozen=True)
class Code:
    """How to use a format in Python: packages to install, imports, lines that load the model from
    `folder`, and the body of a function `predict`.

    It takes uint8 `images` [n, H, W, C] and returns probabilities, float32 [n, outputs].
    """

    install: str
    imports: str
    loading: str
    predicting: str


def write_timm(loaded: Loaded, folder: Path) -> Code:
    """The weights and the configuration that timm loads from a folder or from the Hub.

    Some models of torchvision, such as ResNets, have the same layers under the same names in timm.
    """
    import timm

    model = loaded.model
    spec = loaded.spec
    arguments = loaded.saved.config.model_args
    name = loaded.saved.config.model
    if not name.startswith("timm/"):
        shape: dict = {"num_classes": loaded.task.outputs, "in_chans": spec.channels}
        model = timm.create_model(name, **shape, **arguments)
        model.load_state_dict(loaded.model.state_dict())
    # The crop_pct with which timm resizes the shorter side to as many pixels as the evaluation.
    exact = spec.resize in (None, math.floor(min(spec.size) / spec.crop))
    shown = {
        "input_size": (spec.channels, *spec.size),
        "mean": spec.mean,
        "std": spec.std,
        "interpolation": spec.interpolation,
        "crop_pct": spec.crop if exact else math.nextafter(spec.crop, 0),
        "crop_mode": "squash" if spec.squash else "center",
        "test_input_size": None,
        "test_crop_pct": None,
    }
    more = {"label_names": loaded.task.class_names, "pretrained_cfg": shown}
    timm.models.save_for_hf(model, str(folder), more, model_args=arguments, safe_serialization=True)
    activation = "softmax(1)" if loaded.task.activation == "softmax" else "sigmoid()"
    return Code(
        install="'timm>=1.0.26'",  # older versions cannot load a folder
        imports="import timm\nimport torch",
        loading='model = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()',
        predicting=f"""mean, std = torch.tensor({spec.mean}), torch.tensor({spec.std})
    values = ((torch.from_numpy(images) / 255 - mean) / std).permute(0, 3, 1, 2)
    with torch.inference_mode():
        return model(values.contiguous()).{activation}.numpy()""",
    )


def write_torch(loaded: Loaded, folder: Path) -> Code:
    """The program of torch.export, `model.pt2`, from uint8 images to probabilities, for any number
    of images.
    """
    torch.export.save(_program(loaded), folder / "model.pt2")
    return Code(
        install=f"'torch>={torch.__version__.partition('+')[0]}'",
        imports="import torch",
        loading='model = torch.export.load(f"{folder}/model.pt2").module()',
        predicting="return model(torch.from_numpy(images)).numpy()",
    )


def write_onnx(loaded: Loaded, folder: Path) -> Code:
    """The program of `write_torch` in the ONNX format, `model.onnx`."""
    names: dict = {"input_names": ["images"], "output_names": ["probabilities"]}
    program = torch.onnx.export(_program(loaded), dynamo=True, verbose=False, **names)
    assert program is not None
    program.save(folder / "model.onnx", external_data=False)
    providers = 'providers=["CPUExecutionProvider"]'
    return Code(
        install="onnxruntime",
        imports="import onnxruntime",
        loading=f'session = onnxruntime.InferenceSession(f"{{folder}}/model.onnx", {providers})',
        predicting='return session.run(None, {"images": images})[0]',
    )


FORMATS = {"torch": write_torch, "onnx": write_onnx, "timm": write_timm}


def _program(loaded: Loaded) -> torch.export.ExportedProgram:
    example = torch.zeros(2, *loaded.spec.size, loaded.spec.channels, dtype=torch.uint8)
    sizes = ({0: torch.export.Dim("n")},)
    return torch.export.export(Probabilities(loaded).eval(), (example,), dynamic_shapes=sizes)
