"""What an engine has done so far."""

from __future__ import annotations

from dataclasses import dataclass

from stepgraph.sampling.grammar.compiler import CompileStats


@dataclass(frozen=True)
class EngineStats:
    rounds: int
    replays: int
    host_syncs: int  # waits for the whole device on the launching thread; rounds make none
    event_waits: int  # reads of a round's results
    tokens: int
    accepted_drafts: int
    forced_drafts: int  # drafts that a grammar forced
    accepted_forced_drafts: int
    forced_looks: int  # how often a grammar was asked what must come next
    mask_fills: int
    matcher_accepts: int
    matcher_rollbacks: int
    grammars: CompileStats
    saved_texts: int  # whose hidden states are on disk
    unsaved_texts: int  # that the disk was too slow for, or refused
    saving_error: str  # why nothing more is saved; empty while all is well
    running: int
    waiting: int
    free_pages: int  # those that are only kept for their prefix included
    cached_pages: int  # that a request may find its prefix in
    evicted_pages: int
    reused_tokens: int  # of prompts: found, not computed
