"""The output of a job as text and as a value."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from stepgraph.runtime.finish_reason import FinishReason
from stepgraph.runtime.text import TextStream
from stepgraph.sampling.grammar.constraints.constraint import Constraint
from stepgraph.sampling.grammar.constraints.python_types import has_no_longer_text
from stepgraph.sampling.grammar.vocabulary import Vocabulary
from stepgraph.sampling.params import SamplingParams


class JobText:
    """The part of a Job that decodes its tokens. The fields are those of Job."""

    constraint: Constraint | None
    sampling: SamplingParams
    resume_from: tuple[int, ...]
    vocabulary: Vocabulary | None
    parse: Callable[[str], Any]
    tokens: list[int]
    finish_reason: FinishReason | None
    error: str

    @property
    def text(self) -> str:
        """The output so far, `resume_from` included, without control and stop tokens, up to a stop string."""
        stream, resumed = self._text_stream()
        return resumed + stream.push(self.tokens) + stream.finish()

    def text_stream(self) -> TextStream:
        """A decoder for `tokens` in pieces. ValueError if the engine has no vocabulary."""
        return self._text_stream()[0]

    def _text_stream(self) -> tuple[TextStream, str]:
        """The decoder, which has read `resume_from`, and the text of `resume_from`."""
        if self.vocabulary is None:
            raise ValueError("Job.text: the engine has no vocabulary, expected Engine(vocabulary=...)")
        stream = TextStream(self.vocabulary, self.sampling.stop, self.sampling.stop_token_ids)
        return stream, stream.push(self.resume_from)

    @property
    def parsed(self) -> Any:
        """The output as the type given as `constraint`: an object of a pydantic model, a member of an enum, the match of a pattern, a
        functools.partial of a function. JSON values for a Constraint that is JSON; otherwise the text, which a stop text or stop token
        may have cut short. ValueError if a value is incomplete, or if the end of a text was not reached. At max_new_tokens, a JSON value
        other than a number, and an option of a choice with which no longer one begins, have no longer text and are complete."""
        ended = self.finish_reason in (FinishReason.STOP, FinishReason.CONSTRAINT_COMPLETE)
        if ended or self.finish_reason == FinishReason.LENGTH:
            text, marker, ids = self.text, self.constraint and self.constraint.marker, (*self.resume_from, *self.tokens)
            if isinstance(marker, tuple) and self.vocabulary:  # the text does not show where token ids are
                ends = (end for end in range(len(marker), len(ids)) if ids[end - len(marker) : end] == marker)
                stream = TextStream(self.vocabulary, self.sampling.stop, self.sampling.stop_token_ids)
                text = stream.push(ids[next(ends, len(ids)) :]) + stream.finish()
            if ended or has_no_longer_text(self.constraint, text):
                return self.parse(text)
        reason = f"{self.finish_reason}{self.error and ': ' + self.error}"
        raise ValueError(f"Job.parsed: the output is incomplete or its end was not reached, finish_reason is {reason}")

    @property
    def stop_reason(self) -> str | int | None:
        """What ended the output, as in vLLM: one of SamplingParams.stop or stop_token_ids. None for a stop token of the vocabulary, and if
        `finish_reason` is not `stop`."""
        if self.finish_reason != FinishReason.STOP:
            return None
        if self.sampling.stop:
            stream = self.text_stream()
            stream.push(self.tokens)
            if stream.found_stop:
                return stream.found_stop
        return self.tokens[-1] if self.tokens[-1] in self.sampling.stop_token_ids else None
