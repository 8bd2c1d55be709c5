"""The demonstration as one HTML page, without scripts and network: answers coloured by origin, a table, the timeline of some rounds."""

from __future__ import annotations

import html
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from stepgraph.graphs.spans import Span
from stepgraph.runtime.commands.terminal import ORIGINS
from stepgraph.runtime.trace import StageTime, Timeline

WIDTH = 2400  # of the timeline, which scrolls
ROW = 26
STYLE = """
:root { color-scheme: light dark; --text: #1b1f24; --back: #ffffff; --line: #d0d7de; --soft: #57606a; --draft: #c6efd0; --look_up: #b8e3f5;
  --forced: #e7d4fa; --target: #ffe3b3; --stage: #4c8dd6; --host: #b45fc9; --wait: #c9ced4; --launch: #d98b3a }
@media (prefers-color-scheme: dark) { :root { --text: #e6edf3; --back: #0d1117; --line: #30363d; --soft: #9aa4af; --draft: #17502a;
  --look_up: #0f4a63; --forced: #4a2a6b; --target: #5f4410; --stage: #3f7fc4; --host: #a04fb5; --wait: #3a4149; --launch: #b8702a } }
body { font: 16px/1.5 system-ui, sans-serif; color: var(--text); background: var(--back); max-width: 64rem;
  margin: 2rem auto; padding: 0 1rem }
pre { white-space: pre-wrap; overflow-wrap: anywhere; border: 1px solid var(--line); border-radius: 6px; padding: .8rem }
.prompt { color: var(--soft) } .scroll { overflow-x: auto } table { border-collapse: collapse }
th, td { padding: .25rem .8rem; border-bottom: 1px solid var(--line); text-align: right }
th:first-child, td:first-child { text-align: left }
mark { color: inherit; border-radius: 3px } svg text { fill: var(--text); font: 12px system-ui, sans-serif }
"""
STYLE += "".join(f".{origin} {{ background: var(--{origin}) }} " for origin in ORIGINS)
STYLE += "".join(f"rect.{kind} {{ fill: var(--{kind}); background: none }} " for kind in ("stage", "host", "wait", "launch"))


class Answer(NamedTuple):
    name: str
    prompt: str
    pieces: Sequence[tuple[str, str]]  # text and the origin of its token


def page(title: str, answers: Iterable[Answer], head: Sequence[str], rows: Iterable[Sequence[str]], timeline: Timeline | None) -> str:
    legend = " ".join(f'<mark class="{origin}">{meaning}</mark>' for origin, meaning in ORIGINS.items())
    parts = [f"<h1>stepgraph: {html.escape(title)}</h1>", f"<p>Origin of each token: {legend}</p>"]
    for answer in answers:
        parts.append(f'<h2>{html.escape(answer.name)}</h2><pre class="prompt">{html.escape(answer.prompt)}</pre>')
        parts.append(f"<pre>{''.join(_piece(*piece) for piece in answer.pieces)}</pre>")
    parts.append("<h2>Variants</h2>" + _table(head, rows))
    if timeline is not None:
        parts.append("<h2>Timeline</h2>" + "".join(_timeline(timeline)))
    start = '<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
    return f"{start}<title>stepgraph: {html.escape(title)}</title><style>{STYLE}</style></head><body>{''.join(parts)}</body></html>\n"


def _piece(text: str, origin: str) -> str:
    return f'<mark class="{origin}" title="{ORIGINS[origin]}">{html.escape(text)}</mark>'


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    cells = ["".join(f"<th>{html.escape(name)}</th>" for name in head)]
    cells += ["".join(f"<td>{html.escape(cell)}</td>" for cell in row) for row in rows]
    return '<div class="scroll"><table>' + "".join(f"<tr>{row}</tr>" for row in cells) + "</table></div>"


def _timeline(timeline: Timeline) -> Iterator[str]:
    summary, spans = timeline.summary(), timeline.spans
    yield f"<p>{summary.rounds} rounds of {summary.round_ns / 1e6:.2f} ms. The pointer on a bar shows its name and time.</p>"
    begin, end = min((span.start_ns for span in spans), default=0), max((span.end_ns for span in spans), default=1)
    streams = {stream: number for number, stream in enumerate(timeline.streams)}
    height = ROW * len(streams) * 2
    yield f'<div class="scroll"><svg width="{WIDTH}" height="{height}" role="img" aria-label="timeline of {summary.rounds} rounds">'
    for stream, number in streams.items():
        yield f'<text x="0" y="{2 * ROW * number + 16}">{html.escape(stream)}</text>'
    for span in spans:
        yield _bar(span, (span.start_ns - begin) / (end - begin) * WIDTH, (span.end_ns - span.start_ns) / (end - begin) * WIDTH, streams)
    yield "</svg></div>"
    times = [(_name(stage), str(stage.count), f"{stage.median_ns / 1e6:.3f}") for stage in summary.stages]
    yield _table(("stage", "count", "median ms"), times)


def _name(work: Span | StageTime) -> str:
    return f"{work.stream}: {'wait for ' if work.kind == 'wait' else ''}{work.name}"


def _bar(span: Span, left: float, width: float, streams: dict[str, int]) -> str:
    what = f"{_name(span)}, {(span.end_ns - span.start_ns) / 1e6:.3f} ms"
    place = f'x="{left:.2f}" y="{2 * ROW * streams[span.stream] + ROW - 4}" width="{max(width, 0.5):.2f}" height="{ROW - 6}"'
    return f'<rect class="{span.kind}" {place}><title>{html.escape(what)}</title></rect>'
