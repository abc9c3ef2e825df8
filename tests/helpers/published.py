"""Weights as torchvision and timm publish them, in caches of the test's own."""

import os
from pathlib import Path

import huggingface_hub.constants
import pytest
import timm
import torch
import torchvision
from safetensors.torch import save_file

COMMIT = "0123456789" * 4
HUB = Path("torch/hub/checkpoints")  # where torchvision's files are


def use_own_caches(patch: pytest.MonkeyPatch) -> None:
    """Look for published weights in folders of the working directory, without a network."""
    patch.setenv("TORCH_HOME", os.path.abspath("torch"))
    patch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", os.path.abspath("hub"))
    for name in ("http_proxy", "https_proxy"):
        patch.setenv(name, "http://127.0.0.1:9")
    HUB.mkdir(parents=True)


def cache_repository(repository: str, model: torch.nn.Module) -> Path:
    """Put the weights into the Hub's cache, as commit COMMIT of OWNER/NAME; returns the folder."""
    folder = Path("hub", f"models--{repository.replace('/', '--')}")
    snapshot = folder / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs/main").write_text(COMMIT)
    save_file(model.state_dict(), snapshot / "model.safetensors")
    return snapshot


def publish(name: str) -> torch.nn.Module:
    """Publish random weights of a model; returns it with them, in evaluation mode."""
    torch.manual_seed(1)
    if name.startswith("timm/"):
        model = timm.create_model(name[5:])
        cache_repository(timm.get_pretrained_cfg(name[5:]).hf_hub_id, model)
    else:
        model = torchvision.models.get_model(name)
        url = torchvision.models.get_model_weights(name).DEFAULT.url
        torch.save(model.state_dict(), HUB / url.rsplit("/", 1)[1])
    return model.eval()
