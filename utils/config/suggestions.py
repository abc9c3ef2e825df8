"""The fix for a name that does not exist: the existing names that may be meant."""

import re
from collections.abc import Collection
from difflib import get_close_matches

from utils.errors import alternatives

# Names of settings in timm, torchvision's references and the Hugging Face examples, and our names.
# Only common ones that `suggestion` does not find.
OTHER_NAMES = {
    "data_dir": "data",
    "data_path": "data",
    "dataset": "data",
    "model_name_or_path": "model",
    "learning_rate": "lr",
    "num_train_epochs": "epochs",
    "per_device_train_batch_size": "batch_size",
    "amp": "mixed_precision",
}
_OTHER_PLACES = {"seeds": "use sweep.py --seeds"}


def fix_for_unknown(name: str, names: Collection[str], prefix: str = "") -> str:
    """The fix for a setting that is not one of `names`; `prefix` is written before a name that it
    suggests.
    """
    ours = OTHER_NAMES.get(name.lower().replace("-", "_"))
    if ours in names:
        return f"use {prefix}{ours}"
    if name in _OTHER_PLACES:
        return _OTHER_PLACES[name]
    return suggestion(name, names, "--help lists all", prefix)


def suggestion(name: str, names: Collection[str], otherwise: str, prefix: str = "") -> str:
    """The fix for a name that does not exist: up to four similar valid names, or `otherwise`."""
    known = {each.lower(): each for each in names}
    similar = _similar(re.sub(r"[-\s]", "_", name.lower()), known)
    if not similar:
        return otherwise
    return f"did you mean {alternatives([prefix + known[each] for each in similar[:4]])}?"


def _similar(given: str, known: Collection[str]) -> list[str]:
    """The name itself if it is known; else the names that begin with it, else those that contain
    it, else one that resembles it.
    """
    if given in known:
        return [given]
    if not given:
        return []
    if begin := [each for each in known if each.startswith(given)]:
        return begin
    if len(given) > 2 and (contain := [each for each in known if given in each]):
        return contain
    return get_close_matches(given, known, n=1)
