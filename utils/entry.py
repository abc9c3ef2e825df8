"""The first import of each script.

`utils` sets environment variables that PyTorch reads when it is loaded (utils/__init__.py). The
exit handler that is registered first is called last.
"""

import atexit
import sys
from pathlib import Path

from utils.output import end_quickly, guard_output  # noqa: F401


def _is_own_script() -> bool:
    """Whether this process runs a script of Lockstep, and not a notebook or a test that imports
    one.
    """
    script = getattr(sys.modules["__main__"], "__file__", None)
    root = Path(__file__).resolve().parents[1]
    return script is not None and Path(script).resolve().parent == root


if _is_own_script():
    atexit.register(end_quickly)
