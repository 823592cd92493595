"""The text that the main job learns from: the standard library's, and the user's JSON lines."""

from __future__ import annotations

import json

import pytest

from amx_sft_moe.finetune.corpus import (
    Document,
    Example,
    prose,
    questions,
    split,
    split_documents,
    split_examples,
)
from amx_sft_moe.finetune.errors import FinetuneError
from amx_sft_moe.finetune.jsonl import read_examples


def test_standard_library_has_enough_prose():
    documents = prose()
    assert len(documents) > 200
    assert sum(len(document.text) for document in documents) > 500_000
    assert all(document.text.strip() == document.text != "" for document in documents)
    assert len({document.title for document in documents}) == len(documents)


def test_standard_library_has_enough_questions():
    examples = questions()
    assert len(examples) > 4000
    assert len({example.prompt for example in examples}) == len(examples)
    for example in examples:
        assert example.prompt.startswith("Question: What is ")
        assert example.prompt.endswith("?\nAnswer:")
        assert example.completion.startswith(" ")
        assert "\n" not in example.completion


def test_questions_name_what_they_ask_for():
    by_prompt = {example.prompt: example.completion for example in questions()}
    dedent = by_prompt["Question: What is textwrap.dedent(text)?\nAnswer:"]
    assert dedent.strip().startswith("Remove any common leading whitespace")
    assert any(prompt.startswith("Question: What is class textwrap.TextWrapper") for prompt in by_prompt)
    assert any("What is textwrap.TextWrapper.wrap(self, text)" in prompt for prompt in by_prompt)


def test_corpus_is_the_same_each_time():
    from amx_sft_moe.finetune import corpus

    documents, examples = prose(), questions()
    corpus._modules.cache_clear()
    assert prose() == documents
    assert questions() == examples


@pytest.mark.parametrize("fraction", [0.01, 0.04, 0.5])
def test_splits_are_disjoint_and_of_the_size_asked_for(fraction):
    examples = questions()
    training, held_out = split_examples(examples, fraction)
    assert sorted(training + held_out, key=str) == sorted(examples, key=str)
    assert not {e.prompt for e in training} & {e.prompt for e in held_out}
    # The same answer occurs under many questions: a held-out one must not have been seen.
    assert not {e.completion for e in training} & {e.completion for e in held_out}
    assert fraction <= len(held_out) / len(examples) < fraction + 0.02
    assert split_examples(examples, fraction) == (training, held_out)


def test_documents_are_split_by_characters():
    training, held_out = split_documents(prose(), 0.04)
    characters = [sum(len(document.text) for document in part) for part in (training, held_out)]
    assert 0.04 <= characters[1] / sum(characters) < 0.2
    assert not {d.title for d in training} & {d.title for d in held_out}


def test_split_keeps_groups_together_and_neither_side_empty():
    documents = [Document(str(number), f"text {number % 2}") for number in range(10)]
    for fraction in (1e-9, 0.5, 1.0):
        training, held_out = split(documents, lambda d: d.text, lambda d: 1, fraction)
        assert len(training) == len(held_out) == 5
    with pytest.raises(FinetuneError, match="1 different examples: at least 2"):
        split(documents[::2], lambda d: d.text, lambda d: 1, 0.5)


def write(path, *lines: str) -> None:
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def test_json_lines_of_both_forms_are_read(tmp_path):
    path = tmp_path / "data.jsonl"
    write(
        path,
        '{"prompt": "two plus two?", "completion": " four", "id": 7}',
        "",
        '{"text": "a line\\u2028with a separator that is none in JSON"}',
        json.dumps({"prompt": "", "completion": "ünïcode"}, ensure_ascii=False),
        '{"text": "\\ud83d\\ude00"}',  # a whole pair
    )
    assert read_examples(path) == [
        Example("two plus two?", " four"),
        Example("", "a line\u2028with a separator that is none in JSON"),
        Example("", "ünïcode"),
        Example("", "\U0001f600"),
    ]


def test_byte_order_mark_and_missing_last_newline_are_fine(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "a"}\r\n{"text": "b"}')
    assert read_examples(path) == [Example("", "a"), Example("", "b")]


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ('{"text": "a"', "line 2: not JSON"),
        ("[1, 2]", "line 2: expected an object, found list"),
        ("null", "line 2: expected an object, found NoneType"),
        ("{}", "line 2: expected either 'prompt' and 'completion', or 'text'; found no keys"),
        ('{"prompt": "a"}', "line 2: .*found 'prompt'"),
        ('{"prompt": "a", "completion": "b", "text": "c"}', "line 2: expected either"),
        ('{"text": 3}', "line 2: 'text' must be a string, found int"),
        ('{"prompt": null, "completion": "b"}', "line 2: 'prompt' must be a string, found NoneType"),
        ('{"prompt": "a", "completion": " "}', "line 2: 'completion' is empty"),
        ('{"text": ""}', "line 2: 'text' is empty"),
        ('{"text": "a\\ud83d"}', r"line 2: 'text' has half a character, '\\ud83d', at 2"),
        ('{"prompt": "\\ude00", "completion": "b"}', r"line 2: 'prompt' has half a character, '\\ude00', at 1"),
        ("[" * 100_000, "line 2: cannot be read: maximum recursion"),
        ('{"text": "a", "id": ' + "1" * 5000 + "}", "line 2: cannot be read: .*digits"),
    ],
)
def test_what_is_wrong_with_a_line_is_said_with_its_number(tmp_path, line, complaint):
    path = tmp_path / "data.jsonl"
    write(path, '{"text": "fine"}', line)
    with pytest.raises(FinetuneError, match=complaint) as raised:
        read_examples(path)
    assert str(path) in str(raised.value)


def test_lines_that_are_not_utf8_are_named(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_bytes(b'{"text": "a"}\n{"text": "\xff"}\n')
    with pytest.raises(FinetuneError, match=r"line 2: not UTF-8 at byte 11"):
        read_examples(path)


def test_many_wrong_lines_are_not_all_listed(tmp_path):
    path = tmp_path / "data.jsonl"
    write(path, *["?"] * 12)
    with pytest.raises(FinetuneError, match=r"(?s)line 1: .*line 5: .*and 7 more") as raised:
        read_examples(path)
    assert "line 6" not in str(raised.value)


def test_missing_and_empty_files_are_refused(tmp_path):
    with pytest.raises(FinetuneError, match=r"cannot read the data file .*none.jsonl: No such file"):
        read_examples(tmp_path / "none.jsonl")
    write(tmp_path / "empty.jsonl", "", "  ")
    with pytest.raises(FinetuneError, match="holds no examples"):
        read_examples(tmp_path / "empty.jsonl")
