"""Generates README's section about GPUs from the documents of gpu_check.py in tools/results/.

python tools/gpu_table.py            prints the section
python tools/gpu_table.py --write    writes it into README.md
python tools/gpu_table.py --check    exit code 1 if README.md differs
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parent.parent))  # for tools.*

from tools.gpu.checks.document import FAILED_VERDICTS

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "tools" / "results"
README = ROOT / "README.md"
HEADING = "### On a GPU"
NO_RESULTS = (
    "No result of a GPU exists yet: `tools/results/` holds no document of `tools/gpu_check.py` from one.\n"
    "What is expected, and tried first: [tools/results/NOTES.md](tools/results/NOTES.md)."
)
CHANGED = "The code has changed since these runs: each figure is of the commit that is named with it."
INCOMPLETE = ("not run", "interrupted")
LISTED_PACKAGES = ("torch", "triton", "xgrammar", "llguidance", "flashinfer-python")


def documents(folder: Path) -> list[tuple[str, dict[str, Any]]]:
    """The latest complete full run on each device, by file name."""
    found: dict[str, tuple[str, dict[str, Any]]] = {}
    for path in sorted(folder.glob("*.json")):
        document = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(document, dict) or document.get("mode") != "gpu" or document["quick"] or not document["whole"]:
            continue
        known = found.get(document["device"])
        if known is None or known[1]["date"] < document["date"]:
            found[document["device"]] = path.name, document
    return [found[device] for device in sorted(found)]


def other_rows(folder: Path, document: Mapping[str, Any]) -> dict[str, tuple[str, dict[str, Any]]]:
    """For each check that this document did not complete: the file with the latest run that did, perhaps of another commit, and its row."""
    missing = {check["name"] for check in document["checks"] if check["verdict"] in INCOMPLETE}
    found: dict[str, tuple[str, str, dict[str, Any]]] = {}
    for path in sorted(folder.glob("*-part.json")):
        part = json.loads(path.read_text(encoding="utf-8"))
        if part["mode"] == "gpu" and not part["quick"] and part["device"] == document["device"]:
            for row in part["checks"]:
                if row["name"] in missing and row["verdict"] == "passed" and found.get(row["name"], ("",))[0] < part["date"]:
                    found[row["name"]] = part["date"], path.name, row | {"commit": part["commit"]}
    return {name: (file, row) for name, (_, file, row) in found.items()}


def newer_run(folder: Path, document: Mapping[str, Any]) -> str:
    """A sentence on the newest run of some checks after this document; empty if there is none."""
    newest: dict[str, Any] = {"date": document["date"]}
    for path in folder.glob("*-part.json"):
        part = json.loads(path.read_text(encoding="utf-8"))
        if part["device"] == document["device"] and not part["quick"] and part["date"] > newest["date"]:
            newest, link = part, f"[{path.name}](tools/results/{path.name})"
    if newest["date"] == document["date"]:
        return ""
    checks = newest["checks"]
    others = [f"{check['name']} {check['verdict']}" for check in checks if check["verdict"] != "passed"]
    passed = f"{len(checks) - len(others)} of {len(checks)} checks passed"
    return f"The newest run, {newest['date'][:10]} at commit {newest['commit']} ({link}): {'; '.join([passed, *others])}. "


def section(folder: Path) -> str:
    """The whole section with its heading."""
    lines = list[str]()
    for name, document in documents(folder):
        lines += [*_device(name, document, other_rows(folder, document)), newer_run(folder, document) + CHANGED, ""]
    return "\n".join([HEADING, "", *(lines or [NO_RESULTS])]).rstrip() + "\n"


def _device(name: str, document: Mapping[str, Any], others: Mapping[str, tuple[str, Mapping[str, Any]]]) -> Iterator[str]:
    versions = ", ".join(f"{package} {document['versions'][package]}" for package in LISTED_PACKAGES)
    bad = [f"{check['name']} {check['verdict']}" for check in document["checks"] if check["verdict"] in FAILED_VERDICTS]
    passed = sum(check["verdict"] == "passed" for check in document["checks"])
    link = "" if document["host_link"] == "native" else f"; host link {document['host_link']}"
    yield (
        f"**{document['device']}**, driver {document['driver']}, CUDA {document['cuda']}, Python {document['python']}, {versions}; "
        f"{document['date'][:10]}, commit {document['commit']} ([tools/results/{name}](tools/results/{name})): "
        f"{passed} of {len(document['checks'])} checks passed{'; ' + ', '.join(bad) if bad else ''}{link}. "
        "How it was run, and the changes after it: [tools/results/NOTES.md](tools/results/NOTES.md)."
    )
    yield ""
    yield from _table(("goal", "expected", "found", ""), (_goal(goal) for goal in document["goals"]))
    figures = {check["name"]: check["figures"] for check in document["checks"]} | {
        name: row["figures"] for name, (_, row) in others.items()
    }
    if notes := " ".join(_explanations(figures)):
        yield notes
        yield ""
    if others:
        runs = (f"{check} at commit {row['commit']} ([{file}](tools/results/{file}))" for check, (file, row) in sorted(others.items()))
        yield f"That run had no time for some checks. They passed in others: {', '.join(runs)}."
        yield ""
    rounds = [row for key, cell in figures.get("constrained_rounds", {}).items() if "over_free" in cell for row in [_round(key, cell)]]
    if rounds:
        yield from _table(("a round", "p50, us", "schema / free", "recursive / free", "host / free", "Python callbacks / free"), rounds)
    loops = [
        (f"{label} {key}", f"{cell['ratio']['median']:.2f}", f"{cell['ratio']['p25']:.2f} to {cell['ratio']['p75']:.2f}")
        for check, label in (("against_hand_written_loop", "hand-written loop,"), ("against_transformers", "transformers, 1B,"))
        for key, cell in figures.get(check, {}).items()
        if isinstance(cell, Mapping) and "ratio" in cell
    ]
    if loops:
        yield from _table(("time over ours", "ratio", "quartiles"), loops)
    sampled = [
        (f"{key}, {variant}", f"{cell['variants'][variant]['p50_us']:.0f}", f"{ratio['median']:.3f}")
        for key, cell in figures.get("sampled_rounds", {}).items()
        if isinstance(cell, Mapping) and "over_greedy" in cell
        for variant, ratio in cell["over_greedy"].items()
    ]
    if sampled:
        yield from _table(("a round that samples", "p50, us", "over a greedy one"), sampled)


def _explanations(figures: Mapping[str, Any]) -> Iterator[str]:
    cells = figures.get("mask_time_is_hidden", {}).items()
    if shares := {name: cell["share_hidden"] for name, cell in cells if isinstance(cell, Mapping)}:
        least = min(shares, key=shares.__getitem__)
        yield (
            f"The share of host mask time hidden is the least of {len(shares)} rounds whose grammars host nodes follow: {least}. "
            f"The median of these rounds is {statistics.median(shares.values()):.3g}. Grammars with tables are followed by kernels instead."
        )
    if speed := figures.get("weights_per_second", {}).get("copy_gigabytes_per_second"):
        yield (
            f"Copy bandwidth, {speed:,.0f} GB/s, counts the bytes that a copy reads and those that it writes. Reading alone is faster, "
            "so a share above 1 is possible."
        )


def _goal(goal: Mapping[str, Any]) -> tuple[str, ...]:
    found = "" if goal["found"] is None else f"{goal['found']:.3g}"
    verdict = goal["verdict"] if goal["verdict"] == "met" else f"**{goal['verdict']}**: {goal['reason']}"
    return goal["name"], goal["expected"], found, verdict


def _round(name: str, cell: Mapping[str, Any]) -> tuple[str, ...]:
    over = {key: f"{ratio['median']:.3f}" for key, ratio in cell["over_free"].items()}
    free = f"{cell['variants']['free']['p50_us']:.0f}"
    return name, free, *(over.get(key, "") for key in ("schema", "recursive", "schema, host nodes", "schema, Python callbacks"))


def _table(head: Sequence[str], rows: Iterator[tuple[str, ...]] | Sequence[tuple[str, ...]]) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield f"|{'---|' * len(head)}"
    for row in rows:
        yield f"| {' | '.join(row)} |"
    yield ""


def replace_section(text: str, section_text: str) -> str:
    """README with its section replaced by this one."""
    found = re.search(rf"^{re.escape(HEADING)}\n.*?(?=^##? |^### |\Z)", text, re.MULTILINE | re.DOTALL)
    if found is None:
        raise ValueError(f"README.md: got no line {HEADING!r}, expected one before the section")
    rest = text[found.end() :]
    return text[: found.start()] + section_text + ("\n" + rest if rest else "")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--write", action="store_true", help="write it into README.md")
    what.add_argument("--check", action="store_true", help="compare it with README.md")
    options = parser.parse_args(arguments)
    text, section_text = README.read_text(encoding="utf-8"), section(RESULTS)
    if options.write:
        README.write_text(replace_section(text, section_text), encoding="utf-8")
    elif options.check:
        if replace_section(text, section_text) != text:
            print("README.md: the section about GPUs is outdated; run python tools/gpu_table.py --write", file=sys.stderr)
            return 1
    else:
        print(section_text, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
