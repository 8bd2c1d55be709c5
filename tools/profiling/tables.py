"""The report as text: for a terminal, and for a pull request."""

from __future__ import annotations

from typing import Any

Document = dict[str, Any]


def text(report: Document) -> str:
    rounds, idle, wait = report["rounds"], report["idle"], report["exposed_wait"]
    lines = [
        f"rounds {rounds['first']} to {rounds['last']} ({rounds['count']} recorded by {report['backend']}), "
        f"median {microseconds(rounds['window_ns']['median'])} us, one every {microseconds(rounds['period_ns']['median'])} us",
        "",
        f"{'stage':<28}{'stream':<8}{'runs':>7}{'total us':>13}{'us/round':>11}{'share':>8}",
    ]
    for stage in report["stages"]:
        lines.append(
            f"{stage['name']:<28}{stage['stream']:<8}{stage['runs']:>7}{microseconds(stage['total_ns']):>13}"
            f"{microseconds(stage['median_per_round_ns']):>11}{percent(stage['share']):>8}"
        )
    lines += ["", *_host_lines(report["host_nodes"]), ""]
    inside, between = idle["inside_rounds_ns"], idle["between_rounds_ns"]
    lines += [
        f"idle inside rounds   {microseconds(inside['median'])} us each, at most {microseconds(inside['max'])}, "
        f"{percent(idle['inside_share'])} of the rounds",
        f"idle between rounds  {microseconds(between['median'])} us each, at most {microseconds(between['max'])} ({between['count']} gaps)",
        f"exposed wait         {microseconds(wait['time_ns']['median'])} us each, at most {microseconds(wait['time_ns']['max'])}, "
        f"{percent(wait['share_of_rounds'])} of the rounds ({wait['source']})",
        _acceptance_line(report["acceptance"]),
    ]
    return "\n".join(lines + [f"note: {note}" for note in report["notes"]])


def _host_lines(hosts: Document) -> list[str]:
    if hosts["source"] == "unknown":
        return ["host nodes: not recorded"]
    if hosts["source"] == "none":
        return ["host nodes: none in the graphs of these rounds"]
    if hosts["source"] == "counted":
        return [f"host nodes: {microseconds(hosts['total_ns'])} us in all by the engine's counters; when they ran was not recorded"]
    lines = [f"{'host node':<28}{'':<8}{'runs':>7}{'total us':>13}{'us each':>11}{'hidden':>8}"]
    for node in hosts["nodes"]:
        time = node["time_ns"]
        lines.append(
            f"{node['name']:<28}{'':<8}{node['runs']:>7}{microseconds(time['total']):>13}{microseconds(time['median']):>11}"
            f"{percent(node['hidden_share']):>8}"
        )
    exposed = f"{microseconds(hosts['exposed_ns'])} of {microseconds(hosts['total_ns'])} us exposed"
    return [*lines, f"hidden under device work: {percent(hosts['hidden_share'])} ({exposed})"]


def _acceptance_line(found: Document | None) -> str:
    if found is None:
        return "acceptance           not recorded"
    return (
        f"acceptance           {found['tokens_per_row_and_round']:.2f} tokens per row and round, {found['accepted_drafts']} drafts kept "
        f"in {found['row_rounds']} row rounds"
    )


def microseconds(nanoseconds: float) -> str:
    return f"{nanoseconds / 1000:.1f}"


def percent(share: float) -> str:
    return f"{share:.1%}"
