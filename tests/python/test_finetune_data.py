"""The text that the main job learns from: the standard library's, and the user's JSON lines."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from amx_sft_moe.finetune.corpus import (
    Document,
    Example,
    prose,
    questions,
    split,
    split_documents,
    split_examples,
    split_questions,
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
    training, held_out = split_questions(examples, fraction)
    assert sorted(training + held_out, key=str) == sorted(examples, key=str)
    assert not {e.prompt for e in training} & {e.prompt for e in held_out}
    # The same answer occurs under many questions: a held-out one must not have been seen.
    assert not {e.completion for e in training} & {e.completion for e in held_out}
    assert fraction <= len(held_out) / len(examples) < fraction + 0.02
    assert split_questions(examples, fraction) == (training, held_out)


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
    message = "expected at least 2 different texts, one of them to be held out, got 1 among 5"
    with pytest.raises(FinetuneError, match=message):
        split(documents[::2], lambda d: d.text, lambda d: 1, 0.5)


def classified(labels: int, count: int = 1000) -> list[Example]:
    """`count` different prompts, each of one of `labels` answers."""
    return [Example(f"Question {n}?", f" answer {n % labels}") for n in range(count)]


@pytest.mark.parametrize("labels", [1, 2, 4, 30, 500, 1000])
def test_no_class_of_the_users_is_held_out_whole(labels):
    examples = classified(labels)
    training, held_out = split_examples(examples, 0.04)
    assert len(held_out) == 40
    assert [e for e in examples if e in set(training)] == training
    assert sorted(training + held_out, key=str) == sorted(examples, key=str)
    assert split_examples(examples, 0.04) == (training, held_out)
    assert set(split_examples(examples[::-1], 0.04)[1]) == set(held_out)
    if labels < 1000:  # an answer that occurs once is no class
        assert {e.completion for e in training} == {e.completion for e in examples}


def test_the_last_of_a_class_stays_in_training():
    examples = classified(10, 30)
    training, held_out = split_examples(examples, 1.0)
    assert len(held_out) == 20
    assert sorted(Counter(e.completion for e in training).values()) == [1] * 10


def test_equal_examples_of_the_users_stay_on_one_side():
    examples = [Example(f"{prompt}{space}", f"{space}yes") for prompt in range(100) for space in (" ", "\n")]
    training, held_out = split_examples(examples, 0.04)
    assert len(held_out) == 8
    assert not {e.prompt.strip() for e in training} & {e.prompt.strip() for e in held_out}


@pytest.mark.parametrize("repeated", range(5))
def test_one_that_is_most_of_the_data_is_trained_on(repeated):
    examples = [Example(str(n), "yes") for n in range(5) for _ in range(996 if n == repeated else 1)]
    training, held_out = split_examples(examples, 0.04)
    assert len(held_out) == 1
    assert Example(str(repeated), "yes") in training


@pytest.mark.parametrize("times", [1, 500])
@pytest.mark.parametrize("fraction", [1e-9, 0.04, 0.5, 1.0])
def test_two_different_examples_are_enough(times, fraction):
    two = [Example("odd?", "yes"), Example("even?", "no")]
    training, held_out = split_examples(two * times, fraction)
    assert len(training) == len(held_out) == times
    assert {*training, *held_out} == set(two)


def test_too_few_different_examples_are_counted():
    message = "expected at least 2 different examples, one of them to be held out, got 1 among 1,000"
    with pytest.raises(FinetuneError, match=message):
        split_examples([Example("odd?", "yes")] * 1000, 0.04)


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
