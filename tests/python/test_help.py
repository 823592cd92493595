"""What the commands' --help says of their options."""

from __future__ import annotations

import argparse
import re
from dataclasses import fields

import pytest

from amx_sft_moe.adapters import cli as adapter
from amx_sft_moe.finetune import options
from amx_sft_moe.finetune.options import Options, parse
from amx_sft_moe.timeline import cli as timeline


def parsers(parser: argparse.ArgumentParser) -> list[argparse.ArgumentParser]:
    nested = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    return [parser, *(one for action in nested for one in action.choices.values())]


@pytest.mark.parametrize("command", [options.parser(), timeline._parser()], ids=["finetune", "timeline"])
def test_every_option_says_what_it_is(command: argparse.ArgumentParser) -> None:
    assert [action.dest for action in command._actions if not action.help] == []


def test_finetune_tells_what_quick_replaces() -> None:
    told = {action.dest: str(action.help) for action in options.parser()._actions}
    normal, quick = parse([]), parse(["--quick"])
    for field in fields(Options):
        before, after = getattr(normal, field.name), getattr(quick, field.name)
        if field.name in told and before != after and field.name not in ("quick", "alpha"):
            assert f"(default: {before}, with --quick {after})" in told[field.name]
    assert "(default: 200, with --quick 30)" in told["steps"]
    assert told["seed"].endswith("(default: 0)")
    assert "of all examples, those of --data too, at most 200" in told["quick"]


def test_merge_replaces_what_it_says() -> None:
    [merge] = [one for one in parsers(adapter._parser()) if one.prog.endswith(" merge")]
    assert re.search(r"replace a checkpoint or an adapter\s+in OUT", merge.format_help())
