"""Field checks, and the text of their errors."""

from __future__ import annotations

import inspect
import pydoc
from dataclasses import dataclass

import pytest

import stepgraph
from stepgraph.sampling import fields
from stepgraph.sampling.fields import Check, check_fields, clip_error, clip_name, clip_repr


class Unprintable:
    def __repr__(self) -> str:
        raise RuntimeError("no text")


def test_long_values_are_cut_and_failing_reprs_replaced() -> None:
    assert clip_repr("ab") == "'ab'"
    assert clip_repr([0] * 1000) == f"[{'0, ' * 33}..."
    assert clip_repr(10**5000) == "a value of type int" and clip_repr(Unprintable()) == "a value of type Unprintable"
    assert clip_name("x" * 101) == "x" * 100 and clip_name(5) == "5"
    assert clip_error(ValueError("x" * 501)) == "x" * 500 + "..."


@pytest.mark.parametrize(
    ("check", "accepted", "refused", "expected"),
    [
        (fields.BOOL, [True, False], [0, 1, None, "yes"], "True or False"),
        (fields.whole(1), [1, 10**30], [0, True, 1.0, "1", None], "a whole number >= 1"),
        (fields.whole(0, 8), [0, 8], [-1, 9, False], "a whole number from 0 to 8"),
        (fields.number(0, 1), [0, 1, 0.5], [-0.1, 1.1, float("nan"), True, "0", 10**400], "a number from 0 to 1"),
        (fields.number(0, 60, low_open=True), [0.1, 60], [0, 61, None], "a number above 0 and at most 60"),
        (fields.one_of(("auto", "tape")), ["auto", "tape"], ["cuda", None, ["auto"]], "one of 'auto', 'tape'"),
        (fields.optional(fields.whole(1)), [None, 1], [0, "1"], "a whole number >= 1, or None"),
    ],
)
def test_checks_accept_the_documented_values(check: Check, accepted: list[object], refused: list[object], expected: str) -> None:
    assert check.expected == expected
    assert all(check.accepts(value) for value in accepted) and not any(check.accepts(value) for value in refused)


@fields.shows_fields
@dataclass(frozen=True)
class Sizes:
    """Sizes of something."""

    # Never 0, as the
    # error says
    rows: object = 1
    name: object = "auto"  # of a choice
    loud: bool = False

    def __post_init__(self) -> None:
        check_fields(self, {"rows": fields.whole(1), "name": fields.one_of(("auto",))})


def test_help_has_the_comments_of_the_fields() -> None:
    shown = '# Never 0, as the\n# error says\nrows: object = 1\nname: object = "auto"  # of a choice\nloud: bool = False'
    assert inspect.getdoc(Sizes) == f"Sizes of something.\n\n{shown}"


@pytest.mark.parametrize(
    ("public", "comment"),
    [
        (stepgraph.EngineConfig, "max_rows: int = 8  # requests decoded at once"),
        (stepgraph.SamplingParams, "top_p: float = 1.0  # keep the most probable"),
        (stepgraph.Job, "queue_seconds: float | None = None  # from submit until it had a row"),
        (stepgraph.TokenLogprob, "raw: float  # under the target's unprocessed logits"),
        (stepgraph.EngineStats, "eager_rounds: int  # rounds that replayed no graph"),
        (stepgraph.ModelInput, "slots: Tensor  # [B, Q] int64, cache slot of each token"),
        (stepgraph.ModelOutput, "hidden: Tensor  # [B, Q, H], input of `logits`"),
        (stepgraph.ProcessorInput, "tokens: Tensor  # [B, Q] int64, the token before each position"),
    ],
)
def test_help_of_public_classes_has_their_fields(public: type, comment: str) -> None:
    assert comment in pydoc.plain(pydoc.render_doc(public))


def test_fields_are_shown_without_docstrings() -> None:
    class Bare:
        """Removed by python -OO."""

        size: int  # in bytes

    Bare.__doc__ = None
    assert "size: int  # in bytes" in (inspect.getdoc(fields.shows_fields(Bare)) or "")


def test_error_names_class_field_value_and_accepted_values() -> None:
    Sizes()
    with pytest.raises(ValueError, match=r"^Sizes\.rows: got 0, expected a whole number >= 1$"):
        Sizes(rows=0, name="")
    with pytest.raises(ValueError, match=r"^Sizes\.name: got \[\], expected one of 'auto'$"):
        Sizes(name=[])
    with pytest.raises(ValueError, match=r"^Sizes\.loud: got 1, expected True or False$"):
        Sizes(loud=1)  # type: ignore[arg-type]
