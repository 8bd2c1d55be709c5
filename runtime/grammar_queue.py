"""The grammars of an engine's requests: claimed when they are submitted, made rows of when compiled, let go of when they end."""

from __future__ import annotations

from stepgraph.runtime.request import QueuedRequest
from stepgraph.runtime.wake import WakeSignal
from stepgraph.sampling.grammar.compile.cache import Claim
from stepgraph.sampling.grammar.compile.compiler import CompiledConstraint, CompileStats, GrammarCompiler
from stepgraph.sampling.grammar.constraints.constraint import Constraint
from stepgraph.sampling.grammar.link.protocol import HostLink

PAUSE_SECONDS = 0.001


class GrammarQueue:
    """Between the compiler, which has threads of its own, and the queue. `claim` and `compile` are for any thread."""

    def __init__(self, compiler: GrammarCompiler | None, host: HostLink, wake: WakeSignal) -> None:
        self._compiler, self._host, self._wake = compiler, host, wake

    @property
    def stats(self) -> CompileStats:
        return self._compiler.stats if self._compiler else CompileStats()

    @property
    def notes(self) -> tuple[str, ...]:
        """What a capture report should say."""
        return (f"grammars: {self._compiler.told}",) if self._compiler else ()

    def claim(self, queued: QueuedRequest) -> None:
        """The job's grammar is compiled from now on; ValueError where it is refused without compiling. Whatever else is raised here
        leaves `queued.claim` to be released."""
        constraint = queued.job.constraint
        if constraint is None:
            return
        queued.ready = False
        claim = queued.claim = Claim(self._required(constraint), constraint)
        claim.take()
        claim.then(lambda claim: self._settle(queued, claim))

    def compile(self, constraint: Constraint) -> CompiledConstraint:
        return self._required(constraint).compile(constraint)

    def pause(self) -> None:
        """For who has nothing to do until a grammar is there: long enough not to be in its way."""
        self._wake.wait(0)  # what it rang for before was seen by the step that pauses now
        self._wake.wait(PAUSE_SECONDS)

    def close(self) -> None:
        if self._compiler:
            self._compiler.close()

    def _settle(self, queued: QueuedRequest, claim: Claim) -> None:
        try:
            queued.matcher = self._host.row(queued.job.id, claim.result().matcher())
        except Exception as error:  # whatever went wrong is this request's fault
            queued.error = str(error) or type(error).__name__
        queued.ready = True
        self._wake.notify()

    def _required(self, constraint: Constraint) -> GrammarCompiler:
        if not isinstance(constraint, Constraint):
            raise ValueError(f"constraint: got {type(constraint).__name__}, expected a Constraint")
        if self._compiler is None:
            raise ValueError("constraint: the engine has no vocabulary; pass Engine(vocabulary=...) to constrain requests")
        return self._compiler
