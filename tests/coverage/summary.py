"""Lines of the headers that the C++ tests reach, from gcovr's JSON.

    python tests/coverage/summary.py FILE [--missing]

A line counts once, as reached when any instantiation of its template is: gcovr counts a line of a template once
for each kernel and each program. ``--missing`` lists the lines that none reaches.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def reached(file: dict) -> dict[int, bool]:
    """Line number -> whether any instantiation was executed."""
    lines: dict[int, bool] = {}
    for line in file["lines"]:
        if not (line.get("gcovr/noncode") or line.get("gcovr/excluded")):
            lines[line["line_number"]] = lines.get(line["line_number"], False) or line["count"] > 0
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("report", type=Path)
    parser.add_argument("--missing", action="store_true")
    options = parser.parse_args()
    lines: Counter[str] = Counter()
    hits: Counter[str] = Counter()
    for file in json.loads(options.report.read_text())["files"]:
        found = reached(file)
        folder = Path(file["file"]).parts[2]
        for name in (folder, "all"):
            lines[name] += len(found)
            hits[name] += sum(found.values())
        missing = sorted(number for number, hit in found.items() if not hit)
        if options.missing and missing:
            text = (ROOT / file["file"]).read_text().splitlines()
            print(file["file"], *(f"  {number:4} {text[number - 1].strip()}" for number in missing), sep="\n")
    print("| folder | lines | reached |\n| --- | --- | --- |")
    for name in sorted(lines, key=lambda name: (name == "all", name)):
        print(f"| {name} | {lines[name]} | {100 * hits[name] / lines[name]:.1f} % |")


if __name__ == "__main__":
    main()
