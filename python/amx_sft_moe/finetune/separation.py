"""Whether examples that share a row stay apart: a question to the model, whatever its family."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from .model import bare_model
from .packing import TokenBlocks

# What another order of sums may do to an example's logits: in epsilons of the coarsest dtype at work, at least,
# and how much more than to those of the row's first example, which has nothing before it.
ROUNDINGS, LEAST, TIMES_THE_FIRST = 8, 1e-4, 8


def keeps_examples_apart(model: torch.nn.Module, parts: Sequence[TokenBlocks]) -> bool:
    """Whether an example that shares a row, told apart by position ids alone, means the same there as in a row
    of its own.

    gpt-oss makes its mask without position ids, and linear attention or a convolution carries a state along the
    row (Qwen3-Next, Qwen3.5-MoE): there examples learn from their neighbours, and nothing tells. MiniMax-M3
    chooses the blocks of tokens that attention looks at by position ids and by places in the row, and mixes
    them up. Asked is the last example of the row of `parts` in which one begins furthest behind. The gradient
    of its logits with respect to the embeddings of the others has to be 0: behind a mask attention has
    probabilities of exactly 0, in any dtype. And its logits have to be those of the example alone, but for
    rounding; of its last quarter, whose tokens have most to look at. True where each example has a row to
    itself anyway, and where logits are not numbers, which training will tell.

    One forward and one backward of that row, one forward of its first and of its last example; the model is
    left in its mode, and its parameters without gradients.
    """
    blocks = max(parts, key=lambda part: int(part.last_starts().max()))
    row = int(blocks.last_starts().argmax())
    end = int(blocks.lengths[row])
    tokens, positions = blocks.input_ids[row, :end], blocks.position_ids[row, :end]
    starts = positions.eq(0).nonzero().flatten().tolist()
    if len(starts) == 1:
        return True
    first, last = slice(0, starts[1]), slice(starts[-1], end)
    with _in_evaluation(model):
        logits, seen = _logits_and_seen(model, tokens, positions, last)
        if not bool(logits.isfinite().all()):
            return True
        if bool(seen[: last.start].any()):
            return False
        differences = []
        for example in (first, last):
            with torch.no_grad():
                alone = _logits(model, tokens[example], positions[example])
            differences.append(_relative_difference(logits[example], alone))
    floating = (each.dtype for each in model.parameters() if each.is_floating_point())
    coarsest = max(torch.finfo(dtype).eps for dtype in floating)
    return differences[1] <= max(ROUNDINGS * coarsest, LEAST, TIMES_THE_FIRST * differences[0])


@contextmanager
def _in_evaluation(model: torch.nn.Module) -> Iterator[None]:
    was_training = model.training
    try:
        model.eval()
        yield
    finally:
        model.train(was_training)


def _logits(model: torch.nn.Module, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Of one row, [L, vocabulary]."""
    row = {"input_ids": tokens, "position_ids": positions}
    row = {name: ids.to(bare_model(model).device)[None] for name, ids in row.items()}
    return model(**row, use_cache=False).logits[0]


def _logits_and_seen(
    model: torch.nn.Module, tokens: torch.Tensor, positions: torch.Tensor, asked: slice
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of a row, and which of its tokens, bool [L], those of `asked` depend on."""
    embedded: list[torch.Tensor] = []

    def cut(module: torch.nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        embedded.append(output.detach().requires_grad_())
        return embedded[-1]

    hook = bare_model(model).get_input_embeddings().register_forward_hook(cut)
    try:
        with torch.enable_grad():
            logits = _logits(model, tokens, positions)
            (gradient,) = torch.autograd.grad(logits[asked].float().square().sum(), embedded[0])
    finally:
        hook.remove()
    return logits.detach(), (gradient[0] != 0).any(dim=-1)


def _relative_difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Of the last quarter of the rows of two matrices, on average."""
    rows = (len(found) + 3) // 4
    found, expected = found[-rows:].float(), expected[-rows:].float()
    return float(((found - expected).norm(dim=-1) / expected.norm(dim=-1)).mean())
