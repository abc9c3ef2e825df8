"""Weights from elsewhere: tensors are matched by name and shape, the rows of the head by class name."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from utils.console import join_names


@dataclass
class Match:
    """The names of the model's tensors that were copied, and of those that were not, with the reason."""

    kept: list[str] = field(default_factory=list)
    new: dict[str, str] = field(default_factory=dict)
    unused: list[str] = field(default_factory=list)  # tensors that the model does not have
    rows: tuple[int, int] | None = None  # classes whose rows of the head were copied, and all classes
    classes: list[str] = field(default_factory=list)  # those whose rows were copied, unless these are all

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
        lines += [f"classes kept: {', '.join(self.classes)}"] if self.classes else []
        return "\n".join([*lines, *(f"not used: {name}" for name in self.unused)]) + "\n"


def find_heads(model: nn.Module) -> tuple[str, ...]:
    """The names of the layers that compute the logits: those that timm names, else the last linear layer."""
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, nn.Linear | nn.Conv2d)}
    named = getattr(model, "pretrained_cfg", {}).get("classifier") or ()
    named = (named,) if isinstance(named, str) else named
    return tuple(name for name in named if name in layers) or tuple(layers)[-1:]


@torch.no_grad()
def copy_matching(model: nn.Module, tensors: Mapping[str, Tensor], there: Sequence[str], here: Sequence[str]) -> Match:
    """Copy the tensors that the model has under the same name and in the same shape.

    `there` has the class names of `tensors`, or nothing if they are unknown, and `here` those of the model. If both are
    known, the rows of the head are copied by class name; names that occur twice are left out.
    """
    state, found = model.state_dict(), Match()
    heads = tuple(f"{name}." for name in find_heads(model))
    counts = Counter(there)
    row_of = {name: row for row, name in enumerate(there) if counts[name] == 1}
    pairs = [(row, row_of[name]) for row, name in enumerate(here) if name in row_of]
    for name, own in state.items():
        theirs = tensors.get(name)
        if theirs is None:
            found.new[name] = "not in the source"
        elif there and list(there) != list(here) and name.startswith(heads):
            fits = own.shape[:1] == (len(here),) and theirs.shape == (len(there), *own.shape[1:])
            count = len(pairs) if fits else 0
            if count:
                rows, sources = zip(*pairs, strict=True)
                own[list(rows)] = theirs[list(sources)].to(own)
            found.rows = count, len(here)
            if count == len(here):
                found.kept.append(name)
            else:
                found.new[name] = f"except for the rows of {count} of {len(here)} classes"
                found.classes = [here[row] for row, _ in pairs[:count]]
        elif theirs.shape != own.shape:
            found.new[name] = f"shape {list(own.shape)}, in the source {list(theirs.shape)}"
        else:
            own.copy_(theirs)
            found.kept.append(name)
    found.unused = [name for name in tensors if name not in state]
    return found
