"""Decoded tokens as parts of an answer: text up to a stop text, tool calls, log-probabilities, finish reason, usage."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from stepgraph.runtime.job import FinishReason, TokenLogprob
from stepgraph.runtime.request import Job, StepEvent
from stepgraph.runtime.serve.calls import CallParser, Delta, merge_deltas
from stepgraph.runtime.serve.fields import GenerationRequest
from stepgraph.runtime.serve.reasoning import ChannelSplitter, ReasoningSplitter
from stepgraph.runtime.text import TextCodec

LEAST_LOGPROB = -9999.0  # as in vLLM: JSON has no infinity
_Taken = tuple[int, TokenLogprob | None, int]  # a token, its log-probabilities, and its offset


class Reply:
    """One answer: turns step events into deltas."""

    def __init__(self, request: GenerationRequest, codec: TextCodec, index: int) -> None:
        self.request, self.index, self._codec = request, index, codec
        self.prompt = request.prompt_of(index)
        self.jobs: list[Job] = []  # more than one if it continued after closed reasoning
        self._text_stream = codec.stream()
        tools = request.tools
        only_calls = tools is not None and tools.required
        fmt, texts, parallel = (tools.call_format, tools.texts, tools.parallel) if tools is not None else (None, {}, True)
        begins = [fmt.begin_answer(name) for name in tools.functions] if fmt and tools and tools.answer is not None else ()
        self._call_parser = CallParser(() if only_calls else request.stops, fmt, texts, only_calls, parallel, begins)
        enforced = request.options["constraint"] is not None and (tools is None or not tools.in_text)
        in_channels = request.reasoning is not None and request.reasoning.in_channels
        self._splitter = ChannelSplitter() if in_channels else ReasoningSplitter(request.reasoning, to_marker=enforced)
        self.ids: list[int] = []
        self.reasoning_tokens = 0
        self._logprobs: list[_Taken] = []  # of tokens that no delta has reported yet
        self._echoes_logprobs = request.echo  # those of the prompt come first
        self._offset = len(self.prompt.echo)  # of the next token: a token without text of its own has that of the text so far

    @property
    def stopped(self) -> bool:
        return self._call_parser.stopped

    def push(self, event: StepEvent) -> list[Delta]:
        deltas: list[Delta] = []
        limit, stop_ids = self.request.reasoning_limit, self.request.options["sampling"].stop_token_ids
        for index, token in enumerate(event.tokens):
            if self.over_budget or not self.prompt.max_tokens:
                break
            self.ids.append(token)
            if event.logprobs:
                self._logprobs.append((token, event.logprobs[index], self._offset))
            text = self._text_stream.push([token] if token not in stop_ids else [])
            self._offset += len(text)
            deltas += self._deltas(text)
            self.reasoning_tokens += self._splitter.in_reasoning and (limit is None or self.reasoning_tokens < limit)
            if self.stopped:
                break
        return _merged(deltas)

    @property
    def tokens(self) -> int:
        return len(self.ids)

    @property
    def over_budget(self) -> bool:
        """Whether the reasoning has to be closed here."""
        reasoning = self.request.reasoning
        budget = reasoning.budget if reasoning is not None and self.request.reasoning_limit is None else None
        return budget is not None and self._splitter.in_reasoning and self.reasoning_tokens >= budget

    def close_reasoning(self) -> list[Delta]:
        """Continue as if the model had closed its reasoning."""
        assert self.request.reasoning is not None
        self.ids += self.request.reasoning.closing_ids
        return _merged(self._deltas(self._text_stream.push(self.request.reasoning.closing_ids)))

    def finish(self) -> list[Delta]:
        """The deltas that were held back until the end."""
        if self.stopped:
            return []
        return _merged([*self._deltas(self._text_stream.finish(), ended=True), *self._call_parser.push("", ended=True)])

    @property
    def reason(self) -> str:
        at_limit = not self.prompt.max_tokens or (self.jobs and self.jobs[-1].finish_reason == FinishReason.LENGTH)
        if not self.stopped and (self.over_budget or at_limit):
            return "length"
        return "tool_calls" if self._call_parser.calls and not self._call_parser.at_stop_text else "stop"

    @property
    def job_reason(self) -> FinishReason:
        """Why decoding ended. The server ends a job at a stop text that the runtime does not find, after its limit of reasoning tokens, and
        when its client has left."""
        if self.stopped:
            return FinishReason.STOP
        return self.jobs[-1].finish_reason or (FinishReason.LENGTH if self.over_budget else FinishReason.CANCELLED)

    def take_logprobs(self) -> Callable[[], dict[str, Any] | None]:
        """For the tokens since the last call: a function that returns their log-probabilities in the endpoint's form, on any thread."""
        taken, self._logprobs = self._logprobs, []
        echoes, self._echoes_logprobs = self._echoes_logprobs, False
        return functools.partial(self._written_logprobs, taken, echoes)

    def _written_logprobs(self, taken: list[_Taken], echoes: bool) -> dict[str, Any] | None:
        if not self.request.options["sampling"].logprobs:
            return None
        if self.request.chat:
            content = [
                self._logprob(token, found.raw) | {"top_logprobs": [self._logprob(*each) for each in found.top_raw]}
                for token, found, _ in taken
                if found is not None
            ]
            return {"content": content, "refusal": None}
        if echoes:
            taken = [*zip(self.prompt.ids, self.jobs[0].prompt_logprobs, self._prompt_offsets(), strict=False), *taken]
        texts, asked = [self._codec.decode([token]) for token, *_ in taken], self.request.options["sampling"].top_logprobs
        # the token and the most probable ones; among tokens with equal texts, the most probable
        pairs = [found and ((token, max(found.raw, LEAST_LOGPROB)), *reversed(found.top_raw[:asked])) for token, found, _ in taken]
        values = [each and each[0][1] for each in pairs]
        top = [each and {self._codec.decode([other]): value for other, value in each} for each in pairs]
        offsets = [offset for *_, offset in taken]
        return {"tokens": texts, "token_logprobs": values, "top_logprobs": top if asked else None, "text_offset": offsets}

    def _prompt_offsets(self) -> Iterator[int]:
        """Offsets of the prompt's tokens in `echo`, which a tokenizer may have changed: it adds blanks, and control tokens are spelled."""
        vocabulary, stream, echo, offset = self._codec.vocabulary, self._codec.stream(), self.prompt.echo, 0
        for token in self.prompt.ids:
            yield min(offset, len(echo))
            has_text = token not in vocabulary.non_text_ids
            piece = stream.push([token]) if has_text else vocabulary.tokens[token].decode("utf-8", "replace")
            found = (len(each) for each in (piece, piece.lstrip()) if echo.startswith(each, offset))
            offset += next(found, len(piece) if has_text else 0)

    def prompt_logprobs(self) -> dict[str, Any]:
        """vLLM's field, if the request has it: by token id, the prompt's token and the most probable ones."""
        count, found = self.request.prompt_logprobs, list[dict[int, Any] | None]()
        for token, entry in zip(self.prompt.ids, [] if count is None else self.jobs[0].prompt_logprobs, strict=False):
            pairs = ((None, (token, max(entry.raw, LEAST_LOGPROB))), *enumerate(entry.top_raw[:count], 1)) if entry else ()
            values = {each: {"logprob": value, "rank": rank, "decoded_token": self._codec.decode([each])} for rank, (each, value) in pairs}
            found.append(values or None)
        return {} if count is None else {"prompt_logprobs": found}

    def _logprob(self, token: int, value: float) -> dict[str, Any]:
        return {"token": self._codec.decode([token]), "logprob": value, "bytes": [*self._codec.vocabulary.decode([token])]}

    def _deltas(self, text: str, ended: bool = False) -> list[Delta]:
        deltas: list[Delta] = []
        for reasoning, piece in self._splitter.push(text, ended):
            deltas += [{"reasoning_content": piece}] if reasoning else self._call_parser.push(piece)
        return deltas


def _merged(deltas: Sequence[Delta]) -> list[Delta]:
    """The deltas, with adjacent parts of a text or a call joined."""
    merged: list[Delta] = []
    for delta in deltas:
        if merged and (both := merge_deltas(merged[-1], delta)) is not None:
            merged[-1] = both
        else:
            merged.append(delta)
    return merged


def whole_message(deltas: Sequence[Delta]) -> dict[str, Any]:
    """The message of an answer that is not streamed."""
    content = "".join(delta.get("content", "") for delta in deltas)
    calls = [delta["tool_calls"][0] for delta in _merged([delta for delta in deltas if "tool_calls" in delta])]
    message: dict[str, Any] = {"role": "assistant", "content": content if content or not calls else None}
    if reasoning := "".join(delta.get("reasoning_content", "") for delta in deltas):
        message["reasoning_content"] = reasoning
    without_index = [{key: value for key, value in call.items() if key != "index"} for call in calls]
    return {**message, "tool_calls": without_index} if calls else message


def usage_of(replies: Sequence[Reply]) -> dict[str, Any]:
    """The usage of all choices together; those of a prompt share it."""
    request, completion = replies[0].request, sum(reply.tokens for reply in replies)
    prompt, cached = request.prompt_tokens, [job.num_cached_tokens for reply in replies[:: request.n] for job in reply.jobs[:1]]
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "completion_tokens_details": {"reasoning_tokens": sum(reply.reasoning_tokens for reply in replies)},
        "prompt_tokens_details": {"cached_tokens": sum(cached)},
    }
