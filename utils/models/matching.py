"""Weights from elsewhere: tensors are matched by name and shape, the rows of the head by class
name.
"""

import sys
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from utils.config import require
from utils.console import join_names, nfc
from utils.models.layers import find_heads, head_prefixes, shape_of

_WRAPPERS = ("module.", "_orig_mod.", "backbone.", "encoder.")
"""The prefixes that DDP, torch.compile and other trainers add to names, one or several."""


@dataclass
class Match:
    """The names of the model's tensors that were copied, and of those that were not, with the
    reason.
    """

    kept: list[str]
    new: dict[str, str]
    unused: list[str]  # tensors that the model does not have
    # classes whose rows of the head were copied, and all classes
    rows: tuple[int, int] | None
    known: Sequence[int] = ()  # the rows that were copied

    def line(self) -> str:
        """The numbers, and the names of new and unused tensors, on one line."""
        rows = f" ({self.rows[0]} of {self.rows[1]} classes kept)" if self.rows else ""
        new = f", new: {join_names(self.new, 6)}" if self.new else ""
        unused = f", not used: {join_names(self.unused, 6)}" if self.unused else ""
        return f"{len(self.kept)} tensors kept{new}{rows}{unused}"

    def text(self) -> str:
        """One line for each tensor."""
        lines = [f"kept {name}" for name in self.kept]
        lines += [f"new {name}: {reason}" for name, reason in self.new.items()]
        lines += [f"not used: {name}" for name in self.unused]
        return "\n".join(lines) + "\n"


def fit_names(
    tensors: Mapping[str, Tensor], model: nn.Module, where: str, name: str, order: bool = False
) -> tuple[Mapping[str, Tensor], list[str]]:
    """The `tensors` that were read from `where`, renamed to the names of the model, which the user
    calls `name`.

    A prefix of `_WRAPPERS` is removed, and timm converts the names of the authors' own code. With
    `order`, the tensors get the model's names one after the other; the head may have another number
    of rows. Also returns the names of tensors without the prefix, which are left out. Raises
    UserError if `order` is set and the shapes differ.
    """
    own = model.state_dict()
    prefix = _prefix_of(tensors, own)
    left_out = [each for each in tensors if not each.startswith(prefix)]
    fitting = {
        each.removeprefix(prefix): tensors[each] for each in tensors if each.startswith(prefix)
    }
    fitting = _with_timm(fitting, model)
    if order:
        heads = head_prefixes(model)
        problem = f"{where}: its tensors do not have the shapes of {name} in the same order"
        fix = "leave out --init_match order, or use another --model"
        require(len(own) == len(fitting), problem, fix)
        renamed = dict(zip(own, fitting.values(), strict=True))
        for key, tensor in own.items():
            first = 1 if key.startswith(heads) else 0  # the rows of the head may differ
            require(renamed[key].shape[first:] == tensor.shape[first:], problem, fix)
        fitting = renamed
    return fitting, left_out


def _prefix_of(tensors: Collection[str], own: Collection[str]) -> str:
    """The prefix, such as `module._orig_mod.`, with which the tensors have the most of the model's
    `own` names.

    Empty if these are less than half of them: the tensors may be those of other code.
    """
    prefixes = [""]
    for name in tensors:
        prefix = ""
        while name.startswith(_WRAPPERS):
            wrapper, _, name = name.partition(".")
            prefix += f"{wrapper}."
            if prefix not in prefixes:
                prefixes.append(prefix)
    fitting = {prefix: sum(prefix + name in tensors for name in own) for prefix in prefixes}
    best = max(prefixes, key=fitting.__getitem__)
    return best if 2 * fitting[best] >= min(len(own), len(tensors)) else ""


def _with_timm(tensors: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """The tensors, converted by timm from the authors' own code if timm can do this and the model
    needs more names.
    """
    convert = getattr(sys.modules[type(model).__module__], "checkpoint_filter_fn", None)
    if convert and not model.state_dict().keys() <= tensors.keys():
        with suppress(Exception):  # of any class, if it does not expect these tensors
            return convert(tensors, model)
    return tensors


def count_outputs(tensors: Mapping[str, Tensor], model: nn.Module) -> int:
    """The rows of the head among these tensors, which have the names of the model; 0 if there is
    none.
    """
    heads = [tensors[f"{name}.weight"] for name in find_heads(model) if f"{name}.weight" in tensors]
    return len(heads[0]) if heads else 0


@torch.no_grad()
def zero_heads(model: nn.Module) -> None:
    """Set the layers that compute the logits to zero, for a new head on pretrained weights.

    All classes then have the same probability. With a random head, the first gradients would make
    the pretrained weights worse: for two classes, the head of timm's EfficientNets has random
    weights from -0.7 to 0.7.
    """
    for name in find_heads(model):
        for parameter in model.get_submodule(name).parameters():
            parameter.zero_()


@torch.no_grad()
def copy_matching(
    model: nn.Module, tensors: Mapping[str, Tensor], there: Sequence[str], here: Sequence[str]
) -> Match:
    """Copy the tensors that the model has under the same name and in the same shape.

    `there` has the class names of `tensors`, or nothing if they are unknown, and `here` those of
    the model. If both are known, the rows of the head are copied by class name; names that occur
    twice are left out.
    """
    state = model.state_dict()
    by_class = head_prefixes(model) if there and list(there) != list(here) else ()
    row_of = _rows_of_both(there, here)
    new = {}
    copied = None
    known: list[int] = []
    for name, own in state.items():
        theirs = tensors.get(name)
        if theirs is None:
            new[name] = "not in the source"
        elif name.startswith(by_class):
            count = 0
            if own.shape[:1] == (len(here),) and theirs.shape == (len(there), *own.shape[1:]):
                count = len(row_of)
            if count:
                known = list(row_of)
                own[known] = theirs[list(row_of.values())].to(own)
            if count < len(here):
                new[name] = f"except for the rows of {count} of {len(here)} classes"
            copied = count, len(here)
        elif shape_of(theirs) != shape_of(own):
            new[name] = f"shape {shape_of(own)}, in the source {shape_of(theirs)}"
        else:
            own.copy_(theirs)
    kept = [name for name in state if name not in new]
    return Match(kept, new, [name for name in tensors if name not in state], copied, known)


def _rows_of_both(there: Sequence[str], here: Sequence[str]) -> dict[int, int]:
    """The row in `there` of each row in `here` that has the same class name, without names that
    occur twice.
    """
    counts = Counter(map(nfc, there))
    row_of = {nfc(name): row for row, name in enumerate(there)}
    return {row: row_of[nfc(name)] for row, name in enumerate(here) if counts[nfc(name)] == 1}
