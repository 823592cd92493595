"""Pictures and the page: they exist, say their units, and no text stands on another."""

from __future__ import annotations

import base64
import itertools
import re
from html.parser import HTMLParser

import pytest

import timelines
from amx_sft_moe import timeline
from amx_sft_moe.timeline import figures, style
from amx_sft_moe.timeline.comparison import compare
from amx_sft_moe.timeline.html import page
from amx_sft_moe.timeline.names import PHASES
from amx_sft_moe.timeline.reports import Report, nvtx_pushpop_sum
from timelines import global_tid, write_lines, write_nsys

pd = pytest.importorskip("pandas")
matplotlib = pytest.importorskip("matplotlib")

ALL = (figures.strip, figures.stacked, figures.roofline, figures.histogram)


def many_steps(count):
    """Passes without regions, of which thousands are made quickly."""
    few = [
        {key: value for key, value in r.items() if key != "regions"}
        for r in timelines.records(50, 2, spans=False)
    ]
    for number in range(count):
        for record in few[number % 50 * 2 : number % 50 * 2 + 2]:
            shift = number // 50 * 10**12
            yield record | {"begin_ns": record["begin_ns"] + shift, "end_ns": record["end_ns"] + shift}


def texts(figure):
    """Every text that is drawn, with its extent in pixels."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.text import Text

    FigureCanvasAgg(figure).draw()
    renderer = figure.canvas.get_renderer()
    hidden = set()
    for axes in figure.axes:
        for axis in (axes.xaxis, axes.yaxis):
            drawn = {id(tick) for tick in axis._update_ticks()}  # those within the limits
            for tick in (*axis.get_major_ticks(), *axis.get_minor_ticks()):
                hidden |= {id(tick.label1), id(tick.label2)} if id(tick) not in drawn else set()
    return [
        (text.get_text(), text.get_window_extent(renderer))
        for text in figure.findobj(Text)
        if text.get_text().strip() and text.get_visible() and id(text) not in hidden
    ]


def assert_readable(figure):
    width, height = figure.get_size_inches() * figure.dpi
    found = texts(figure)
    assert found
    for name, extent in found:
        assert min(extent.x0, extent.y0) >= -1, name
        assert extent.x1 <= width + 1, name
        assert extent.y1 <= height + 1, name
    for (one, a), (other, b) in itertools.combinations(found, 2):
        shared = min(a.x1, b.x1) - max(a.x0, b.x0), min(a.y1, b.y1) - max(a.y0, b.y0)
        assert min(shared) < 1, f"{one!r} and {other!r} overlap"


class TestPictures:
    @pytest.mark.parametrize("threads", [2, 64])
    def test_threads(self, tmp_path, threads):
        read = timeline.read(write_lines(tmp_path / "f", timelines.records(3, threads)))
        for draw in ALL:
            assert_readable(draw(read))

    @pytest.mark.parametrize("steps", [1, 3, 3000])
    def test_steps(self, tmp_path, steps):
        read = timeline.read(write_lines(tmp_path / "f", many_steps(steps)))
        assert figures.strip(read) is None  # without regions there is nothing on threads
        for draw in (figures.stacked, figures.histogram):
            assert_readable(draw(read))

    def test_axes_have_units(self, tmp_path):
        read = timeline.read(write_lines(tmp_path / "f", timelines.records(3, 2)))
        expected = {
            figures.strip: {"time, ms"},
            figures.stacked: {"wall time, ms"},
            figures.roofline: {"intensity, FLOP per byte", "rate, GFLOP/s"},
            figures.histogram: {"time of a pass, ms"},
        }
        for draw, labels in expected.items():
            assert labels <= {name for name, _ in texts(draw(read))}

    def test_bars_add_up_to_the_passes(self, tmp_path):
        read = timeline.read(write_lines(tmp_path / "f", timelines.records(3, 2)))
        for axes, kind in zip(figures.stacked(read).axes, ("forward", "backward"), strict=True):
            bars = list(zip(*axes.containers, strict=True))
            tops = [max(bar.get_y() + bar.get_height() for bar in of_one) for of_one in bars]
            times = read.passes.loc[read.passes["step"] == kind, "total_ns"] * 1e-6
            assert tops == pytest.approx(times.tolist(), rel=0.005)

    def test_many_passes_share_bars(self, tmp_path):
        read = timeline.read(write_lines(tmp_path / "f", many_steps(1000)))
        axes = figures.stacked(read).axes[0]
        assert len(axes.containers[0]) <= figures.MOST_BARS
        assert "each bar the mean of 9" in axes.get_title(loc="left")

    def test_the_strip_shows_who_worked_when(self, tmp_path):
        read = timeline.read(write_lines(tmp_path / "f", timelines.records(1, 4)))
        figure = figures.strip(read)
        image = next(axes.images[0].get_array() for axes in figure.axes if axes.images)
        record = next(timelines.records(1, 4))
        begin, end = record["begin_ns"], record["end_ns"]

        def at(thread, first, last):
            return tuple(image[thread, round(((first + last) / 2 - begin) / (end - begin) * image.shape[1])])

        for region in record["regions"]:
            for thread in region["threads"]:
                for name, first, last, _ in thread["spans"]:
                    if last - first > (end - begin) / 100:
                        colour = matplotlib.colors.to_rgb(style.colours(read, [name])[name])
                        assert at(thread["thread"], first, last) == pytest.approx(colour)
        region = record["regions"][2]
        waiting = min(region["threads"], key=lambda thread: thread["end_ns"])
        colour = matplotlib.colors.to_rgb(style.WAITING)
        assert at(waiting["thread"], waiting["end_ns"], region["end_ns"]) == pytest.approx(colour)

    @pytest.mark.parametrize("text_first", [True, False])
    def test_the_strip_is_of_files_with_times(self, tmp_path, text_first):
        lines = write_lines(tmp_path / "lines", timelines.records(3, 2))
        text = tmp_path / "text"
        text.write_text("".join(map(timelines.text_dump, timelines.records(9, 2, seed=5))))
        both = figures.strip(timeline.read([text, lines] if text_first else [lines, text]))
        alone = figures.strip(timeline.read(lines))
        titles = [[axes.get_title(loc="left") for axes in figure.axes] for figure in (both, alone)]
        assert titles[0] == titles[1]
        assert figures.strip(timeline.read([text, text])) is None

    def test_a_short_range_in_a_long_file_is_seen(self, tmp_path):
        rows = [(0, 10, 59, "a", 5, None, 0), (10**9, 10**9 + 5, 59, "b", 5, None, 0)]
        figure = figures.strip(timeline.read(write_nsys(tmp_path / "f", {"NVTX_EVENTS": rows}, {})))
        image = figure.axes[0].images[0].get_array()
        assert (image[0, 0] < 0.9).any()
        assert (image[0, -1] < 0.9).any()
        assert (image[0, 10:-10] == 1).all()

    def test_no_two_names_have_one_colour(self, tmp_path):
        """Names of phases and others, in one picture and beyond what one has room for."""
        rows = [(0, 10, 59, "a", 5, None, 0)]
        read = timeline.read(write_nsys(tmp_path / "f", {"NVTX_EVENTS": rows}, {}))
        names = [*PHASES, *(f"kernel {n}" for n in range(300))]
        drawn = [name for name in names if name not in ("D0_prepare+memset", "D2_quantize")]
        colour_of = style.colours(read, drawn)
        assert len(set(colour_of.values())) == len(drawn)
        assert not {style.OTHER, style.WAITING} & set(colour_of.values())

    def test_a_name_has_one_colour_in_all_pictures(self, tmp_path):
        """Which come in another order in each: by their time on the threads, by their time in passes, ..."""
        lines = []
        for i in range(3):
            names = {f"part {n}": 1e-5 * (1 + (n * 7 + i) % 17) for n in range(17)}
            spans = [[f"part {n}", i * 1000 + 50 * n, i * 1000 + 50 * n + 1 + n * 5 % 17, 1] for n in range(17)]
            busy = {name: last - first for name, first, last, _ in spans}
            thread = {
                "thread": 0,
                "begin_ns": i * 1000,
                "end_ns": i * 1000 + 900,
                "spans": spans,
                "busy_ns": busy,
            }
            region = {
                "group": "forward_down",
                "begin_ns": i * 1000,
                "end_ns": i * 1000 + 900,
                "threads": [thread],
            }
            work = {"phases_flop": dict.fromkeys(names, 10), "phases_bytes": {n: 1 + len(n) for n in names}}
            when = {"begin_ns": i * 1000, "end_ns": i * 1000 + 900}
            lines.append({"step": "forward", **when, "phases_ms": names, **work, "regions": [region]})
        read = timeline.read(write_lines(tmp_path / "f", lines))
        roof, strip, stacked = (draw(read) for draw in (figures.roofline, figures.strip, figures.stacked))
        to_hex = matplotlib.colors.to_hex
        of_strip = {
            text.get_text(): to_hex(patch.get_facecolor())
            for text, patch in zip(strip.legends[0].get_texts(), strip.legends[0].get_patches(), strict=True)
        }
        of_roof = {line.get_label().split(":")[0]: to_hex(line.get_color()) for line in roof.axes[0].lines}
        of_bars = {bars.get_label(): to_hex(bars[0].get_facecolor()) for bars in stacked.axes[0].containers}
        of_bars.pop("other")
        assert len(set(of_bars.values())) == len(of_bars) == 14
        assert len(of_roof) == 17
        for other in (of_roof, of_bars):
            assert {name: of_strip[name] for name in other} == other

    def test_more_threads_than_rows(self, tmp_path):
        rows = [(0, 10, 59, "a", global_tid(1, thread), None, 0) for thread in range(300)]
        figure = figures.strip(timeline.read(write_nsys(tmp_path / "f", {"NVTX_EVENTS": rows}, {})))
        assert "172 more threads not drawn" in figure.axes[0].get_title(loc="left")
        assert_readable(figure)

    def test_without_limits_the_roofline_says_so(self, tmp_path):
        read = timeline.read(write_lines(tmp_path / "f", timelines.records(2, 2, limits=False)))
        figure = figures.roofline(read)
        assert "limits not known" in figure.axes[0].get_title(loc="left")
        assert_readable(figure)
        for limit in ({"peak_gflops": 900.0}, {"bandwidth_gbs": 40.0}):
            read.limits = limit
            assert_readable(figures.roofline(read))

    def test_nothing_to_draw(self, tmp_path):
        read = timeline.read(write_nsys(tmp_path / "f", {"OSRT_API": [(0, 5, 27, 5, 1)]}, {1: "read"}))
        assert [draw(read) for draw in ALL] == [None] * 4

    def test_long_names_and_many(self, tmp_path):
        rows = [(i * 10, i * 10 + 9, 59, f"{i} " + "kernel<float, int>" * 20, 5, None, 0) for i in range(60)]
        assert_readable(figures.strip(timeline.read(write_nsys(tmp_path / "f", {"NVTX_EVENTS": rows}, {}))))

    def test_names_that_matplotlib_would_interpret(self, tmp_path):
        odd = ("$x_{", "_hidden", "a\nb", "$\\frac$")
        lines = [
            {
                "step": "forward",
                "begin_ns": i * 100,
                "end_ns": i * 100 + 40,
                "name": "$layer_$^",
                "phases_ms": dict.fromkeys(odd, 1e-5),
                "phases_flop": dict.fromkeys(odd, 10),
                "phases_bytes": dict.fromkeys(odd, 5),
            }
            for i in range(3)
        ]
        read = timeline.read(write_lines(tmp_path / "f", lines))
        legend = [text.get_text() for text in figures.stacked(read).axes[0].get_legend().get_texts()]
        assert sorted(legend) == sorted([r"\$x_{", " _hidden", "a b", r"\$\frac\$"])
        for draw in (figures.stacked, figures.roofline, figures.histogram):
            assert_readable(draw(read))
        rows = [(i, i + 5, 59, name, global_tid(1, i), None, 0) for i, name in enumerate(odd)]
        assert_readable(figures.strip(timeline.read(write_nsys(tmp_path / "g", {"NVTX_EVENTS": rows}, {}))))

    def test_change(self, tmp_path):
        before = timeline.read(write_lines(tmp_path / "a", timelines.records(3, 2)))
        after = timeline.read(write_lines(tmp_path / "b", timelines.records(3, 2, slower=2.0)))
        assert_readable(figures.change(compare(before, after)))
        assert figures.change(compare(before, before)) is None

    def test_matplotlib_is_left_as_it_was(self, tmp_path):
        before = dict(matplotlib.rcParams)
        figures.histogram(timeline.read(write_lines(tmp_path / "f", many_steps(3))))
        assert dict(matplotlib.rcParams) == before


class _Page(HTMLParser):
    def __init__(self):
        super().__init__()
        self.tags, self.sources, self.text = [], [], ""

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.sources += [value for name, value in attrs if name in ("src", "href")]

    def handle_data(self, data):
        self.text += data


class TestPage:
    NAME = "<script>alert(1)</script>&"

    def make(self, tmp_path):
        record = {"step": "forward", "begin_ns": 0, "end_ns": 10, "phases_ms": {"a": 1e-5}}
        read = timeline.read(write_lines(tmp_path / "f", [record]))
        rows = {"NVTX_EVENTS": [(0, 5, 59, self.NAME, 5, None, 0)]}
        report = nvtx_pushpop_sum(timeline.read(write_nsys(tmp_path / "g", rows, {})))
        pictures = [("Step times", figures.histogram(read), ""), ("Roofline", None, "not drawn: <none>")]
        return page(self.NAME, [], pictures, [report], [f"note {self.NAME}"])

    def test_it_is_self_contained(self, tmp_path):
        content = self.make(tmp_path)
        parsed = _Page()
        parsed.feed(content)
        assert not {"script", "link", "iframe"} & set(parsed.tags)
        assert not re.search(r"https?:|url\(|@import", content)
        (source,) = parsed.sources
        assert base64.b64decode(source.removeprefix("data:image/png;base64,")).startswith(b"\x89PNG")

    def test_names_are_text(self, tmp_path):
        parsed = _Page()
        parsed.feed(self.make(tmp_path))
        assert parsed.text.count(self.NAME) == 4  # title, heading, note, table
        assert "not drawn: <none>" in parsed.text

    def test_long_tables_are_cut(self):
        table = pd.DataFrame({"N": range(1000), "Met": ["no"] * 1000})
        content = page("t", [Report("r", "R", table)], [], [], [])
        assert content.count("<tr>") == 201
        assert "800 more rows" in content


@pytest.mark.filterwarnings("error")
def test_short_passes_with_times_since_1970(tmp_path):
    """Nanoseconds that a float no longer tells apart."""
    from matplotlib.image import AxesImage

    read = timeline.read(write_lines(tmp_path / "f", timelines.records(3, 2, length_ms=0.2)))
    images = []
    for shift in (0, 1_790_000_000 * 10**9):
        for table in (read.ranges, read.passes):
            table[["begin_ns", "end_ns"]] += shift
        images.append([image.get_array() for image in figures.strip(read).findobj(AxesImage)])
    assert len(images[0]) == 2
    assert all((now == later).all() for now, later in zip(*images, strict=True))
