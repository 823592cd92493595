"""Whole numbers from the command line, as examples/command_line.hpp reads them: an argparse type."""

from __future__ import annotations

import argparse


def positive(text: str) -> int:
    """At least 1: of nothing there is no median, and nothing is cut into no parts."""
    if text.isascii() and text.isdigit() and int(text) > 0:
        return int(text)
    raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got {text}")
