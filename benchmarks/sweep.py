"""All figures of peers.py in one command: one run for each number of tokens and each layer, a table, a picture.

    python benchmarks/sweep.py run.jsonl [--quick] [--picture docs/speed.svg] [--redraw]

Runs peers.py in a process of its own for each line below and appends its JSON lines to run.jsonl; what stands
there already is not run again, so an interrupted sweep goes on. `--redraw` only makes table and picture. Some
twenty minutes on two cores; nothing else should run meanwhile.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
MAIN = "qwen3-30b-a3b"
TOKENS = (8, 32, 128, 512, 2048)
BF16_RIVALS = ("torch-grouped", "torch-loop", "kt-bf16")
# shape, routing, tokens, turns
RUNS = [
    *[(MAIN, "uniform", tokens, 7 if tokens < 2048 else 3) for tokens in TOKENS],
    (MAIN, "zipf", 128, 5),
    (MAIN, "zipf", 512, 5),
    ("deepseek-v3-32", "uniform", 128, 3),
    ("mixtral", "uniform", 128, 3),
    ("gpt-oss", "uniform", 128, 5),
    ("qwen3-235b-64", "uniform", 128, 3),
    ("small", "uniform", 128, 7),
    ("one-expert", "uniform", 512, 7),
]
COLOURS = {
    "ours": "#c0392b",
    "ours-fresh": "#e59866",
    "torch-grouped": "#2471a3",
    "torch-loop": "#7fb3d5",
    "kt-bf16": "#1e8449",
    "kt-int8": "#82c99a",
}

Key = tuple[str, str, int]


def read(path: Path) -> dict[Key, dict[str, dict]]:
    """(shape, routing, tokens) -> candidate -> its line."""
    found: dict[Key, dict[str, dict]] = {}
    if path.exists():
        for line in path.read_text().splitlines():
            row = json.loads(line)
            found.setdefault((row["shape"], row["routing"], row["tokens"]), {})[row["peer"]] = row
    return found


def run(path: Path, quick: bool) -> None:
    for shape, routing, tokens, turns in RUNS:
        if (shape, routing, tokens) in read(path) or (quick and shape != MAIN):
            continue
        sizes = ["--shape", shape, "--routing", routing, "--tokens", str(tokens)]
        peers = ",".join(["ours", "ours-fresh", *BF16_RIVALS, "kt-int8"])
        command = [sys.executable, str(HERE / "peers.py"), *sizes, "--iterations", str(turns), "--peers", peers]
        print(" ".join(command[1:]), file=sys.stderr, flush=True)
        output = subprocess.run(command, check=True, text=True, stdout=subprocess.PIPE).stdout
        with path.open("a") as file:
            file.writelines(line + "\n" for line in output.splitlines() if line.startswith("{"))


def table(found: dict[Key, dict[str, dict]]) -> str:
    """Markdown: a step of each candidate in ms, ours over the fastest bf16 rival, ours' share of the limit."""
    names = [name for name in COLOURS if any(name in rows for rows in found.values())]
    lines = [
        "| layer | routing | T | " + " | ".join(names) + " | ours / fastest bf16 rival | of the limit |",
        "| --- | --- | --- | " + "--- | " * (len(names) + 2),
    ]
    for (shape, routing, tokens), rows in found.items():
        steps = [f"{rows[n]['step_ms']:.4g}" if n in rows else "" for n in names]
        rivals = [rows[n]["step_ms"] for n in BF16_RIVALS if n in rows]
        ratio = f"**{rows['ours']['step_ms'] / min(rivals):.2f}**" if rivals else ""
        share = f"{rows['ours']['of_limit']:.2f}"
        lines.append("| " + " | ".join([shape, routing, str(tokens), *steps, ratio, share]) + " |")
    return "\n".join(lines)


def draw(found: dict[Key, dict[str, dict]], picture: Path) -> None:
    """Time of a step, and the share of the limit, against the number of tokens."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "amx-sft-moe"  # the same picture from the same figures
    import matplotlib.pyplot as plt

    rows = {tokens: found[MAIN, "uniform", tokens] for tokens in TOKENS if (MAIN, "uniform", tokens) in found}
    figure, (time, share) = plt.subplots(1, 2, figsize=(11, 4.4))
    for name, colour in COLOURS.items():
        points = [(tokens, peers[name]) for tokens, peers in rows.items() if name in peers]
        if not points:
            continue
        at = [tokens for tokens, _ in points]
        style = {"color": colour, "marker": "o", "markersize": 4, "linewidth": 2.4 if name == "ours" else 1.4}
        time.plot(at, [row["step_ms"] for _, row in points], label=name, **style)
        share.plot(at, [100 * row["of_limit"] for _, row in points], **style)
    limits = [next(iter(peers.values()))["limit_ms"] for peers in rows.values()]
    time.plot(list(rows), limits, color="#444444", linestyle="--", linewidth=1, label="limit of the machine")
    time.set(yscale="log", ylabel="ms a step", title="one training step (forward and backward)")
    share.set(ylim=(0, 100), ylabel="% of the limit", title="share of the machine's limit")
    for axes in (time, share):
        axes.set(xscale="log", xlabel="tokens")
        axes.set_xticks(list(rows), [str(tokens) for tokens in rows])
        axes.minorticks_off()
        axes.grid(True, which="major", color="#dddddd", linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    time.set_yticks(
        [20, 50, 100, 200, 500, 1000, 2000, 5000], ["20", "50", "100", "200", "500", "1000", "2000", "5000"]
    )
    figure.legend(loc="lower center", ncols=7, frameon=False)
    figure.tight_layout(rect=(0, 0.07, 1, 1))
    figure.savefig(picture, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("figures", type=Path, help="JSON lines of peers.py, read and added to")
    parser.add_argument("--quick", action="store_true", help="the main layer only")
    parser.add_argument("--redraw", action="store_true", help="run nothing")
    parser.add_argument("--picture", type=Path, help="an SVG file")
    args = parser.parse_args()
    if not args.redraw:
        run(args.figures, args.quick)
    found = read(args.figures)
    print(table(found))
    if args.picture:
        draw(found, args.picture)


if __name__ == "__main__":
    main()
