"""Whether examples that share a row stay apart: a question to the model, whatever its family."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .model import bare_model

# Of each of the two examples, at most. Odd: where a model puts blocks of tokens together, one lies across.
PROBED_TOKENS = 7


def keeps_examples_apart(model: torch.nn.Module, tokens: Sequence[int]) -> bool:
    """Whether of two examples in a row, told apart by position ids alone, the second sees nothing of the first.

    gpt-oss makes its mask without position ids, and linear attention or a convolution carries a state along the
    row (Qwen3-Next, Qwen3.5-MoE): there examples learn from their neighbours, and nothing tells. Asked is for
    the gradient of the second's logits with respect to the first's embeddings: behind a mask attention has
    probabilities of exactly 0, and so has that gradient, in any dtype. `tokens`, at least one, are ids that the
    model knows. One forward and one backward of twice PROBED_TOKENS tokens; the model is left in its mode, and
    its parameters without gradients.
    """
    bare = bare_model(model)
    example = torch.as_tensor(tokens[:PROBED_TOKENS], device=bare.device)
    count = len(example)
    positions = torch.arange(count, device=bare.device).repeat(2)
    embedded: list[torch.Tensor] = []

    def cut(module: torch.nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        embedded.append(output.detach().requires_grad_())
        return embedded[-1]

    was_training = model.training
    hook = bare.get_input_embeddings().register_forward_hook(cut)
    try:
        model.eval()
        with torch.enable_grad():
            row = {"input_ids": example.repeat(2)[None], "position_ids": positions[None]}
            logits = model(**row, use_cache=False).logits  # [1, 2 count, vocabulary]
            (gradient,) = torch.autograd.grad(logits[:, count:].float().square().sum(), embedded[0])
    finally:
        hook.remove()
        model.train(was_training)
    return bool((gradient[:, :count] == 0).all())
