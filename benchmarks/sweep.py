"""All figures of peers.py in one command: one run for each layer and number of tokens, a table with the targets
of each line and whether it met them, a picture.

    python benchmarks/sweep.py run.jsonl [--quick | --all] [--picture docs/speed.svg] [--redraw]

Runs peers.py in a process of its own for each line and appends its JSON lines to run.jsonl; what stands there
already is not run again, so an interrupted sweep goes on. `--redraw` only makes table and picture. Nothing else
should run meanwhile. On two cores a quarter of an hour for the main layer alone (`--quick`), 45 to 60 minutes
for all layers at T = 8, 128 and 512, longer with `--all`, which has 2048 too; several times as long without
AVX512. The wide layers with all candidates take 20 GB of memory.

A line meets its targets where our step is at most TARGETS' share of the fastest rival's and shorter than that
of kt-kernel with an int8 base, which is no rival otherwise: it computes something else. Where the machine's
limit alone is more than that share of the rival's time no program meets it: "beyond the limit". The limit is a
probe's, beside the steps: where one of ours took less in the same run, that counts. A line within a tenth of
its target is run again, with three times the turns. A rival that is not there (not installed, or not for this
CPU) is not compared with. Where the CPU has no bf16 products, torch in fp32 is a rival too, with the same
numbers: it is several times as fast there as torch in bf16.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
MAIN = "qwen3-30b-a3b"
TOKENS = (8, 32, 128, 512, 2048)  # of the main layer
OTHER_TOKENS = (8, 128, 512)
OTHER_TOKENS_OF_ALL = (*OTHER_TOKENS, 2048)
# shape, routing, turns
OTHERS = (
    (MAIN, "zipf", 5),
    ("deepseek-v3-32", "uniform", 3),
    ("mixtral", "uniform", 3),
    ("gpt-oss", "uniform", 5),
    ("qwen3-235b-64", "uniform", 3),
    ("small", "uniform", 7),
    ("one-expert", "uniform", 7),
)
# Tokens -> our step at most, as a share of the fastest rival's. Numbers of tokens in between have the target of
# the next larger one here, larger ones that of the last.
TARGETS = {8: 0.40, 128: 0.40, 512: 0.45, 2048: 0.55}
MOST_BACKWARD = 1.4  # forwards
BF16_RIVALS = ("torch-grouped", "torch-loop", "kt-bf16", "kt-bf16-spared")
FP32_RIVALS = ("torch-grouped-fp32", "torch-loop-fp32")
RIVALS = BF16_RIVALS + FP32_RIVALS
INT8 = "kt-int8"
COLOURS = {
    "ours": "#c0392b",
    "ours-fresh": "#e59866",
    "torch-grouped": "#2471a3",
    "torch-loop": "#7fb3d5",
    "torch-grouped-fp32": "#6c3483",
    "torch-loop-fp32": "#bb8fce",
    "kt-bf16": "#1e8449",
    "kt-bf16-spared": "#145a32",
    "kt-int8": "#82c99a",
}

Key = tuple[str, str, int]
Rows = dict[str, dict[str, Any]]  # candidate -> its line


class Run(NamedTuple):
    shape: str
    routing: str
    tokens: int
    turns: int

    @property
    def key(self) -> Key:
        return self.shape, self.routing, self.tokens


class Verdict(NamedTuple):
    """Our step, and the machine's limit, over the fastest rival's, what that may be, and our step over
    kt-kernel's with int8; None: not there."""

    ratio: float | None
    limit: float | None
    target: float
    over_int8: float | None

    @property
    def word(self) -> str:
        if self.ratio is None:
            return ""
        if self.over_int8 is not None and self.over_int8 >= 1:
            return "missed"
        if self.ratio <= self.target:
            return "met"
        return "beyond the limit" if self.limit is not None and self.limit > self.target else "missed"


def runs(quick: bool = False, everything: bool = False) -> list[Run]:
    found = [Run(MAIN, "uniform", tokens, 7 if tokens < 2048 else 3) for tokens in TOKENS]
    if quick:
        return found
    for shape, routing, turns in OTHERS:
        for tokens in OTHER_TOKENS_OF_ALL if everything else OTHER_TOKENS:
            found.append(Run(shape, routing, tokens, turns if tokens < 2048 else 3))
    return found


def rivals_on(instruction_sets: Mapping[str, object]) -> tuple[str, ...]:
    """Whom to run on a CPU with these (amx_sft_moe.info()). CPUs with AMX have AVX512's bf16 products too."""
    return BF16_RIVALS if instruction_sets["avx512_bf16"] else RIVALS


def target_of(tokens: int) -> float:
    return next((share for most, share in TARGETS.items() if tokens <= most), TARGETS[max(TARGETS)])


def over_fastest_rival(rows: Rows, name: str, time: str = "step_ms") -> float | None:
    steps = [rows[rival]["step_ms"] for rival in RIVALS if rival in rows]
    return rows[name][time] / min(steps) if steps and name in rows else None


def verdict(rows: Rows, tokens: int) -> Verdict:
    over_int8 = rows["ours"]["step_ms"] / rows[INT8]["step_ms"] if INT8 in rows else None
    ratio = over_fastest_rival(rows, "ours")
    possible = [over_fastest_rival(rows, "ours", "limit_ms"), ratio, over_fastest_rival(rows, "ours-fresh")]
    limit = min((share for share in possible if share is not None), default=None)
    return Verdict(ratio, limit, target_of(tokens), over_int8)


def is_close(rows: Rows, tokens: int) -> bool:
    """Whether noise may have decided: a step within a tenth of what it may take."""
    ratio = over_fastest_rival(rows, "ours")
    return ratio is not None and abs(ratio / target_of(tokens) - 1) < 0.1


def read(path: Path) -> dict[Key, Rows]:
    """(shape, routing, tokens) -> candidate -> its line; in the order of runs(), then what else there is."""
    found: dict[Key, Rows] = {run.key: {} for run in runs(everything=True)}
    if path.exists():
        for line in path.read_text().splitlines():
            row = json.loads(line)
            found.setdefault((row["shape"], row["routing"], row["tokens"]), {})[row["peer"]] = row
    return {key: rows for key, rows in found.items() if rows}


def run_missing(path: Path, wanted: list[Run]) -> bool:
    """Whether all lines are there then."""
    import amx_sft_moe

    peers = ["ours", "ours-fresh", *rivals_on(amx_sft_moe.info()["instruction_sets"]), INT8]
    for one in wanted:
        if one.key in read(path):
            continue
        lines = run_line(one, peers)
        if lines and is_close({row["peer"]: row for row in map(json.loads, lines)}, one.tokens):
            lines = run_line(one._replace(turns=3 * one.turns), peers) or lines
        with path.open("a") as file:
            file.writelines(line + "\n" for line in lines)
    return all(one.key in read(path) for one in wanted)


def run_line(one: Run, peers: list[str]) -> list[str]:
    """What peers.py says of it, a JSON line a candidate; none where it fails, as without memory."""
    sizes = ["--shape", one.shape, "--routing", one.routing, "--tokens", str(one.tokens)]
    turns = ["--iterations", str(one.turns)]
    command = [sys.executable, str(HERE / "peers.py"), *sizes, *turns, "--peers", ",".join(peers)]
    print(" ".join(command[1:]), file=sys.stderr, flush=True)
    done = subprocess.run(command, text=True, stdout=subprocess.PIPE)
    if done.returncode != 0:
        print(f"exit status {done.returncode}, left out", file=sys.stderr, flush=True)
        return []
    return [line for line in done.stdout.splitlines() if line.startswith("{")]


def cell(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def table(found: dict[Key, Rows]) -> str:
    """Markdown: a step of each candidate in ms, ours beside targets and limit, the limit beside a rival."""
    names = [name for name in COLOURS if any(name in rows for rows in found.values())]
    titles = ["layer", "routing", "T", *names, "ours / fastest rival", "target", f"ours / {INT8}", "verdict"]
    titles += ["of the limit", "limit / rival"]
    lines = ["| " + " | ".join(titles) + " |", "| " + "--- | " * len(titles)]
    for (shape, routing, tokens), rows in found.items():
        steps = [f"{rows[n]['step_ms']:.4g}" if n in rows else "" for n in names]
        found_here = verdict(rows, tokens)
        ratio = f"**{found_here.ratio:.2f}**" if found_here.ratio is not None else ""
        judged = [ratio, cell(found_here.target), cell(found_here.over_int8), found_here.word]
        limit = [cell(rows["ours"]["of_limit"]), cell(found_here.limit)]
        lines.append("| " + " | ".join([shape, routing, str(tokens), *steps, *judged, *limit]) + " |")
    return "\n".join(line.rstrip() for line in lines)


def backward_over_forward(found: dict[Key, Rows], name: str) -> str:
    over = {
        k: rows[name]["backward_ms"] / rows[name]["forward_ms"] for k, rows in found.items() if name in rows
    }
    if not over:
        return ""
    above = [f"{s} {r} T = {t} {ratio:.2f}" for (s, r, t), ratio in over.items() if ratio > MOST_BACKWARD]
    span = f"{min(over.values()):.2f} to {max(over.values()):.2f}"
    return f"backward / forward of {name}: {span}, above {MOST_BACKWARD}: {', '.join(above) or 'none'}"


def summary(found: dict[Key, Rows]) -> str:
    """How many lines met their targets, what new tensors for gradients cost, backward over forward."""
    words = [verdict(rows, tokens).word for (_, _, tokens), rows in found.items()]
    main = {key[2]: rows for key, rows in found.items() if key[:2] == (MAIN, "uniform")}
    fresh = [f"T = {t} {cell(over_fastest_rival(rows, 'ours-fresh'))}" for t, rows in main.items()]
    lines = [
        f"verdicts: {words.count('met')} met, {words.count('missed')} missed, "
        f"{words.count('beyond the limit')} beyond the limit",
        f"ours-fresh / fastest rival, {MAIN}: {', '.join(fresh)}",
        backward_over_forward(found, "ours"),
        backward_over_forward(found, "ours-fresh"),
    ]
    return "\n".join(line for line in lines if line)


def draw(found: dict[Key, Rows], picture: Path) -> None:
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
        if name != INT8:  # the limit is that of bf16 weights, twice as many bytes
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
    figure.suptitle(f"One layer of {MAIN}, bf16, two threads", fontsize=11)
    figure.legend(loc="lower center", ncols=6, frameon=False, fontsize=9, columnspacing=1.5)
    figure.tight_layout(rect=(0, 0.11, 1, 1))
    figure.savefig(picture, metadata={"Date": None})


def main() -> int:
    """Exit status 1 where a line is missing: peers.py failed, for want of memory say."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("figures", type=Path, help="JSON lines of peers.py, read and added to")
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--quick", action="store_true", help="the main layer only")
    size.add_argument("--all", action="store_true", help="every layer at 2048 tokens too")
    parser.add_argument("--redraw", action="store_true", help="run nothing")
    parser.add_argument("--picture", type=Path, help="an SVG file")
    args = parser.parse_args()
    complete = args.redraw or run_missing(args.figures, runs(args.quick, args.all))
    found = read(args.figures)
    print(table(found), summary(found), sep="\n\n")
    if args.picture:
        draw(found, args.picture)
    return 0 if complete else 1


if __name__ == "__main__":
    sys.exit(main())
