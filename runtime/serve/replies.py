"""Decoded tokens as parts of an answer: text up to a stop text, tool calls, log-probabilities, finish reason, usage."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from stepgraph.runtime.request import FinishReason, Job, StepEvent, TokenLogprob
from stepgraph.runtime.serve.fields import GenerationRequest
from stepgraph.runtime.serve.reasoning import ReasoningSplitter
from stepgraph.runtime.serve.tools import CLOSING, OPENING, parse_call
from stepgraph.runtime.text import TextCodec

Delta = dict[str, Any]  # content or reasoning_content: some text, or tool_calls: whole calls


class Splitter:
    """Splits streamed text at stop texts and tool calls; holds back an end that may be the beginning of a delimiter."""

    def __init__(self, stops: Sequence[str], calls: bool) -> None:
        self._stops, self._delimiters = tuple(stops), (*stops, *([OPENING] if calls else ()))
        self._pending, self._in_call = "", False
        self.stopped = False

    def push(self, text: str) -> Iterator[tuple[bool, str]]:
        """Pieces; True with the inside of a call."""
        self._pending += text
        while not self.stopped:
            delimiters = (CLOSING,) if self._in_call else self._delimiters
            found = [(start, -len(delimiter), delimiter) for delimiter in delimiters if (start := self._pending.find(delimiter)) >= 0]
            if not found:
                break
            start, _, delimiter = min(found)
            piece, self._pending = self._pending[:start], self._pending[start + len(delimiter) :]
            if piece or self._in_call:
                yield self._in_call, piece
            self.stopped = delimiter in self._stops and not self._in_call
            self._in_call = delimiter == OPENING and not self.stopped
        certain = 0 if self._in_call or self.stopped else len(self._pending) - self._held_back()
        if certain:
            yield False, self._pending[:certain]
            self._pending = self._pending[certain:]

    def finish(self) -> str:
        """The text that was held back, as it was written."""
        rest = "" if self.stopped else (OPENING if self._in_call else "") + self._pending
        self._pending, self._in_call = "", False
        return rest

    def _held_back(self) -> int:
        """Characters at the end that may begin a delimiter."""
        longest = max(map(len, self._delimiters), default=1) - 1
        sizes = range(min(longest, len(self._pending)), 0, -1)
        return next((size for size in sizes if any(each.startswith(self._pending[-size:]) for each in self._delimiters)), 0)


class Reply:
    """One answer: turns step events into deltas."""

    def __init__(self, request: GenerationRequest, codec: TextCodec, answer_id: str, index: int) -> None:
        self.request, self.index, self._codec, self._answer_id = request, index, codec, answer_id
        self.job: Job | None = None  # once it is submitted
        self._text = codec.stream()
        tools = request.tools if request.tools is not None and request.tools.callable else None
        self._is_call = tools is not None and tools.required  # the whole answer is one call
        self._parallel = tools is None or tools.parallel
        self._splitter = Splitter(() if self._is_call else request.stops, tools is not None and not self._is_call)
        self._reasoning = ReasoningSplitter(request.reasoning)
        self.ids: list[int] = []
        self.reasoning_tokens = 0
        self._call_text = ""  # of an answer that is one call
        self._calls = 0
        self._logprobs: list[tuple[int, TokenLogprob]] = []  # of tokens that no delta has reported yet

    @property
    def stopped(self) -> bool:
        """At a stop text, or after the only call that is allowed."""
        return self._splitter.stopped or (self._calls > 0 and not self._parallel)

    def push(self, event: StepEvent) -> list[Delta]:
        deltas: list[Delta] = []
        for index, token in enumerate(event.tokens):
            if self.over_budget:
                break
            self.ids.append(token)
            if event.logprobs:
                self._logprobs.append((token, event.logprobs[index]))
            deltas += self._deltas(self._text.push([token]))
            self.reasoning_tokens += self._reasoning.inside
            if self.stopped:
                break
        return _merged(deltas)

    @property
    def tokens(self) -> int:
        return len(self.ids)

    @property
    def over_budget(self) -> bool:
        """Whether the reasoning has to be closed."""
        reasoning = self.request.reasoning
        budget = reasoning.budget if reasoning is not None else None
        return budget is not None and self._reasoning.inside and self.reasoning_tokens >= budget

    def close_reasoning(self) -> list[Delta]:
        """Go on as if the model had closed its reasoning."""
        assert self.request.reasoning is not None
        self.ids += self.request.reasoning.closing_ids
        return _merged(self._deltas(self._text.push(self.request.reasoning.closing_ids)))

    def finish(self) -> list[Delta]:
        """The deltas that were held back until the end."""
        if self.stopped:
            return []
        deltas = self._deltas(self._text.finish())
        deltas += [delta for part in self._reasoning.finish() for delta in self._part(*part)]
        rest = self._splitter.finish()
        if self._is_call:
            try:
                deltas.append(self._call(self._call_text))
            except ValueError:  # cut short
                rest = self._call_text
        return _merged([*deltas, *([{"content": rest}] if rest else [])])

    @property
    def reason(self) -> str:
        if self.job is not None and self.job.finish_reason == FinishReason.LENGTH and not self.stopped:
            return "length"
        return "tool_calls" if self._calls and not self._splitter.stopped else "stop"

    def take_logprobs(self, offset: int = 0) -> dict[str, Any] | None:
        """Of the tokens since the last call, in the form of the endpoint. offset: characters of the answer sent before them."""
        if not self.request.logprobs:
            return None
        taken, self._logprobs = self._logprobs, []
        if self.request.chat:
            content = [
                self._logprob(token, found.raw) | {"top_logprobs": [self._logprob(*each) for each in found.top_raw]}
                for token, found in taken
            ]
            return {"content": content, "refusal": None}
        texts, values = [self._token_text(token) for token, _ in taken], [found.raw for _, found in taken]
        offsets = [offset + sum(map(len, texts[:index])) for index in range(len(texts))]
        # of tokens with equal texts, the likeliest
        top = [{self._token_text(other): value for other, value in reversed(found.top_raw)} for _, found in taken]
        asked = self.request.options["sampling"].top_logprobs
        return {"tokens": texts, "token_logprobs": values, "top_logprobs": top if asked else None, "text_offset": offsets}

    def _logprob(self, token: int, value: float) -> dict[str, Any]:
        return {"token": self._token_text(token), "logprob": value, "bytes": [*self._codec.vocabulary.decode([token])]}

    def _token_text(self, token: int) -> str:
        return self._codec.vocabulary.decode([token]).decode("utf-8", "replace")

    def _deltas(self, text: str) -> list[Delta]:
        return [delta for part in self._reasoning.push(text) for delta in self._part(*part)]

    def _part(self, reasoning: bool, text: str) -> list[Delta]:
        if reasoning:
            return [{"reasoning_content": text}]
        if self._is_call:
            self._call_text += text
            return []
        return [self._call(piece) if in_call else {"content": piece} for in_call, piece in self._splitter.push(text)]

    def _call(self, text: str) -> Delta:
        delta = {"tool_calls": [parse_call(text, self._calls, self._answer_id)]}
        self._calls += 1
        return delta


def _merged(deltas: Sequence[Delta]) -> list[Delta]:
    """With adjacent texts of a kind as one."""
    merged: list[Delta] = []
    for delta in deltas:
        if merged and delta.keys() == merged[-1].keys() and "tool_calls" not in delta:
            merged[-1] = {kind: merged[-1][kind] + text for kind, text in delta.items()}
        else:
            merged.append(delta)
    return merged


def whole_message(deltas: Sequence[Delta]) -> dict[str, Any]:
    """The message of an answer that is not streamed."""
    content = "".join(delta.get("content", "") for delta in deltas)
    calls = [{key: value for key, value in call.items() if key != "index"} for delta in deltas for call in delta.get("tool_calls", ())]
    message: dict[str, Any] = {"role": "assistant", "content": content if content or not calls else None}
    if reasoning := "".join(delta.get("reasoning_content", "") for delta in deltas):
        message["reasoning_content"] = reasoning
    return {**message, "tool_calls": calls} if calls else message


def usage_of(replies: Sequence[Reply]) -> dict[str, Any]:
    """Of all choices together; they share a prompt."""
    prompt, completion = len(replies[0].request.prompt_ids), sum(reply.tokens for reply in replies)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "completion_tokens_details": {"reasoning_tokens": sum(reply.reasoning_tokens for reply in replies)},
        "prompt_tokens_details": {"cached_tokens": replies[0].job.num_cached_tokens if replies[0].job else 0},
    }
