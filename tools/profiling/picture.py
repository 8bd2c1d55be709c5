"""Draws a timeline: some rounds, and below them one round in detail. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stepgraph.graphs.context import MAIN
from stepgraph.graphs.spans import BETWEEN_ROUNDS, LAUNCHING_THREAD, Span
from stepgraph.runtime.trace import Timeline

DPI = 100
FIGURE_INCHES = (16.0, 7.2)  # inches
MARGIN_PIXELS = 140  # pixels for the stream names
BAR_HEIGHT = 0.62  # of a bar; lanes are 1 apart
MAX_LABEL_LEVELS = 3  # of labels above or below a lane
LETTER_PIXELS = 6.4  # pixels per letter of a label

HOST_COLOUR, WAIT_COLOUR = "#d62728", "#ffffff"
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
    BETWEEN_ROUNDS.split()[0]: "#d9d9d9",
}
OTHER_COLOUR = "#b0b7bf"

Interval = tuple[int, int]  # start and end in nanoseconds


def draw(timeline: Timeline, path: Path, *, rounds: int = 3, title: str = "") -> None:
    """Write a PNG of some rounds from the middle of a timeline. RuntimeError if matplotlib is not installed."""
    figure = _figure()
    if rounds < 1:
        raise ValueError(f"rounds: got {rounds}, expected an integer >= 1")
    spans, streams, all_rounds = timeline.spans, timeline.streams, timeline.extents()
    if not all_rounds:
        raise ValueError("got a timeline without rounds, expected at least one")
    first = max(0, (len(all_rounds) - rounds) // 2)
    extents = dict(list(all_rounds.items())[first : first + rounds])

    overview, detail = figure.subplots(2, 1)
    figure.suptitle(title or _title(timeline), fontsize=13)

    numbers = tuple(extents)
    begin, end = extents[numbers[0]][0], extents[numbers[-1]][1]
    _panel(overview, spans, streams, (begin, end), begin)
    for number, (start, stop) in extents.items():
        overview.axvline((start - begin) / 1e6, color="#777777", linewidth=0.8, linestyle=":")
        overview.text((start + stop - 2 * begin) / 2e6, -1.12, f"round {number}: {(stop - start) / 1e6:.2f} ms", ha="center", fontsize=10)

    middle = numbers[len(numbers) // 2]
    window = _detail_window(spans, middle, extents[middle])
    overview.axvspan((window[0] - begin) / 1e6, (window[1] - begin) / 1e6, color="#fff3c4", zorder=0)
    detail.set_facecolor("#fffbec")
    _panel(detail, spans, streams, window, begin)
    detail.set_xlabel(f"ms; detail of round {middle}, the yellow part of the upper panel")
    _legend(figure, spans)
    figure.savefig(path, format="png")


def draw_lengths(timeline: Timeline, path: Path, title: str = "") -> None:
    """Write a PNG of the draft length and the account of every round. RuntimeError if matplotlib is not installed."""
    figure, extents = _figure(), timeline.extents()
    points = [
        (extents[each.round][0] / 1e6, each.drafts, each.account * 1e3, each.model) for each in timeline.lengths if each.round in extents
    ]
    if not points:
        raise ValueError("got a timeline without draft lengths, expected one of an engine with draft_length='auto'")
    times, drafts, accounts, modelled = zip(*points, strict=True)
    unmodelled = [(time - times[0], length) for time, length, model in zip(times, drafts, modelled, strict=True) if not model]
    upper, lower = figure.subplots(2, 1, sharex=True)
    figure.suptitle(title or f"{len(points)} rounds, on average {sum(drafts) / len(drafts):.2f} drafts", fontsize=13)
    upper.step([time - times[0] for time in times], drafts, where="post", color=COLOURS["draft_prefill"])
    if unmodelled:
        upper.plot(*zip(*unmodelled, strict=True), "o", markersize=3, label="without the draft model")
        upper.legend(loc="upper right")
    upper.set_ylabel("drafts of a round")
    lower.plot([time - times[0] for time in times], accounts, color=COLOURS["target_verify"])
    lower.set_ylabel("account, ms")
    lower.set_xlabel("ms")
    figure.savefig(path, format="png")


def _figure() -> Any:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise RuntimeError("a picture needs matplotlib: pip install 'stepgraph[pictures]'") from error
    figure = Figure(figsize=FIGURE_INCHES, dpi=DPI, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _title(timeline: Timeline) -> str:
    summary = timeline.summary()
    title = f"{summary.rounds} rounds, median {summary.round_ns / 1e6:.2f} ms, on {timeline.backend}"
    if summary.share_hidden is None:
        return title
    per_round = max(summary.rounds, 1) * 1e6
    return (
        f"{title}: host nodes {summary.host_ns / per_round:.2f} ms per round, {summary.share_hidden:.0%} of it hidden under the "
        f"main stream, which waits {summary.exposed_wait_ns / per_round:.2f} ms per round"
    )


def _detail_window(spans: Sequence[Span], number: int, extent: Interval) -> Interval:
    """The part of a round after its longest stage, if that stage takes most of the round; otherwise the whole round."""
    stages = [span for span in spans if (span.round, span.stream, span.kind) == (number, MAIN, "stage")]
    longest = max(stages, key=lambda span: span.end_ns - span.start_ns)
    rest = extent[1] - longest.end_ns
    if longest.end_ns - longest.start_ns < (extent[1] - extent[0]) // 2 or not rest:
        return extent
    return longest.end_ns - rest // 12, extent[1] + rest // 24


def _panel(axes: Any, spans: Sequence[Span], streams: Sequence[str], window: Interval, begin: int) -> None:
    """One lane per stream. A bar that is too narrow for its name is labelled above the main lane, or below the other lanes."""
    axes.set_xlim((window[0] - begin) / 1e6, (window[1] - begin) / 1e6)
    lanes = [number + (0.55 if stream == LAUNCHING_THREAD else 0.0) for number, stream in enumerate(streams)]  # room for labels above it
    axes.set_ylim(lanes[-1] + (0.45 if streams[-1] == LAUNCHING_THREAD else 1.0), -1.4)
    axes.set_yticks(lanes, streams)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel("ms")
    width = FIGURE_INCHES[0] * DPI - MARGIN_PIXELS
    pixels = width / (window[1] - window[0])  # per nanosecond
    for lane, stream in zip(lanes, streams, strict=True):
        narrow: list[tuple[float, str, str]] = []  # pixel, name, kind
        for span in spans:
            if span.stream != stream or span.end_ns <= window[0] or span.start_ns >= window[1]:
                continue
            start, end = max(span.start_ns, window[0]), min(span.end_ns, window[1])
            _bar(axes, span, lane, (start - begin) / 1e6, max(end - start, 1.5 / pixels) / 1e6)
            text = _text(span)
            if len(text) * LETTER_PIXELS < (end - start) * pixels:
                colour = "white" if span.kind == "host" or _colour(span) == COLOURS["target_verify"] else "#222222"
                box = {"facecolor": axes.get_facecolor(), "edgecolor": "none", "pad": 1.5} if span.kind == "wait" else None
                x = (start + end - 2 * begin) / 2e6
                axes.text(x, lane, text, ha="center", va="center", fontsize=9, color=colour, bbox=box, zorder=4, clip_on=True)
            elif span.kind == "host" or (span.kind == "stage" and stream == MAIN):
                narrow.append((((start + end) / 2 - window[0]) * pixels, text, span.kind))
        _labels(axes, narrow, lane, -1 if stream == MAIN else 1, width)


def _bar(axes: Any, span: Span, lane: float, start: float, width: float) -> None:
    if span.kind == "wait":
        height = BAR_HEIGHT / 3 if span.stream == MAIN else 0.04  # a side stream that waits is idle
        hatch = "////" if span.stream == MAIN else None
        axes.barh(lane, width, left=start, height=height, color=WAIT_COLOUR, edgecolor="#999999", hatch=hatch, linewidth=0.5)
    else:
        z_order = 3 if span.kind == "host" else 2
        axes.barh(lane, width, left=start, height=BAR_HEIGHT, color=_colour(span), edgecolor="white", linewidth=0.4, zorder=z_order)


def _labels(axes: Any, narrow: Sequence[tuple[float, str, str]], lane: float, side: int, width: float) -> None:
    """Labels with lines to their bars, on the first level with room. A label without room is omitted."""
    free = [0.0] * MAX_LABEL_LEVELS
    left, right = axes.get_xlim()
    last_word, last_pixel = "", 0.0
    for pixel, text, kind in narrow:
        half = len(text) * LETTER_PIXELS / 2 + 3
        middle = min(max(pixel, half), width - half)
        level = next((level for level in range(MAX_LABEL_LEVELS) if free[level] <= middle - half), None)
        word = text.split()[0]
        if level is None or (word == last_word and pixel - last_pixel < half):
            continue
        free[level], last_word, last_pixel = middle + half, word, pixel
        edge, y = lane + side * BAR_HEIGHT / 2, lane + side * (BAR_HEIGHT / 2 + 0.14 + 0.21 * level)
        bar_x, text_x = (left + each / width * (right - left) for each in (pixel, middle))
        axes.plot([bar_x, bar_x], [edge, y], color="#999999", linewidth=0.6, zorder=1)
        colour = HOST_COLOUR if kind == "host" else "#333333"
        axes.text(text_x, y, text, ha="center", va="bottom" if side < 0 else "top", fontsize=8.5, color=colour)


def _text(span: Span) -> str:
    if span.kind == "wait":
        return f"waits for {span.name}" if span.stream != LAUNCHING_THREAD else f"waits for {span.name} of a round"
    return span.name


def _colour(span: Span) -> str:
    return HOST_COLOUR if span.kind == "host" else COLOURS.get(span.name.split()[0], OTHER_COLOUR)


def _legend(figure: Any, spans: Sequence[Span]) -> None:
    from matplotlib.patches import Patch

    words = dict.fromkeys(span.name.split()[0] for span in spans if span.kind == "stage")
    labels = {"show": "show: state to the host", "place": "place: masks to the device", "between": BETWEEN_ROUNDS}
    patches = [Patch(color=COLOURS[word], label=labels.get(word, word)) for word in words if word in COLOURS]
    others = [word for word in words if word not in COLOURS]
    if others:
        patches.append(Patch(color=OTHER_COLOUR, label=", ".join(others[:3]) + (", ..." if len(others) > 3 else "")))
    if any(span.kind == "host" for span in spans):
        patches.append(Patch(color=HOST_COLOUR, label="host node"))
    patches.append(Patch(facecolor=WAIT_COLOUR, edgecolor="#999999", hatch="////", label="waits"))
    figure.legend(handles=patches, loc="outside lower center", ncols=min(len(patches), 11), fontsize=8.5, columnspacing=1.3, frameon=False)
