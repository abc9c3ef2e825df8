"""Export a checkpoint as a folder that loads without Lockstep: weights, config.json and a model
card.

    python export.py --ckpt runs/NAME --to onnx --out models/NAME

The exported model is loaded and compared with the checkpoint before the folder appears.
`python export.py --help` lists the settings.
"""

from utils.entry import guard_output  # the first import, see there

import json
import logging
import warnings
from collections.abc import Sequence
from pathlib import Path

from extras.export.card import card, compare, config_of
from extras.export.formats import FORMATS, Loaded, load
from utils.config import parse_args
from utils.console import table
from utils.errors import UserError, one_line
from utils.files import expand, new_folder, size_of
from utils.memory import bytes_text
from utils.ranks import distributed_session
from utils.runs.inference import open_inference
from utils.settings.scripts import ExportConfig


def main(argv: Sequence[str] | None = None) -> dict:
    """Export with these arguments, and return what was measured."""
    guard_output()
    logging.disable(logging.WARNING)  # of the exporters
    warnings.simplefilter("ignore")
    flags = parse_args(ExportConfig, "export.py", argv)
    with distributed_session("export.py", flags) as ranks:
        if ranks.topology.world_size > 1:
            raise UserError("export.py runs in one process", "start it with plain python")
        out = expand(flags.out)
        if out.exists() or out.is_symlink():
            raise UserError(f"--out {out}: exists", "give another path, or delete it")
        loaded = load(open_inference(flags, ranks), ranks)
        difference = write(loaded, flags.to, out)
        print(report(loaded, flags.to, out, difference))
    return {"difference": difference}


def write(loaded: Loaded, name: str, out: Path) -> float:
    """Write the folder `out` in the format `name` if the exported model equals the checkpoint;
    returns the result of `compare`.
    """
    with new_folder(out) as folder:
        try:
            code = FORMATS[name](loaded, folder)
            path = folder / "config.json"
            config = config_of(loaded)
            # timm has written its own
            config |= json.loads(path.read_text()) if path.exists() else {}
            path.write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
            difference = compare(loaded, code, folder)
        except OSError:
            raise
        except Exception as error:  # exporters and runtimes raise errors of many classes
            fix = "use another --to, or check that the disk has free space"
            if isinstance(error, ImportError):
                fix = "pip install -c constraints.txt timm onnx onnxscript onnxruntime"
            problem = f"{loaded.saved.config.model} cannot be exported ({one_line(error)[:160]})"
            raise UserError(f"--to {name}: {problem}", fix) from error
        (folder / "README.md").write_text(card(loaded, code, difference), encoding="utf-8")
    return difference


def report(loaded: Loaded, name: str, out: Path, difference: float) -> str:
    """The result as a table."""
    model = loaded.saved.config.model
    classes = len(loaded.task.class_names)
    rows = [
        ("checkpoint", loaded.saved.path),
        ("model", f"{model}, {loaded.spec.describe()}, {classes} classes"),
        ("weights", "average (ema)" if loaded.is_average else "raw"),
        ("difference", f"{difference:.1e} in probability on the same pixels"),
        ("folder", f"{out}, {bytes_text(size_of(out))}"),
    ]
    return table(f"Exported to {name}", rows)


if __name__ == "__main__":
    main()
