"""Grammars of queued requests: claimed at submit, compiled in the background, then bound to a matcher."""

from __future__ import annotations

from stepgraph.runtime.request import QueuedRequest
from stepgraph.runtime.wake import WakeSignal
from stepgraph.sampling.grammar.compile.compiler import Claim, CompiledConstraint, CompileStats, GrammarCompiler
from stepgraph.sampling.grammar.constraints.constraint import Constraint
from stepgraph.sampling.grammar.link.protocol import HostLink

PAUSE_SECONDS = 0.001


class GrammarQueue:
    """Connects the compiler and its threads with the queue. `claim` and `compile` may be called from any thread."""

    def __init__(self, compiler: GrammarCompiler | None, host: HostLink, wake: WakeSignal) -> None:
        self._compiler, self._host, self._wake = compiler, host, wake

    @property
    def stats(self) -> CompileStats:
        return self._compiler.stats if self._compiler else CompileStats()

    @property
    def notes(self) -> tuple[str, ...]:
        """For the capture report."""
        return (f"grammars: {self._compiler.note}",) if self._compiler else ()

    def claim(self, queued: QueuedRequest) -> None:
        """Start compiling the job's grammar. ValueError if the constraint is refused without a compile. After any other exception the
        caller releases `queued.claim`."""
        constraint = queued.job.constraint
        if constraint is None:
            return
        queued.ready = False
        claim = queued.claim = Claim(self._required(constraint), constraint)
        claim.take()
        claim.then(lambda claim: self._finish(queued, claim))

    def compile(self, constraint: Constraint) -> CompiledConstraint:
        return self._required(constraint).compile(constraint)

    def pause(self) -> None:
        """Sleep briefly, for a step that can only wait for a grammar, so that it leaves the CPU to the compile."""
        self._wake.wait(0)  # clear an earlier notification, whose cause this step has handled
        self._wake.wait(PAUSE_SECONDS)

    def close(self) -> None:
        if self._compiler:
            self._compiler.close()

    def _finish(self, queued: QueuedRequest, claim: Claim) -> None:
        try:
            queued.matcher = self._host.row(queued.job.id, claim.result().matcher())
        except Exception as error:  # of any kind: it fails this request only
            queued.error = str(error) or type(error).__name__
        queued.ready = True
        self._wake.notify()

    def _required(self, constraint: Constraint) -> GrammarCompiler:
        if not isinstance(constraint, Constraint):
            raise ValueError(f"constraint: got {type(constraint).__name__}, expected a Constraint")
        if self._compiler is None:
            raise ValueError("constraint: the engine has no vocabulary; pass Engine(vocabulary=...) to constrain requests")
        return self._compiler
