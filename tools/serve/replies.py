"""What a text under way has to say to its client: pieces up to a stop text, calls of tools, log-probabilities, the end."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from typing import Any

from stepgraph import FinishReason, Job, StepEvent, TokenLogprob
from stepgraph.runtime.text import TextCodec
from tools.serve.fields import Asked
from tools.serve.tools import CLOSING, OPENING, call_of

Delta = dict[str, Any]  # content: some text, or tool_calls: whole calls


class Splitter:
    """Takes text as it comes and tells what of it is certain: what may be the beginning of a stop text or a call has to wait."""

    def __init__(self, stops: Sequence[str], calls: bool) -> None:
        self._stops, self._marks = tuple(stops), (*stops, *([OPENING] if calls else ()))
        self._rest, self._calling = "", False
        self.stopped = False

    def push(self, text: str) -> Iterator[tuple[bool, str]]:
        """Pieces, each with whether it is the inside of a call."""
        self._rest += text
        while not self.stopped:
            found = [(place, -len(mark), mark) for mark in self._looked_for if (place := self._rest.find(mark)) >= 0]
            if not found:
                break
            place, _, mark = min(found)
            piece, self._rest = self._rest[:place], self._rest[place + len(mark) :]
            if piece or self._calling:
                yield self._calling, piece
            self.stopped = mark in self._stops and not self._calling
            self._calling = mark == OPENING and not self.stopped
        certain = 0 if self._calling or self.stopped else len(self._rest) - self._waiting
        if certain:
            yield False, self._rest[:certain]
            self._rest = self._rest[certain:]

    def finish(self) -> str:
        """What waited in vain, as it was written."""
        rest = "" if self.stopped else (OPENING if self._calling else "") + self._rest
        self._rest, self._calling = "", False
        return rest

    @property
    def _looked_for(self) -> tuple[str, ...]:
        return (CLOSING,) if self._calling else self._marks

    @property
    def _waiting(self) -> int:
        """Characters at the end that may begin a mark."""
        longest = max(map(len, self._marks), default=1) - 1
        sizes = range(min(longest, len(self._rest)), 0, -1)
        return next((size for size in sizes if any(mark.startswith(self._rest[-size:]) for mark in self._marks)), 0)


class Reply:
    """One answer: deltas out of events, and what stands at its end."""

    def __init__(self, asked: Asked, codec: TextCodec, answer: str) -> None:
        self._asked, self._codec, self._answer = asked, codec, answer
        self._text, self._whole = codec.stream(), asked.tools is not None and asked.tools.must and bool(asked.tools.told)
        calls = asked.tools is not None and bool(asked.tools.told) and not self._whole
        self._splitter = Splitter(() if self._whole else asked.stops, calls)
        self._kept = ""  # of an answer that is one call
        self._calls = self.tokens = 0
        self.created = int(time.time())
        self.logprobs: list[tuple[int, TokenLogprob]] = []  # of tokens that no delta has told of yet

    @property
    def stopped(self) -> bool:
        """A stop text came: nothing more is wanted."""
        return self._splitter.stopped

    def push(self, event: StepEvent) -> list[Delta]:
        deltas: list[Delta] = []
        for place, token in enumerate(event.tokens):
            self.tokens += 1
            if event.logprobs:
                self.logprobs.append((token, event.logprobs[place]))
            deltas += self._deltas(self._text.push([token]))
            if self.stopped:
                break
        return _joined(deltas)

    def finish(self) -> list[Delta]:
        """What had to wait for the end."""
        deltas = [] if self.stopped else self._deltas(self._text.finish())
        rest = self._splitter.finish()
        if self._whole:
            try:
                deltas.append(self._call(self._kept))
            except ValueError:  # cut short
                rest = self._kept
        return _joined([*deltas, *([{"content": rest}] if rest else [])])

    def reason(self, job: Job) -> str:
        if self._calls and not self.stopped and job.finish_reason != FinishReason.LENGTH:
            return "tool_calls"
        return "length" if job.finish_reason == FinishReason.LENGTH and not self.stopped else "stop"

    def usage(self, job: Job) -> dict[str, Any]:
        prompt = len(job.prompt_ids)
        found = {"cached_tokens": job.num_cached_tokens}
        return {
            "prompt_tokens": prompt,
            "completion_tokens": self.tokens,
            "total_tokens": prompt + self.tokens,
            "prompt_tokens_details": found,
        }

    def told_logprobs(self, before: int = 0) -> dict[str, Any] | None:
        """Of the tokens since the last time, in the form of the kind of request; None where nobody asked. before: characters told."""
        if not self._asked.logprobs:
            return None
        taken, self.logprobs = self.logprobs, []
        pieces = [self._codec.vocabulary.decode([token]) for token, _ in taken]
        texts, values = [piece.decode("utf-8", "replace") for piece in pieces], [told.raw for _, told in taken]
        if not self._asked.chat:
            places = [before + sum(map(len, texts[:place])) for place in range(len(texts))]
            return {"tokens": texts, "token_logprobs": values, "top_logprobs": None, "text_offset": places}
        told = [
            {"token": text, "logprob": value, "bytes": [*piece], "top_logprobs": []}
            for text, value, piece in zip(texts, values, pieces, strict=True)
        ]
        return {"content": told, "refusal": None}

    def _deltas(self, text: str) -> list[Delta]:
        if self._whole:
            self._kept += text
            return []
        return [self._call(piece) if inside else {"content": piece} for inside, piece in self._splitter.push(text)]

    def _call(self, text: str) -> Delta:
        delta = {"tool_calls": [call_of(text, self._calls, self._answer)]}
        self._calls += 1
        return delta


def _joined(deltas: Sequence[Delta]) -> list[Delta]:
    """Texts that follow each other become one."""
    joined: list[Delta] = []
    for delta in deltas:
        if joined and delta.keys() == joined[-1].keys() == {"content"}:
            joined[-1] = {"content": joined[-1]["content"] + delta["content"]}
        else:
            joined.append(delta)
    return joined


def whole_message(deltas: Sequence[Delta]) -> dict[str, Any]:
    """An answer that is not streamed."""
    content = "".join(delta.get("content", "") for delta in deltas)
    calls = [{key: value for key, value in call.items() if key != "index"} for delta in deltas for call in delta.get("tool_calls", ())]
    message: dict[str, Any] = {"role": "assistant", "content": content if content or not calls else None}
    return {**message, "tool_calls": calls} if calls else message


def dumped(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))
