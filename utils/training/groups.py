"""Parameter groups: which parameters have weight decay, and how fast each layer learns."""

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase

from torch import nn

from utils.models import find_blocks, head_prefixes
from utils.settings.training import TrainingSettings

Groups = list[dict]

# The last parts of the names of embeddings, tokens and scales. Not all models list them in
# `no_weight_decay`.
_UNDECAYED = {"class_token", "cls_token", "pos_embed", "pos_embedding", "layer_scale"}
_UNDECAYED |= {"relative_position_bias_table"}


def parameter_groups(
    config: TrainingSettings, model: nn.Module, more: Mapping[str, dict] | None = None
) -> Groups:
    """The trainable parameters with their names; groups with weight decay come first.

    A group has its `weight_decay`, and `lr_scale`, the factor of its learning rate. `more` has,
    by the names of parameters, what the optimizer adds to their groups.
    """
    undecayed = names_without_decay(model)
    scales = layer_scales(model, config.layer_decay)
    of_head = head_prefixes(model)
    groups: dict[tuple, dict] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        decay = 0.0 if name in undecayed else config.weight_decay
        scale = scales[name] * ((config.head_scale or 1.0) if name.startswith(of_head) else 1.0)
        group = {"weight_decay": decay, "lr_scale": scale} | (more or {}).get(name, {})
        # groups have the same keys in the same order, so their values can be compared
        key = (name in undecayed, *group.values())
        groups.setdefault(key, {"params": []} | group)["params"].append((name, parameter))
    return [groups[key] for key in sorted(groups)]


def names_without_decay(model: nn.Module) -> set[str]:
    """The parameters without weight decay: vectors, biases, position embeddings and class tokens.

    Vectors are the parameters of normalisation layers. timm's models name more in
    `no_weight_decay()`.
    """
    patterns: Iterable[str] = getattr(model, "no_weight_decay", tuple)()
    return {
        name
        for name, parameter in model.named_parameters()
        if parameter.ndim <= 1
        or name.endswith("bias")
        or name.rpartition(".")[2] in _UNDECAYED
        or any(fnmatchcase(name, pattern) for pattern in patterns)
    }


def layer_scales(model: nn.Module, decay: float | None) -> dict[str, float]:
    """The factor of each parameter's learning rate: `decay` ** (layers between its layer and the
    last), or 1.

    This is layer-wise learning rate decay (Clark et al., 2020; Bao et al., 2022).
    """
    if decay is None:
        return {name: 1.0 for name, _ in model.named_parameters()}
    numbers = layer_numbers(model)
    last = max(numbers.values())
    return {name: decay ** (last - numbers.get(name, last)) for name, _ in model.named_parameters()}


def layer_numbers(model: nn.Module) -> dict[str, int]:
    """The number of each parameter's layer, from 0 at the input. timm's models number them
    themselves.

    In other models, each block (`find_blocks`) and each module outside of them is a layer, in the
    order in which the model creates them. One that has only vectors, such as a normalisation, has
    the number of the layer before it, and so have parameters outside of all, such as class tokens.
    """
    if matcher := getattr(model, "group_matcher", None):
        from timm.models import group_parameters

        return group_parameters(model, matcher(coarse=False), reverse=True)
    blocks = {*find_blocks(model)}
    numbers = dict[str, int]()
    number = -1
    inside = "."
    for path, module in model.named_modules():
        if path.startswith(inside):
            continue
        is_layer = module in blocks or next(module.children(), None) is None
        named = list(module.named_parameters(path, recurse=is_layer))
        number += is_layer and any(parameter.ndim > 1 for _, parameter in named)
        numbers |= {name: max(0, number) for name, _ in named}
        inside = f"{path}." if is_layer else inside
    return numbers
