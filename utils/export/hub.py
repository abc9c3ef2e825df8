"""Upload an exported folder to the Hugging Face Hub."""

import shlex
from pathlib import Path

from utils.errors import UserError, one_line


def check_name(name: str) -> None:
    """Raise ValueError unless the Hub accepts the name."""
    from huggingface_hub.utils import validate_repo_id

    if "/" not in name:
        raise UserError(f"--push {name}: has no owner", "write USER/NAME")
    try:
        validate_repo_id(name)
    except ValueError as error:
        raise UserError(f"--push {name}: {one_line(error)[:200]}", "write USER/NAME") from error


def push(folder: Path, name: str) -> str:
    """Upload the files of the folder, and create the repository if it does not exist; returns its address."""
    from huggingface_hub import HfApi

    try:
        api = HfApi()
        address = api.create_repo(name, exist_ok=True)
        api.upload_folder(repo_id=name, folder_path=folder, commit_message="Upload model")
    except Exception as error:  # of many classes: no token, no network, no permission
        problem = f"--push {name}: the upload failed ({one_line(error)[:200]}); {folder} is complete"
        command = shlex.join(["hf", "upload", name, str(folder)])
        raise UserError(problem, f"once you are online and logged in (`hf auth login`), run `{command}`") from error
    return str(address)
