"""Names of a model's layers in dumps and traces."""

from __future__ import annotations

import re
from collections import Counter

from torch import nn

from amx_sft_moe.integrations import hook_in_use
from amx_sft_moe.nn import SftMoeExperts

# "base_model.model.model.layers.3.mlp.experts" is known to everyone as layers.3.
_LAYER = re.compile(r"(?:^|\.)(\w+\.\d+)(?=\.|$)")


def _short(path: str) -> str:
    found = _LAYER.findall(path)
    return found[-1] if found else path


def name_layers(model: nn.Module) -> dict[str, str]:
    """Names the layers of ``model`` that the operator runs, or may run through transformers, after their place
    in it: ``layers.3``; the whole path where that is not unique.

    Without it a layer of transformers is called ``experts.N``, by the order in which layers ran first, and a
    :class:`amx_sft_moe.nn.SftMoeExperts` as it was told.

    Returns:
        Path of the module to its name.
    """
    hook = hook_in_use()
    paths = {
        path: module
        for path, module in model.named_modules()
        if isinstance(module, SftMoeExperts) or (hook is not None and hook.is_ours(module))
    }
    times = Counter(map(_short, paths))
    names = {path: _short(path) if times[_short(path)] == 1 else path for path in paths}
    for path, module in paths.items():
        if isinstance(module, SftMoeExperts):
            module.layer_name = names[path]
        elif hook is not None:
            hook.name_layer(module, names[path])
    return names
