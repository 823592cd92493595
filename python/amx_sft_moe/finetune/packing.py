"""Token blocks for training: several examples per row where each sees only itself there, else one per row."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerBase

from .corpus import Document, Example
from .errors import FinetuneError
from .held_out import IGNORED

OPEN_ROWS = (
    64  # rows that an example is tried in before a new one is opened; more fill little better and cost time
)


@dataclass(frozen=True)
class Encoded:
    """One example as tokens. `labels` has the length of `tokens`, IGNORED where the loss does not count."""

    tokens: list[int]
    labels: list[int]


@dataclass(frozen=True)
class EncodingCounts:
    """What happened to the examples on their way to tokens."""

    kept: int
    truncated: int  # the completion was cut to the sequence length
    dropped: int  # nothing to learn: the prompt alone fills the sequence, or no token follows the first


class TokenBlocks(Dataset[dict[str, torch.Tensor]]):
    """`input_ids`, `labels` and `position_ids`, int64 [N, L] each; item i is a dict of the three rows i.

    A position id that does not follow its predecessor starts a new example: for most models transformers
    derives from it an attention mask under which examples of one row do not see each other (separation.py).
    """

    def __init__(
        self, input_ids: torch.Tensor, labels: torch.Tensor, position_ids: torch.Tensor, lengths: torch.Tensor
    ):
        self.input_ids = input_ids  # [N, L]
        self.labels = labels  # [N, L]
        self.position_ids = position_ids  # [N, L]
        self.lengths = lengths  # [N], tokens of each row that are text; what follows only fills the row up

    def __len__(self) -> int:
        return self.input_ids.shape[0]

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {name: tensor[index] for name, tensor in self.tensors().items()}

    def tensors(self) -> dict[str, torch.Tensor]:
        """The three tensors by the names that the model's forward gives them."""
        return {"input_ids": self.input_ids, "labels": self.labels, "position_ids": self.position_ids}

    def rows_of_step(self, batch_size: int) -> int:
        """How many rows a step of `batch_size` takes: fewer blocks are one short batch."""
        return min(batch_size, len(self))

    def batch(self, indices: Sequence[int]) -> dict[str, torch.Tensor]:
        """The rows `indices` of each tensor, [len(indices), L]."""
        rows = torch.as_tensor(indices)
        return {name: tensor[rows] for name, tensor in self.tensors().items()}

    def last_starts(self) -> torch.Tensor:
        """Where in each row its last example begins, int64 [N]."""
        places = torch.arange(self.input_ids.shape[1])
        starts = (self.position_ids == 0) & (places < self.lengths[:, None])
        return (starts * places).amax(dim=1)

    def first(self, rows: int) -> TokenBlocks:
        """The first `rows` rows, or all where there are fewer."""
        return TokenBlocks(
            self.input_ids[:rows], self.labels[:rows], self.position_ids[:rows], self.lengths[:rows]
        )

    @property
    def tokens(self) -> int:
        """Tokens that are text, that is, without padding."""
        return int(self.lengths.sum())

    @property
    def predicted(self) -> int:
        """Tokens that the loss counts. The first of a row has no predecessor to be predicted from."""
        return int((self.labels[:, 1:] != IGNORED).sum())


def _encode(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[list[int]]:
    if not texts:
        return []
    # verbose=False: a document longer than the model's context is cut here, which is not worth the warning.
    return tokenizer(list(texts), add_special_tokens=False, verbose=False)["input_ids"]


def _beginning(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """What this tokenizer puts before a text: nothing, for some that name a beginning of text nevertheless."""
    text = "a"
    plain = tokenizer(text, add_special_tokens=False)["input_ids"]
    whole = tokenizer(text)["input_ids"]
    places = range(len(whole) - len(plain) + 1) if plain else ()
    return next((whole[:at] for at in places if whole[at : at + len(plain)] == plain), [])


def encode_examples(
    tokenizer: PreTrainedTokenizerBase, examples: Sequence[Example], sequence_length: int
) -> tuple[list[Encoded], EncodingCounts]:
    """Tokens and labels: what the tokenizer itself puts before a text, prompt (no loss), completion, end of
    text.

    Prompt and completion are tokenised apart, so the border between them is a token border. An example too
    long is cut at the end; a plain text too long goes on in further examples instead. The very first token
    has no label, there is nothing to predict it from: a text of one token is left out.
    """
    start = _beginning(tokenizer)
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    prompts = _encode(tokenizer, [example.prompt for example in examples])
    completions = _encode(tokenizer, [example.completion for example in examples])
    encoded: list[Encoded] = []
    truncated = dropped = 0
    for prompt, completion in zip(prompts, completions, strict=True):
        context = start + prompt
        tokens = context + completion + end
        labels = [IGNORED] * max(len(context), 1) + tokens[max(len(context), 1) :]
        if len(context) >= sequence_length or len(labels) <= max(len(context), 1):
            dropped += 1
        elif len(tokens) > sequence_length and not prompt:
            for at in range(0, len(tokens), sequence_length):
                piece = slice(at, at + sequence_length)
                if len(tokens[piece]) > 1:
                    encoded.append(Encoded(tokens[piece], [IGNORED, *labels[piece][1:]]))
        else:
            truncated += len(tokens) > sequence_length
            encoded.append(Encoded(tokens[:sequence_length], labels[:sequence_length]))
    return encoded, EncodingCounts(len(examples) - dropped, truncated, dropped)


def _fill_rows(encoded: Iterable[Encoded], sequence_length: int) -> list[list[Encoded]]:
    """First fit, over the last OPEN_ROWS rows."""
    rows: list[list[Encoded]] = []
    free: list[int] = []
    for example in encoded:
        size = len(example.tokens)
        first = max(len(rows) - OPEN_ROWS, 0)
        row = next((row for row in range(first, len(rows)) if free[row] >= size), None)
        if row is None:
            rows.append([])
            free.append(sequence_length)
            row = len(rows) - 1
        rows[row].append(example)
        free[row] -= size
    return rows


def pack(encoded: Sequence[Encoded], sequence_length: int, padding_id: int) -> TokenBlocks:
    """Lays examples of at most `sequence_length` tokens into rows [N, sequence_length], several in one.

    Raises FinetuneError if there are none.
    """
    require_any(encoded, sequence_length, "example")
    return _laid_out(_fill_rows(encoded, sequence_length), sequence_length, padding_id)


def one_per_row(encoded: Sequence[Encoded], sequence_length: int, padding_id: int) -> TokenBlocks:
    """Lays each example into a row of its own, [N, tokens of the longest]. What fills a row up stands behind
    its example, where a causal model does not see it.

    Raises FinetuneError if there are none.
    """
    require_any(encoded, sequence_length, "example")
    longest = max(len(example.tokens) for example in encoded)
    return _laid_out([[example] for example in encoded], longest, padding_id)


def require_any(encoded: Sequence[Encoded], sequence_length: int, what: str) -> None:
    """FinetuneError if there is no example; ``what`` they are."""
    if not encoded:
        raise FinetuneError(
            f"no {what} has a token to predict within {sequence_length} tokens; try prompts that leave room "
            "for an answer, or a larger --sequence-length"
        )


def _laid_out(rows: Sequence[Sequence[Encoded]], sequence_length: int, padding_id: int) -> TokenBlocks:
    input_ids = torch.full((len(rows), sequence_length), padding_id, dtype=torch.int64)
    labels = torch.full_like(input_ids, IGNORED)
    position_ids = torch.zeros_like(input_ids)
    lengths = torch.zeros(len(rows), dtype=torch.int64)
    for index, row in enumerate(rows):
        at = 0
        for example in row:
            end = at + len(example.tokens)
            input_ids[index, at:end] = torch.tensor(example.tokens)
            labels[index, at:end] = torch.tensor(example.labels)
            position_ids[index, at:end] = torch.arange(end - at)
            at = end
        # The rest is one more segment, which nothing looks at and whose loss does not count.
        position_ids[index, at:] = torch.arange(sequence_length - at)
        lengths[index] = at
    return TokenBlocks(input_ids, labels, position_ids, lengths)


def chunk(
    tokenizer: PreTrainedTokenizerBase, documents: Sequence[Document], sequence_length: int
) -> TokenBlocks:
    """Prose as one stream, cut into rows [N, sequence_length]; an end of text stands between documents.

    The last, incomplete row is left out. FinetuneError if not even one row is full.
    """
    stream: list[int] = []
    for tokens in _encode(tokenizer, [document.text for document in documents]):
        stream += [*tokens, tokenizer.eos_token_id]
    rows = len(stream) // sequence_length
    if rows == 0:
        raise FinetuneError(f"{len(stream)} tokens of prose do not fill one sequence of {sequence_length}")
    input_ids = torch.tensor(stream[: rows * sequence_length]).view(rows, sequence_length)
    position_ids = torch.arange(sequence_length).expand(rows, -1).contiguous()
    return TokenBlocks(input_ids, input_ids.clone(), position_ids, torch.full((rows,), sequence_length))
