"""A byte-level BPE tokenizer, trained on the text at hand."""

from __future__ import annotations

from collections.abc import Iterable

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

END_OF_TEXT = "<|endoftext|>"
PADDING = "<|pad|>"


def train_tokenizer(texts: Iterable[str], vocabulary: int, longest: int) -> PreTrainedTokenizerFast:
    """A tokenizer of at most `vocabulary` tokens, for sequences of up to `longest` tokens.

    Byte-level, so no text is out of vocabulary and decoding gives the text back exactly. The same texts give
    the same tokenizer.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END_OF_TEXT, PADDING],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END_OF_TEXT,
        pad_token=PADDING,
        model_max_length=longest,
        clean_up_tokenization_spaces=False,
    )
