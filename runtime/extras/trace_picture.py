"""A timeline as a picture: a few rounds, and one of them close up. Needs matplotlib, which only this module imports."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stepgraph.graphs.capture import MAIN
from stepgraph.graphs.spans import BETWEEN, LAUNCHER, Span
from stepgraph.sampling.fields import is_int

if TYPE_CHECKING:
    from stepgraph.runtime.trace import Interval, Timeline

DPI = 100
SIZE = (16.0, 7.2)  # inches
MARGIN = 140  # pixels, for the names of the streams
HEIGHT = 0.62  # of a span, where lanes are one apart
MOST_LEVELS = 3  # of labels over or under a lane
LETTER = 6.4  # pixels that a letter of a label takes

HOST, WAIT = "#d62728", "#ffffff"
COLOURS = {  # by the first word of a stage's name
    "target_verify": "#4c78a8",
    "accept": "#72b7b2",
    "draft_prefill": "#f2a14a",
    "draft_decode": "#f6c98a",
    "propose": "#f2a14a",
    "look_up": "#d9b38c",
    "choose_draft": "#8bbf69",
    "show": "#c9b8e0",
    "place": "#9d86c4",
    BETWEEN.split()[0]: "#d9d9d9",
}
OTHER = "#b0b7bf"


def draw(timeline: Timeline, path: Path, rounds: int, title: str) -> None:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise RuntimeError("Timeline.save_picture(): matplotlib is missing; pip install 'stepgraph[pictures]' brings it") from error

    if not is_int(rounds) or rounds < 1:
        raise ValueError(f"Timeline.save_picture.rounds: got {rounds!r}, want a whole number >= 1")
    extents = timeline.extents()
    if not extents:
        raise ValueError("Timeline.save_picture: got a timeline without rounds, want one with at least one")
    shown = _middle(tuple(extents), rounds)
    figure = Figure(figsize=SIZE, dpi=DPI, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    above, below = figure.subplots(2, 1)
    figure.suptitle(title or _title(timeline), fontsize=13)

    begin, end = extents[shown[0]][0], extents[shown[-1]][1]
    _panel(above, timeline, (begin, end), begin)
    for number in shown:
        start, stop = extents[number]
        above.axvline((start - begin) / 1e6, color="#777777", linewidth=0.8, linestyle=":")
        above.text((start + stop - 2 * begin) / 2e6, -1.12, f"round {number}: {(stop - start) / 1e6:.2f} ms", ha="center", fontsize=10)

    middle = shown[len(shown) // 2]
    window = _close_up(timeline, middle, extents[middle])
    above.axvspan((window[0] - begin) / 1e6, (window[1] - begin) / 1e6, color="#fff3c4", zorder=0)
    below.set_facecolor("#fffbec")
    _panel(below, timeline, window, begin)
    below.set_xlabel(f"ms; round {middle} close up, the yellow part of the picture above")
    _legend(figure, timeline)
    figure.savefig(path, format="png")


def _title(timeline: Timeline) -> str:
    summary = timeline.summary()
    told = f"{summary.rounds} rounds of {summary.round_ns / 1e6:.2f} ms on {timeline.backend}"
    if summary.share_hidden is None:
        return told
    each = max(summary.rounds, 1) * 1e6
    return (
        f"{told}: host nodes {summary.host_ns / each:.2f} ms a round, {summary.share_hidden:.0%} of it hidden under the main stream, "
        f"which waits {summary.exposed_wait_ns / each:.2f} ms a round"
    )


def _middle(numbers: Sequence[int], count: int) -> Sequence[int]:
    first = max(0, (len(numbers) - count) // 2)
    return numbers[first : first + count]


def _close_up(timeline: Timeline, number: int, extent: Interval) -> Interval:
    """What follows the longest stage, where that one is most of a round; else the whole round."""
    stages = [span for span in timeline.spans if (span.round, span.stream, span.kind) == (number, MAIN, "stage")]
    longest = max(stages, key=lambda span: span.end_ns - span.start_ns)
    rest = extent[1] - longest.end_ns
    if longest.end_ns - longest.start_ns < (extent[1] - extent[0]) // 2 or not rest:
        return extent
    return longest.end_ns - rest // 12, extent[1] + rest // 24


def _panel(axes: Any, timeline: Timeline, window: Interval, begin: int) -> None:
    """One lane per stream; what is too narrow for its name gets it over the main lane, or under the others."""
    streams = timeline.streams
    axes.set_xlim((window[0] - begin) / 1e6, (window[1] - begin) / 1e6)
    lanes = [number + (0.55 if stream == LAUNCHER else 0.0) for number, stream in enumerate(streams)]  # room for labels above it
    axes.set_ylim(lanes[-1] + (0.45 if streams[-1] == LAUNCHER else 1.0), -1.4)
    axes.set_yticks(lanes, streams)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel("ms")
    width = SIZE[0] * DPI - MARGIN
    pixels = width / (window[1] - window[0])  # per nanosecond
    for lane, stream in zip(lanes, streams, strict=True):
        spans = [span for span in timeline.spans if span.stream == stream and span.end_ns > window[0] and span.start_ns < window[1]]
        narrow: list[tuple[float, str, str]] = []  # pixel, name, kind
        for span in spans:
            start, end = max(span.start_ns, window[0]), min(span.end_ns, window[1])
            _bar(axes, span, lane, (start - begin) / 1e6, max(end - start, 1.5 / pixels) / 1e6)
            text = _text(span)
            if len(text) * LETTER < (end - start) * pixels:
                colour = "white" if span.kind == "host" or _colour(span) == COLOURS["target_verify"] else "#222222"
                behind = {"facecolor": axes.get_facecolor(), "edgecolor": "none", "pad": 1.5} if span.kind == "wait" else None
                x = (start + end - 2 * begin) / 2e6
                axes.text(x, lane, text, ha="center", va="center", fontsize=9, color=colour, bbox=behind, zorder=4, clip_on=True)
            elif span.kind == "host" or (span.kind == "stage" and stream == MAIN):
                narrow.append((((start + end) / 2 - window[0]) * pixels, text, span.kind))
        _labels(axes, narrow, lane, -1 if stream == MAIN else 1, width)


def _bar(axes: Any, span: Span, lane: float, start: float, width: float) -> None:
    if span.kind == "wait":
        height = HEIGHT / 3 if span.stream == MAIN else 0.04  # of a side stream it is rest
        hatch = "////" if span.stream == MAIN else None
        axes.barh(lane, width, left=start, height=height, color=WAIT, edgecolor="#999999", hatch=hatch, linewidth=0.5)
    else:
        over = 3 if span.kind == "host" else 2
        axes.barh(lane, width, left=start, height=HEIGHT, color=_colour(span), edgecolor="white", linewidth=0.4, zorder=over)


def _labels(axes: Any, narrow: Sequence[tuple[float, str, str]], lane: float, side: int, width: float) -> None:
    """Names with lines to what they name, on the first level with room for them; without room there is the legend."""
    free = [0.0] * MOST_LEVELS
    left, right = axes.get_xlim()
    named = ("", 0.0)
    for pixel, text, kind in narrow:
        half = len(text) * LETTER / 2 + 3
        middle = min(max(pixel, half), width - half)
        level = next((level for level in range(MOST_LEVELS) if free[level] <= middle - half), None)
        word = text.split()[0]
        if level is None or (word == named[0] and pixel - named[1] < half):
            continue
        free[level], named = middle + half, (word, pixel)
        edge, at = lane + side * HEIGHT / 2, lane + side * (HEIGHT / 2 + 0.14 + 0.21 * level)
        x, place = (left + each / width * (right - left) for each in (pixel, middle))
        axes.plot([x, x], [edge, at], color="#999999", linewidth=0.6, zorder=1)
        colour = HOST if kind == "host" else "#333333"
        axes.text(place, at, text, ha="center", va="bottom" if side < 0 else "top", fontsize=8.5, color=colour)


def _text(span: Span) -> str:
    if span.kind == "wait":
        return f"waits for {span.name}" if span.stream != LAUNCHER else f"waits for {span.name} of a round"
    return span.name


def _colour(span: Span) -> str:
    return HOST if span.kind == "host" else COLOURS.get(span.name.split()[0], OTHER)


def _legend(figure: Any, timeline: Timeline) -> None:
    from matplotlib.patches import Patch

    words = dict.fromkeys(span.name.split()[0] for span in timeline.spans if span.kind == "stage")
    told = {"show": "show: state to the host", "place": "place: masks to the device", "between": BETWEEN}
    patches = [Patch(color=COLOURS[word], label=told.get(word, word)) for word in words if word in COLOURS]
    others = [word for word in words if word not in COLOURS]
    if others:
        patches.append(Patch(color=OTHER, label=", ".join(others[:3]) + (", ..." if len(others) > 3 else "")))
    if any(span.kind == "host" for span in timeline.spans):
        patches.append(Patch(color=HOST, label="host node"))
    patches.append(Patch(facecolor=WAIT, edgecolor="#999999", hatch="////", label="waits"))
    figure.legend(handles=patches, loc="outside lower center", ncols=min(len(patches), 11), fontsize=8.5, columnspacing=1.3, frameon=False)
