"""`python -m amx_sft_moe timeline`: options, what is asked for, the exit status."""

from __future__ import annotations

import argparse
import os
import stat
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from ..standard_output import printing
from . import analysis, key_figures, read
from .comparison import compare
from .errors import TimelineError
from .filters import Filters, parse_name, parse_threads, parse_window
from .machine import measure_limits
from .output import FORMATS, TIME_UNITS, write
from .passes import inside_range, skip_first
from .reports import NSYS_REPORTS, Report
from .table import Bounds, Timeline

OWN_REPORTS: dict[str, Callable[[Timeline], Report]] = {
    "configuration": key_figures.configuration,
    "step_sum": analysis.step_sum,
    "phase_sum": key_figures.phase_sum,
    "waiting_sum": analysis.waiting_sum,
    "waiting_by_thread": analysis.waiting_by_thread,
    "gap_sum": analysis.gap_sum,
    "gaps": analysis.gaps,
    "outliers": analysis.outliers,
}
_EPILOG = """\
Reports as in `nsys stats`: {nsys}.
Reports of our own: {own}.
Without --report: all of these that have something to say, except nvtx_pushpop_trace and gaps (and overlap,
which needs --overlap A B). docs/timeline.md explains each.
"""


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a number above zero, got {text}")
    return value


def _file(text: str) -> Path:
    if not Path(text).name:
        raise argparse.ArgumentTypeError(f"expected the name of a file, got {text!r}")
    return Path(text)


def _count(text: str, least: int = 0) -> int:
    value = int(text)
    if value < least:
        raise argparse.ArgumentTypeError(f"expected {least} or more, got {text}")
    return value


def _count_from_1(text: str) -> int:
    return _count(text, 1)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m amx_sft_moe timeline",
        description="Where the time of steps went: JSON lines and traces of this package, Chrome traces of "
        "torch, SQLite exports of Nsight Systems.",
        epilog=_EPILOG.format(
            nsys=", ".join(name for name in NSYS_REPORTS if name != "counter_sum"),
            own=", ".join([*OWN_REPORTS, "key_figures", "overlap", "counter_sum"]),
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "files",
        nargs="*",
        metavar="FILE",
        type=Path,
        help="JSON lines or text dumps, Chrome traces, SQLite exports; several are read together",
    )
    add(
        "--compare",
        nargs=2,
        metavar=("BEFORE", "AFTER"),
        type=Path,
        help="two files, and each phase's share of the change",
    )
    add(
        "--report",
        "-r",
        action="append",
        default=[],
        metavar="NAME",
        help="one or several, also separated by commas",
    )
    add("--format", "-f", choices=FORMATS, default="column", help="of the reports (column)")
    add(
        "--timeunit",
        choices=list(TIME_UNITS),
        default=None,
        metavar="UNIT",
        help="ns, us, ms or s, also in nsys's words (nsec, milliseconds, ...); ns by default, ms in HTML",
    )
    add(
        "--output",
        "-o",
        default="-",
        metavar="PREFIX",
        help="writes PREFIX_REPORT.csv and so on; - is standard output",
    )
    add("--rows", type=_count, default=30, help="most rows of text (30); 0: all")
    add("--html", type=_file, metavar="FILE", help="one self-contained page with pictures and tables")
    add("--png", type=Path, metavar="FOLDER", help="the pictures as PNG files")
    chosen = parser.add_argument_group("what is looked at")
    chosen.add_argument("--filter-name", metavar="REGEX", help="ranges and phases whose name it finds")
    chosen.add_argument(
        "--filter-nvtx",
        metavar="NAME[/INDEX]",
        help="what runs inside ranges of that name, or the INDEXth of them",
    )
    chosen.add_argument(
        "--filter-thread",
        metavar="0,2,4-7",
        help="ranges and waiting of these threads; passes and phases stay the whole team's",
    )
    chosen.add_argument(
        "--filter-time",
        metavar="BEGIN/END",
        help="such as 1s/1.5s, from where the earliest range of a file begins",
    )
    chosen.add_argument("--step-range", metavar="REGEX", help="ranges of such names are the steps")
    chosen.add_argument(
        "--skip",
        type=_count,
        default=0,
        metavar="N",
        help="first passes of each kind, operator and layer to leave out of steps",
    )
    chosen.add_argument(
        "--max-ranges",
        type=_count_from_1,
        default=Bounds.ranges,
        help=f"most ranges kept a file ({Bounds.ranges:,})",
    )
    judged = parser.add_argument_group("what it is measured against")
    judged.add_argument(
        "--peak-gflops",
        type=_positive,
        metavar="GFLOP/S",
        help="peak of the kernel's instruction with all threads (the file's own)",
    )
    judged.add_argument(
        "--bandwidth",
        type=_positive,
        metavar="GB/S",
        help="of reading memory with all threads (the file's own)",
    )
    judged.add_argument(
        "--measure",
        action="store_true",
        help="measure both on this machine now, for recordings made on it (1 GiB; a second where nothing else "
        "runs)",
    )
    judged.add_argument(
        "--overlap", nargs=2, metavar=("A", "B"), help="two kinds of ranges: names (regex), or kind:copy"
    )
    judged.add_argument(
        "--outlier-score",
        type=_positive,
        default=analysis.OUTLIER_SCORE,
        metavar="SCORE",
        help="scaled median deviations from the median beyond which a pass is an outlier "
        f"({analysis.OUTLIER_SCORE:g})",
    )
    return parser


@contextmanager
def _named(option: str) -> Iterator[None]:
    """Errors say which option's value it was: files have names and errors of their own."""
    try:
        yield
    except TimelineError as error:
        raise TimelineError(f"{option}: {error}") from error


def _load(paths: Sequence[Path], options: argparse.Namespace) -> Timeline:
    """The files with filters, limits and skipped passes applied."""
    filters = Filters()
    if options.filter_name is not None:
        with _named("--filter-name"):
            filters.name = parse_name(options.filter_name)
    if options.filter_thread is not None:
        with _named("--filter-thread"):
            filters.threads = parse_threads(options.filter_thread)
    if options.filter_time is not None:
        with _named("--filter-time"):
            filters.begin, filters.end = parse_window(options.filter_time)
    if options.step_range is not None:
        with _named("--step-range"):
            parse_name(options.step_range)
    for selector in options.overlap or ():
        with _named("--overlap"):
            parse_name(selector)
    timeline = read(paths, filters, Bounds(ranges=options.max_ranges), options.step_range)
    if options.filter_nvtx is not None:
        with _named("--filter-nvtx"):
            inside_range(timeline, options.filter_nvtx)
    skip_first(timeline, options.skip)
    if options.measure:
        measure_limits(timeline)
    if options.peak_gflops is not None:
        timeline.limits["peak_gflops"] = options.peak_gflops
    if options.bandwidth is not None:
        timeline.limits["bandwidth_gbs"] = options.bandwidth
    return timeline


def _available(options: argparse.Namespace) -> dict[str, Callable[[Timeline], Report]]:
    """Every report by name, in the order in which they are shown."""
    pair = tuple(options.overlap) if options.overlap else None
    reports = {**OWN_REPORTS, **NSYS_REPORTS}
    reports["outliers"] = lambda timeline: analysis.outliers(timeline, options.outlier_score)
    first = {"configuration": reports.pop("configuration")}
    first["key_figures"] = lambda timeline: key_figures.key_figures(timeline, pair)
    if pair:
        first["overlap"] = lambda timeline: analysis.overlap(timeline, *pair)
    return {**first, **reports}


def _reports(timeline: Timeline, options: argparse.Namespace) -> list[Report]:
    """The reports that were asked for, else those that are not empty."""
    available = _available(options)
    asked = [name.strip() for names in options.report for name in names.split(",") if name.strip()]
    for name in asked:
        if name == "overlap" and name not in available:
            raise TimelineError("the report overlap needs --overlap A B")
        if name not in available:
            known = ", ".join([*available, *({"overlap"} - available.keys())])
            raise TimelineError(f"there is no report {name!r}; there are {known}")
    if asked:
        return [available[name](timeline) for name in asked]
    made = (make(timeline) for name, make in available.items() if name not in ("nvtx_pushpop_trace", "gaps"))
    return [report for report in made if len(report.table)]


@contextmanager
def _in_place_of(path: Path) -> Iterator[Path]:
    """Where to write what takes the place of `path` when it is whole, or not at all."""
    given, path = path, path.resolve()  # of a link's target
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        _require_file(given)  # the target of /dev/stdout may have no name
        path.parent.mkdir(parents=True, exist_ok=True)
        yield partial
        partial.replace(path)
    except OSError as error:
        raise TimelineError(f"cannot write {path}: {error.strerror or error}") from error
    finally:
        with suppress(OSError):
            partial.unlink(missing_ok=True)


def _require_file(path: Path) -> None:
    """Refuses what would not be a device or a pipe any more with a file in its place: /dev/null, /dev/stdout.

    Raises the OSError of a path that cannot be looked at.
    """
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise TimelineError(f"cannot write {path}: expected a file or nothing there, got a device or a pipe")


def _write_reports(reports: Sequence[Report], options: argparse.Namespace, out: IO[str]) -> None:
    unit = options.timeunit or "ns"
    for report in reports:
        if options.output == "-":
            write(report, options.format, unit, options.rows, out)
            continue
        suffix = "txt" if options.format == "column" else options.format
        path = Path(f"{options.output}_{report.name}.{suffix}")
        with _in_place_of(path) as partial, partial.open("w", encoding="utf-8", newline="") as stream:
            write(report, options.format, unit, options.rows, stream)


def _pictures(
    timeline: Timeline, options: argparse.Namespace, comparison: Report | None
) -> list[tuple[str, str, object, str]]:
    """File name, title, figure and what to say instead, for each picture."""
    from . import figures

    window = options.filter_time is not None or options.filter_nvtx is not None
    made = [
        ("strip", "Timeline", figures.strip(timeline, window), "not drawn: no ranges with a place in time"),
        ("phases", "Phases per step", figures.stacked(timeline), "not drawn: no steps with phases"),
        ("roofline", "Roofline", figures.roofline(timeline), "not drawn: no phases with both flop and bytes"),
        ("step_times", "Step times", figures.histogram(timeline), "not drawn: no steps"),
    ]
    if comparison is not None:
        made.insert(0, ("change", "Change by phase", figures.change(comparison), "nothing changed"))
    return made


def _write_pictures(
    timeline: Timeline, reports: list[Report], options: argparse.Namespace, comparison: Report | None
) -> None:
    if options.png is None and options.html is None:
        return
    from .html import page
    from .style import png

    pictures = _pictures(timeline, options, comparison)
    if options.png is not None:
        for name, _, figure, missing in pictures:
            if figure is not None:
                with _in_place_of(options.png / f"{name}.png") as partial:
                    partial.write_bytes(png(figure))
            else:
                sys.stderr.write(f"{name}: {missing}\n")
    if options.html is not None:
        above = ("compare", "configuration", "key_figures")
        first = [report for report in reports if report.name in above]
        rest = [report for report in reports if report.name not in above]
        title = "Timeline: " + ", ".join(Path(source.path).name for source in timeline.sources)
        content = page(
            title, first, [part[1:] for part in pictures], rest, timeline.notes, options.timeunit or "ms"
        )
        with _in_place_of(options.html) as partial:
            partial.write_text(content, encoding="utf-8")


def _require_page(path: Path) -> None:
    """Refuses to put a page in the place of a file that is none, such as a recording: `--html steps.jsonl`."""
    from .html import DOCTYPE

    try:
        _require_file(path)
        with path.open("rb") as stream:
            begin = stream.read(len(DOCTYPE))
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        raise TimelineError(
            f"cannot read {path}, to see whether it is a page: {error.strerror or error}"
        ) from error
    if begin and begin.lower() != DOCTYPE.lower().encode():
        raise TimelineError(f"--html {path}: expected a page to be made there, got a file that is no page")


def _run(options: argparse.Namespace, out: IO[str]) -> int:
    if options.html is not None:
        _require_page(options.html)
    comparison = None
    if options.compare:
        before, timeline = (_load([path], options) for path in options.compare)
        comparison = compare(before, timeline)
        timeline.notes = list(dict.fromkeys([*before.notes, *timeline.notes]))
        reports = [comparison]
        if options.report or options.html:
            reports += _reports(timeline, options)
    else:
        timeline = _load(options.files, options)
        reports = _reports(timeline, options)
    for note in timeline.notes:
        sys.stderr.write(f"note: {note}\n")
    _write_pictures(timeline, reports, options, comparison)
    # With pictures alone the tables would only be in the way.
    if (
        options.report
        or options.output != "-"
        or options.format != "column"
        or not (options.png or options.html)
    ):
        _write_reports(reports, options, out)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0 done, 1 the user can mend it (standard error says what), 2 wrong options, 130 Ctrl-C."""
    parser = _parser()
    options = parser.parse_args(argv)
    if bool(options.files) == bool(options.compare):
        parser.error("give FILEs, or --compare BEFORE AFTER")
    try:
        return printing(lambda: _run(options, sys.stdout))
    except TimelineError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    except MemoryError:
        sys.stderr.write("error: not enough memory; --max-ranges and the filters keep less\n")
        return 1
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        return 130
