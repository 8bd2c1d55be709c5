"""Decides which constrained requests have their grammar in device memory, and where. Other requests use the host link."""

from __future__ import annotations

import torch

from stepgraph.runtime.config import EngineConfig
from stepgraph.runtime.request import ActiveRequest, Job
from stepgraph.sampling import native
from stepgraph.sampling.fields import error_summary
from stepgraph.sampling.grammar.automaton.arena import ImageArena
from stepgraph.sampling.grammar.automaton.library import Field
from stepgraph.sampling.grammar.compile.backends import BACKENDS
from stepgraph.sampling.grammar.compile.compiler import CompiledConstraint
from stepgraph.sampling.grammar.compile.limits import with_limit_name
from stepgraph.sampling.grammar.link.protocol import HostLink, MatcherRow
from stepgraph.sampling.grammar.vocabulary import Vocabulary
from stepgraph.sampling.kernels.advance import MAX_PUSHES, MAX_SYMBOLS
from stepgraph.sampling.kernels.triton import why_no_triton

INT_BYTES = 4


class DeviceGrammars:
    """Chooses the lane of each constrained request. `why_off`: why all grammars use the host link; empty if they can be on the device."""

    def __init__(self, why_off: str, config: EngineConfig, host_link: HostLink) -> None:
        self.why_off, self._host_link = why_off, host_link
        self.arena = ImageArena(0 if why_off else config.grammar_arena_bytes // INT_BYTES)
        self.on_device = self.on_host = self.arena_full = 0  # requests at their first admission; arena_full: part of on_host

    @property
    def note(self) -> str:
        size = self.arena.size * INT_BYTES
        return f"host, {self.why_off}" if self.why_off else f"device, for grammars with tables, in an arena of {size:,} bytes"

    def why_host(self, compiled: CompiledConstraint, resumed: bool = False) -> str:
        """Why requests with this grammar use the host link; empty if they may use the device."""
        image = compiled.image
        if self.why_off or image is None:
            uncovered = "the tables do not cover the marker before the grammar" if compiled.marker else f"{compiled.backend} has no tables"
            return self.why_off or uncovered
        limits = (Field.PUSHES, MAX_PUSHES, "nested parts at once"), (Field.SYMBOLS, MAX_SYMBOLS, "kinds of nested parts")
        for field, limit, what in limits:
            if image[field] > limit:
                return f"a token may open {image[field]} {what}, at most {limit} are supported"
        return "a resumed request needs a matcher on the host" if resumed else ""

    def prepare(self, job: Job, compiled: CompiledConstraint) -> MatcherRow | None:
        """A row of the host link, or None if `admit` chooses the lane. Called from any thread once the grammar is compiled."""
        return self._row(job, compiled) if self.why_host(compiled, bool(job.prior_output)) else None

    def admit(self, request: ActiveRequest, compiled: CompiledConstraint) -> str:
        """Give an admitted request a block of the arena for its grammar, or a row of the host link if the arena is full. Returns the error
        of a request whose matcher cannot be made."""
        job, reason = request.job, self.why_host(compiled, bool(request.job.prior_output))
        if compiled.image is not None and not reason:
            request.arena_block = self.arena.acquire(compiled.image)
            if request.arena_block is not None:
                self.on_device += not job.num_preemptions
                job.grammar_lane = "device"
                return ""
            size = self.arena.size * INT_BYTES
            reason = f"the arena is full: it has {size:,} bytes (EngineConfig.grammar_arena_bytes), the grammar {compiled.image.nbytes:,}"
            self.arena_full += not job.num_preemptions
            try:
                request.matcher = self._row(job, compiled)
            except Exception as error:  # any exception of a grammar library fails this request only
                return error_summary(error)
        self.on_host += not job.num_preemptions
        job.grammar_lane = f"host: {reason}"
        return ""

    def _row(self, job: Job, compiled: CompiledConstraint) -> MatcherRow:
        matcher = compiled.matcher()
        for index, token in enumerate(job.prior_output):
            if not matcher.accept_token(token):
                fault = with_limit_name(matcher.fault)
                raise ValueError(fault or f"resume_from[{index}]: got {token}, expected a token that the constraint allows there")
        return self._host_link.row(job.id, matcher, len(job.prior_output))

    def release(self, request: ActiveRequest) -> None:
        if request.arena_block is not None:
            self.arena.release(request.arena_block)


def why_no_device_grammars(config: EngineConfig, device: torch.device, vocabulary: Vocabulary | None) -> str:
    """Why all grammars use the host link; empty if they can be on the device. ValueError if the config requires the device."""
    reason = _why_not(config, device, vocabulary)
    if reason and config.grammar_lane == "device":
        raise ValueError(f"EngineConfig.grammar_lane: got 'device', expected 'auto' or 'host': {reason}")
    return reason


def _why_not(config: EngineConfig, device: torch.device, vocabulary: Vocabulary | None) -> str:
    backends = BACKENDS if config.grammar_backend == "auto" else (config.grammar_backend,)
    if config.grammar_lane == "host":
        return "EngineConfig.grammar_lane is 'host'"
    if vocabulary is None:
        return "the engine has no vocabulary"
    if config.check_masks:
        return "EngineConfig.check_masks compares masks on the host"
    if "automaton" not in backends:
        return f"grammar_backend {config.grammar_backend!r} compiles no automata"
    if device.type == "cuda":
        return why_no_triton(device) and f"no Triton kernel: {why_no_triton(device)}"
    return native.why_not() and f"no kernel in C: {native.why_not()}"
