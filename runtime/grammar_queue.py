"""The grammars of an engine's requests: claimed when they are submitted, made rows of when compiled, let go of when they end."""

from __future__ import annotations

from dataclasses import dataclass

from stepgraph.runtime.request import Job
from stepgraph.runtime.wake import WakeSignal
from stepgraph.sampling.grammar.compile.compiler import Claim, CompiledConstraint, CompileStats, GrammarCompiler
from stepgraph.sampling.grammar.constraints.constraint import Constraint
from stepgraph.sampling.grammar.link.protocol import HostLink, MatcherRow

PAUSE_SECONDS = 0.001


@dataclass(eq=False)
class QueuedRequest:
    """A job in the queue. One with a constraint is not ready before its grammar is compiled, or is known not to be had."""

    job: Job
    claim: Claim | None = None
    matcher: MatcherRow | None = None
    error: str = ""
    ready: bool = True


class GrammarQueue:
    """Between the compiler, which has threads of its own, and the queue. `claim` and `compile` are for any thread."""

    def __init__(self, compiler: GrammarCompiler | None, host: HostLink, bell: WakeSignal) -> None:
        self._compiler, self._host, self._bell = compiler, host, bell

    @property
    def stats(self) -> CompileStats:
        return self._compiler.stats if self._compiler else CompileStats()

    @property
    def notes(self) -> tuple[str, ...]:
        """What a capture report should say."""
        return (f"grammars: {self._compiler.note}",) if self._compiler else ()

    def claim(self, waiting: QueuedRequest) -> None:
        """The job's grammar is compiled from now on; ValueError where it is refused without compiling. Whatever else is raised here
        leaves `waiting.claim` to be released."""
        constraint = waiting.job.constraint
        if constraint is None:
            return
        waiting.ready = False
        claim = waiting.claim = Claim(self._required(constraint), constraint)
        claim.take()
        claim.then(lambda claim: self._settle(waiting, claim))

    def compile(self, constraint: Constraint) -> CompiledConstraint:
        return self._required(constraint).compile(constraint)

    def pause(self) -> None:
        """For who has nothing to do until a grammar is there: long enough not to be in its way."""
        self._bell.wait(0)  # what it rang for before was seen by the step that pauses now
        self._bell.wait(PAUSE_SECONDS)

    def close(self) -> None:
        if self._compiler:
            self._compiler.close()

    def _settle(self, waiting: QueuedRequest, claim: Claim) -> None:
        try:
            waiting.matcher = self._host.row(waiting.job.id, claim.result().matcher())
        except Exception as error:  # whatever went wrong is this request's fault
            waiting.error = str(error) or type(error).__name__
        waiting.ready = True
        self._bell.ring()

    def _required(self, constraint: Constraint) -> GrammarCompiler:
        if not isinstance(constraint, Constraint):
            raise ValueError(f"constraint: got {type(constraint).__name__}, want a Constraint")
        if self._compiler is None:
            raise ValueError("constraint: the engine has no vocabulary; pass Engine(vocabulary=...) to constrain requests")
        return self._compiler
