"""Upload an exported folder to the Hugging Face Hub."""

import os
import shlex
from pathlib import Path

from utils.errors import UserError, one_line


def push(folder: Path, name: str) -> str:
    """Upload the files of the folder, and create the repository if it does not exist; returns its address."""
    from huggingface_hub import HfApi

    try:
        api = HfApi()
        address = api.create_repo(name, exist_ok=True)
        files = sorted(os.listdir(folder))
        api.upload_folder(repo_id=name, folder_path=folder, allow_patterns=files, commit_message="Upload model")
    except Exception as error:  # of many classes: no token, no network, no permission
        problem = f"--push {name}: the upload failed ({one_line(error)[:200]}); {folder} is complete"
        command = shlex.join(["hf", "upload", name, str(folder)])
        raise UserError(problem, f"once you are online and logged in (`hf auth login`), run `{command}`") from error
    return str(address)
