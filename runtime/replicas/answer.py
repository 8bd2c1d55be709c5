"""A replica's side of a request. Needs no Ray."""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator

from stepgraph.runtime.aio import AsyncEngine
from stepgraph.runtime.engine import Engine
from stepgraph.runtime.replicas.identity import device_name, vocabulary_of
from stepgraph.runtime.replicas.wire import Ask, End, Info, Opened, Part, Refused, Tokens
from stepgraph.runtime.request import EngineClosedError, FinishReason
from stepgraph.runtime.request_queue import QueueFullError


async def answer(serving: AsyncEngine, ask: Ask, replica: str, identity: str) -> AsyncGenerator[Part, None]:
    """Closing the generator cancels the job. replica, identity: those of this process."""
    if ask.identity not in ("", identity):
        yield Refused(replica, "identity", f"replica {replica} has other hardware, packages, weights or settings")
        return
    try:
        stream = await serving.submit(ask.prompt_ids, **ask.options)
    except (ValueError, QueueFullError, EngineClosedError) as error:
        why = "value" if isinstance(error, ValueError) else "full" if isinstance(error, QueueFullError) else "failed"
        yield Refused(replica, why, str(error))
        return
    opened = False
    async with stream:
        async for event in stream:
            if event.finish_reason == FinishReason.ERROR and serving.failure is not None:
                yield Refused(replica, "failed", event.error)  # an error of the engine and not of this request
                return
            given, job = Tokens(event.tokens, event.logprobs), stream.job
            reason = event.finish_reason
            part = given if reason is None else End(*given, reason, event.error, job.rounds, job.num_cached_tokens)
            yield part if opened else Opened(replica, identity, part)
            opened = True


def info_of(engine: Engine, replica: str, identity: str) -> Info:
    config, models = engine.config, engine._parts.models
    fixed, exact = (getattr(model, "batch_invariant", False) for model in (models.drafter, models.target))
    return Info(
        max_rows=config.max_rows,
        max_length=engine.limits.max_length,
        page_size=config.page_size,
        vocabulary=vocabulary_of(engine),
        lora_names=tuple(engine.list_loras()),
        num_drafts=config.num_speculative_tokens,
        fixed_drafts=config.draft_length != "auto" and fixed,
        exact=exact and engine.backend.device.type == "cpu",
        identity=identity,
        replica=replica,
        device=device_name(engine),
        process=os.getpid(),
    )
