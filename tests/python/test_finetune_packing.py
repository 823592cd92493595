"""From text to token blocks, labels only on answers, examples in one row apart; and to the same weights."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
import transformers
from tokenizers.processors import TemplateProcessing

from amx_sft_moe.finetune import stages
from amx_sft_moe.finetune.corpus import Document, Example
from amx_sft_moe.finetune.errors import FinetuneError
from amx_sft_moe.finetune.held_out import IGNORED, held_out_loss
from amx_sft_moe.finetune.model import make_model
from amx_sft_moe.finetune.options import ModelShape
from amx_sft_moe.finetune.packing import Encoded, chunk, encode_examples, one_per_row, pack
from amx_sft_moe.finetune.separation import keeps_examples_apart
from amx_sft_moe.finetune.terminal import Terminal
from amx_sft_moe.finetune.tokenizer import train_tokenizer
from amx_sft_moe.finetune.training import train
from composite_models import TEXT_ALONE, WHOLE
from composite_models import make as make_composite
from families import FAMILIES, VOCABULARY, family_model, with_lora

TEXTS = [f"The {word} of the experts is routed to token {n}." for n in range(40) for word in ("sum", "gate")]


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(TEXTS, 300, 64)


def test_tokenizer_is_deterministic_and_loses_nothing(tokenizer):
    assert len(tokenizer) <= 300
    assert train_tokenizer(TEXTS, 300, 64).get_vocab() == tokenizer.get_vocab()
    for text in (TEXTS[0], " leading\n\tand ünïcode 漢字 \x00", "def f(x):\n    return x"):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert tokenizer.eos_token_id is not None
    assert tokenizer.pad_token_id not in (None, tokenizer.eos_token_id)


def test_prompts_carry_no_loss(tokenizer):
    example = Example("The sum of", " the experts is routed")
    (encoded,), counts = encode_examples(tokenizer, [example], 64)
    prompt = tokenizer(example.prompt)["input_ids"]
    answer = [*tokenizer(example.completion)["input_ids"], tokenizer.eos_token_id]
    assert encoded.tokens == prompt + answer
    assert encoded.labels == [IGNORED] * len(prompt) + answer
    assert (counts.kept, counts.truncated, counts.dropped) == (1, 0, 0)


def test_plain_text_carries_loss_on_all_but_its_first_token(tokenizer):
    (encoded,), _ = encode_examples(tokenizer, [Example("", TEXTS[0])], 64)
    assert encoded.labels[0] == IGNORED
    assert encoded.labels[1:] == encoded.tokens[1:]
    assert encoded.tokens[-1] == tokenizer.eos_token_id


def test_what_is_too_long_is_cut_or_left_out_and_counted(tokenizer):
    long = TEXTS[0] * 5
    encoded, counts = encode_examples(tokenizer, [Example("The", long), Example(long, "The")], 16)
    assert [len(example.tokens) for example in encoded] == [16]
    assert any(label != IGNORED for label in encoded[0].labels)
    assert (counts.kept, counts.truncated, counts.dropped) == (1, 1, 1)


def test_examples_begin_as_the_tokenizer_begins_a_text(tokenizer):
    """Not with a beginning of text that it names and never writes (gpt-oss's): a model served with this
    tokenizer would never see it."""
    named = copy.deepcopy(tokenizer)
    named.bos_token = named.convert_ids_to_tokens(0)
    example = Example("The sum of", " the experts")
    assert encode_examples(named, [example], 64) == encode_examples(tokenizer, [example], 64)
    written = copy.deepcopy(named)
    written.backend_tokenizer.post_processor = TemplateProcessing(
        single="first $A last", special_tokens=[("first", 0), ("last", 1)]
    )
    ((without,), _), ((found,), _) = (encode_examples(each, [example], 64) for each in (named, written))
    assert found == Encoded([0, *without.tokens], [IGNORED, *without.labels])


def test_a_text_of_one_token_is_left_out(tokenizer):
    """There is nothing to predict it from: no loss could be taken over it."""
    bare = copy.deepcopy(tokenizer)
    bare.eos_token = None
    encoded, counts = encode_examples(bare, [Example("", "a"), Example("", TEXTS[0])], 64)
    assert len(encoded) == 1
    assert (counts.kept, counts.truncated, counts.dropped) == (1, 0, 1)
    with pytest.raises(FinetuneError, match="no example has a token to predict within 64 tokens"):
        pack(encode_examples(bare, [Example("", "a")], 64)[0], 64, 0)


def test_long_plain_text_goes_on_in_further_examples(tokenizer):
    long = TEXTS[0] * 5
    encoded, counts = encode_examples(tokenizer, [Example("", long)], 16)
    tokens = [token for example in encoded for token in example.tokens]
    assert tokens == [*tokenizer(long)["input_ids"], tokenizer.eos_token_id][: len(tokens)]
    assert len(encoded) > 1
    assert all(example.labels[0] == IGNORED and len(example.tokens) <= 16 for example in encoded)
    assert (counts.kept, counts.truncated, counts.dropped) == (1, 0, 0)


def examples_of(lengths):
    return [
        Encoded([100 + n] * length, [IGNORED] + [100 + n] * (length - 1)) for n, length in enumerate(lengths)
    ]


def test_packing_keeps_every_token_once_and_examples_whole():
    lengths = [5, 7, 3, 8, 2, 4, 8, 1, 6]
    blocks = pack(examples_of(lengths), 8, padding_id=1)
    assert blocks.input_ids.shape[1] == 8
    found = sorted(token for token in blocks.input_ids.flatten().tolist() if token != 1)
    assert found == sorted(100 + n for n, length in enumerate(lengths) for _ in range(length))
    assert blocks.tokens == sum(lengths)
    assert blocks.predicted == sum(lengths) - len(lengths)
    assert blocks.lengths.tolist() == (blocks.input_ids != 1).sum(1).tolist()
    for row in range(len(blocks)):
        tokens, positions = blocks.input_ids[row].tolist(), blocks.position_ids[row].tolist()
        for token in set(tokens):
            assert [p for t, p in zip(tokens, positions, strict=True) if t == token] == list(
                range(tokens.count(token))
            )
        assert all(
            label == IGNORED for t, label in zip(tokens, blocks.labels[row].tolist(), strict=True) if t == 1
        )


def test_packing_wastes_little():
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(5, 60, (500,), generator=generator).tolist()
    blocks = pack(examples_of(lengths), 256, padding_id=1)
    assert blocks.tokens / blocks.input_ids.numel() > 0.93


def test_packing_nothing_is_refused():
    with pytest.raises(FinetuneError, match="--sequence-length"):
        pack([], 8, padding_id=1)


def test_blocks_give_rows_and_batches():
    blocks = pack(examples_of([8, 8, 8]), 8, padding_id=1)
    assert len(blocks.first(2)) == 2
    assert set(blocks[0]) == {"input_ids", "labels", "position_ids"}
    batch = blocks.batch([2, 0])
    assert torch.equal(batch["input_ids"], blocks.input_ids[[2, 0]])


def test_prose_is_one_stream(tokenizer):
    documents = [Document("a", TEXTS[0] * 3), Document("b", TEXTS[1] * 3)]
    blocks = chunk(tokenizer, documents, 8)
    stream = []
    for document in documents:
        stream += [*tokenizer(document.text)["input_ids"], tokenizer.eos_token_id]
    flat = blocks.input_ids.flatten().tolist()
    assert flat == stream[: len(flat)]
    assert 0 <= len(stream) - len(flat) < 8
    assert blocks.tokens == len(flat)
    with pytest.raises(FinetuneError, match="do not fill one sequence"):
        chunk(tokenizer, documents[:1], 4096)


def model_of(family: str) -> torch.nn.Module:
    if family in FAMILIES:
        return family_model(family, "eager")
    return make_composite(family, **({"pad_token_id": 0} if family == "gemma4" else {}))


def text_of(length: int, number: int) -> Encoded:
    """Tokens that differ, not the same ones for another number."""
    tokens = [3 + (11 * number + 5 * at) % (VOCABULARY - 3) for at in range(length)]
    return Encoded(tokens, [IGNORED, *tokens[1:]])


# Masks made without position ids; a state that is carried along the row.
SEEN_BY_OTHERS = {"gpt_oss", "qwen3_5_moe", "qwen4_exp"}


@pytest.mark.parametrize("family", [*FAMILIES, *TEXT_ALONE, *WHOLE])
def test_examples_do_not_see_each_other(family):
    """The loss over rows is that over the examples one by one, in whatever rows the model lets them share."""
    model = model_of(family).train()
    encoded = [text_of(length, n) for n, length in enumerate((9, 5, 12, 2, 7))]
    apart = keeps_examples_apart(model, [pack(encoded, 32, 0)])
    assert apart == (family not in SEEN_BY_OTHERS)
    assert model.training  # left as it was
    assert all(parameter.grad is None for parameter in model.parameters())
    blocks = pack(encoded, 32, 0) if apart else one_per_row(encoded, 32, 0)
    assert len(blocks) == (2 if apart else 5)
    alone = [pack([one], len(one.tokens), 0) for one in encoded]
    expected = sum(held_out_loss(model, one.tensors(), 1) * one.predicted for one in alone) / blocks.predicted
    assert held_out_loss(model, blocks.tensors(), 2) == pytest.approx(expected, rel=1e-5)
    assert model.training
    if not apart:  # what is told of it is true
        packed = held_out_loss(model, pack(encoded, 32, 0).tensors(), 2)
        assert packed != pytest.approx(expected, rel=3e-6)  # of qwen4_exp 1.6e-5, of gpt_oss a hundredth


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "gpt_oss"])
def test_examples_are_told_apart_in_bf16_and_with_an_adapter(family):
    model = with_lora(family_model(family, "amx_sft_moe", torch.bfloat16)).eval()
    blocks = pack([Encoded([5, 9, 7], [IGNORED] * 3), Encoded([9, 4], [IGNORED] * 2)], 8, 0)
    assert keeps_examples_apart(model, [blocks]) == (family not in SEEN_BY_OTHERS)
    assert not model.training
    embeddings = model.get_base_model().get_input_embeddings()
    assert not embeddings._forward_hooks  # nothing stays behind


@pytest.mark.parametrize(
    ("lengths", "apart"),
    [
        ([7, 7, 2], True),  # all within the first block of 16 tokens, which is looked at whatever happens
        ([10, 12], False),  # the second lies across its end: it loses some of its own, and sees no other's
        ([10, 8, 5], False),  # the third sees none of its own, and so all of the row
    ],
)
@pytest.mark.skipif(not hasattr(transformers, "MiniMaxM3VLTextConfig"), reason="a transformers without it")
def test_blocks_of_tokens_chosen_by_places_in_the_row(lengths, apart):
    """MiniMax-M3 keeps examples apart or not, as they lie in their row."""
    config = transformers.MiniMaxM3VLTextConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        rotary_dim=8,
        num_hidden_layers=2,
        num_local_experts=5,
        num_experts_per_tok=2,
        intermediate_size=24,
        dense_intermediate_size=24,
        shared_intermediate_size=24,
        layer_types=["full_attention", "minimax_m3_sparse"],
        index_n_heads=1,
        index_head_dim=16,
        index_block_size=16,
        index_topk_blocks=4,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    encoded = [text_of(length, n) for n, length in enumerate(lengths)]
    assert keeps_examples_apart(model, [pack(encoded, 24, 0)]) == apart
    alone = [one_per_row([one], 24, 0) for one in encoded]
    expected = sum(held_out_loss(model, one.tensors(), 1) * one.predicted for one in alone)
    expected /= sum(one.predicted for one in alone)
    packed = held_out_loss(model, pack(encoded, 24, 0).tensors(), 1)
    assert (packed == pytest.approx(expected, rel=3e-6)) == apart


def test_a_state_that_is_carried_along_is_noticed_however_weak():
    """Less of it than rounding is a leak all the same."""
    model = family_model("qwen3_moe", "eager")
    blocks = pack([text_of(6, 0), text_of(5, 1)], 12, 0)
    assert keeps_examples_apart(model, [blocks])

    def carry(module, inputs, output):
        output.last_hidden_state = output.last_hidden_state + 1e-9 * output.last_hidden_state.cumsum(1)
        return output

    model.model.register_forward_hook(carry)
    assert not keeps_examples_apart(model, [blocks])


def test_of_a_model_without_numbers_nothing_is_said():
    """Training tells that it has diverged; the rows are not the reason."""
    model = family_model("qwen3_moe", "eager")
    with torch.no_grad():
        model.lm_head.weight.fill_(torch.nan)
    assert keeps_examples_apart(model, [pack([text_of(6, 0), text_of(5, 1)], 12, 0)])


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_asked_is_the_row_in_which_an_example_begins_furthest_behind(family, monkeypatch):
    model = family_model(family, "eager")
    assert keeps_examples_apart(model, [one_per_row(examples_of([3, 4]), 8, 0)])  # nothing to be asked
    asked = []

    def forward(**row):
        asked.append(row)
        raise InterruptedError

    monkeypatch.setattr(model, "forward", forward)
    parts = [pack(examples_of([4, 7, 3, 3]), 8, 9), pack(examples_of([6, 2]), 8, 9)]
    with pytest.raises(InterruptedError):
        keeps_examples_apart(model, parts)
    assert asked[0]["input_ids"].tolist() == [parts[1].input_ids[0].tolist()]
    assert asked[0]["position_ids"].tolist() == [[*range(6), 0, 1]]
    assert not model.get_input_embeddings()._forward_hooks


def test_one_example_a_row():
    blocks = one_per_row(examples_of([5, 7, 3]), 16, padding_id=1)
    assert blocks.input_ids.shape == (3, 7)
    assert blocks.lengths.tolist() == [5, 7, 3]
    assert blocks.input_ids.tolist()[2] == [102] * 3 + [1] * 4
    assert blocks.labels.tolist()[2] == [IGNORED, 102, 102] + [IGNORED] * 4
    assert blocks.predicted == 12
    with pytest.raises(FinetuneError, match="--sequence-length"):
        one_per_row([], 8, padding_id=1)


@pytest.mark.parametrize("apart", [True, False])
def test_rows_follow_what_the_model_says(apart, monkeypatch, capsys):
    asked = []
    monkeypatch.setattr(stages, "keeps_examples_apart", lambda model, parts: asked.append(parts) or apart)
    model = torch.nn.Module()
    model.config = SimpleNamespace(model_type="some")
    examples = stages.Examples(examples_of([5, 7, 3]), examples_of([4, 2]), 1, 6, 7)
    options = SimpleNamespace(sequence_length=16, evaluation_rows=1)
    found = stages.lay_out(options, examples, model, Terminal(1))
    assert found.training.input_ids.shape == ((1, 16) if apart else (3, 7))
    assert found.held_out.input_ids.shape == ((1, 16) if apart else (1, 4))
    assert (found.truncated, found.dropped) == (6, 7)
    assert [[part.input_ids.shape for part in parts] for parts in asked] == [[(1, 16), (1, 16)]]
    assert ("in some several in a row would not stay apart" in capsys.readouterr().out) != apart


def test_training_gives_the_same_weights_each_time(tokenizer, tmp_path):
    """Of a size where torch, left alone, adds up the gradient of a gather in any order."""
    shape = ModelShape(vocabulary=len(tokenizer), layers=2, hidden=64, intermediate=64, experts=8, top_k=4)
    blocks = chunk(tokenizer, [Document("a", " ".join(TEXTS * 8))], 64)
    assert len(blocks) >= 32

    def weights():
        model = make_model(shape, tokenizer, 64, seed=0)
        curve = train(
            model,
            blocks,
            blocks.first(4),
            title="base",
            steps=4,
            batch_size=32,
            learning_rate=1e-2,
            seed=0,
            scratch=tmp_path,
        )
        assert [steps for steps, _ in curve.held_out] == [0, 1, 2, 3, 4]
        assert curve.held_out[-1][1] < curve.held_out[0][1]
        return list(model.parameters())

    for a, b in zip(weights(), weights(), strict=True):
        assert torch.equal(a, b)
    assert list(tmp_path.iterdir()) == []
    assert not torch.are_deterministic_algorithms_enabled()
