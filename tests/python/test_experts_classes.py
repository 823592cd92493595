"""Every experts class of the transformers that is installed: taken and right, or left alone with a reason."""

from __future__ import annotations

import importlib
import inspect
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import amx_sft_moe
from amx_sft_moe.integrations import experts_hook
from reference import largest, one_thread, relative_error

amx_sft_moe.register()

OURS = "amx_sft_moe"
HIDDEN, INTERMEDIATE, EXPERTS, TOP_K, TOKENS = 32, 24, 5, 2, 13
# By what configurations call them.
_SIZES = (
    (r"per_tok|top_?k", TOP_K),
    (r"experts$|^num_experts", EXPERTS),
    (r"hidden_size|hidden_dim", HIDDEN),
    (r"intermediate|ffn", INTERMEDIATE),
)
_MODELS = Path(transformers.__file__).parent / "models"
_FILES = [
    file
    for file in sorted(_MODELS.glob("*/modeling_*.py"))
    if "@use_experts_implementation" in file.read_text()
]


def experts_classes(module: Any) -> Iterator[type[nn.Module]]:
    for value in vars(module).values():
        if inspect.isclass(value) and value.__module__ == module.__name__ and hasattr(value, "_apply_gate"):
            yield value


def configuration_of(file: Path, kind: type[nn.Module]) -> Any:
    """What the class reads of its configuration, with the defaults of that, sizes made small."""
    package = f"transformers.models.{file.parent.name}"
    found = importlib.import_module(f"{package}.configuration_{file.stem.removeprefix('modeling_')}")
    used = set(re.findall(r"config\.(\w+)", inspect.getsource(kind.__init__.__wrapped__)))
    for candidate in vars(found).values():
        if not inspect.isclass(candidate) or not issubclass(candidate, transformers.PreTrainedConfig):
            continue
        default = candidate()
        try:
            small = {name: _made_small(name, getattr(default, name)) for name in used}
        except Exception:  # some raise AttributeError, some their own
            continue
        return SimpleNamespace(**default.to_dict() | small)
    raise LookupError(f"no configuration of {package} has {sorted(used)}")


def _made_small(name: str, value: Any) -> Any:
    sizes = [size for pattern, size in _SIZES if re.search(pattern, name)]
    return sizes[0] if sizes and not isinstance(value, str) else value


def results(experts: nn.Module, implementation: str) -> list[Tensor]:
    experts.config._experts_implementation = implementation
    random = torch.Generator().manual_seed(1)
    x = (2 * torch.randn(TOKENS, HIDDEN, generator=random)).requires_grad_()
    ids = torch.rand(TOKENS, EXPERTS, generator=random).argsort(1)[:, :TOP_K]
    weights = torch.rand(TOKENS, TOP_K, generator=random).requires_grad_()
    y = experts(x, ids, weights)
    return [y.detach(), *torch.autograd.grad(y, (x, weights), torch.randn(y.shape, generator=random))]


# Of transformers 5.24, whose counts the README tells: 67 files, of which these are left alone.
_LEFT_ALONE = {
    *("deepseek_v4", "glm5_next", "hy_v4", "hy_v4_vl", "inkling2", "inkling2_loop", "muse_spark", "nemotron_h"),
}
_COUNTED = transformers.__version__.startswith("5.24.")


def test_there_are_some() -> None:
    assert len(_FILES) == 67 if _COUNTED else len(_FILES) >= 40


@pytest.mark.parametrize("file", _FILES, ids=lambda file: file.parent.name)
def test_class(file: Path, calls: list[Tensor], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, logger="amx_sft_moe")
    module = importlib.import_module(f"transformers.models.{file.parent.name}.{file.stem}")
    for kind in experts_classes(module):
        experts_hook._hooks[OURS]._warned.clear()
        caplog.clear()
        calls.clear()
        torch.manual_seed(0)
        with one_thread():
            experts = kind(configuration_of(file, kind)).requires_grad_(False)
            for parameter in experts.parameters():
                parameter.normal_(std=0.4)
            expected, found = results(experts, "eager"), results(experts, OURS)
        assert largest(relative_error(a, b) for a, b in zip(found, expected, strict=True)) < 1e-5
        reasons = [record.getMessage() for record in caplog.records if record.name == "amx_sft_moe"]
        assert len(calls) + len(reasons) == 1, "either it is taken, or one warning says why not"
        if _COUNTED:
            assert bool(calls) == (file.parent.name not in _LEFT_ALONE), reasons
        plain = experts._apply_gate.__func__ is experts_hook.moe._default_apply_gate
        if plain and experts.has_gate and not experts.has_post_expert_norm:
            assert calls, reasons
