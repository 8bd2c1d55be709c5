"""What an engine is made with."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from stepgraph.graphs.attention.choose import ATTENTION
from stepgraph.graphs.graph_set import OnFailure
from stepgraph.graphs.proposing import ANCHOR
from stepgraph.graphs.shapes import Limits, bucket_sizes, checked_buckets
from stepgraph.sampling.fields import clip_repr, is_int
from stepgraph.sampling.grammar.compile.compiler import CACHE_BYTES, GrammarCompiler, Isolation, checked_isolation
from stepgraph.sampling.grammar.compile.limits import DEFAULTS, GrammarLimits
from stepgraph.sampling.grammar.constraints.constraint import BackendChoice, checked_backend
from stepgraph.sampling.grammar.link.native import HOST_LINKS
from stepgraph.sampling.grammar.vocabulary import Vocabulary
from stepgraph.sampling.kernels.filter_choice import FILTERS

MOST_SECONDS = 86_400


@dataclass(frozen=True)
class EngineConfig:
    """Sizes and modes of one engine; all static memory follows from it."""

    max_rows: int = 8  # requests decoded at once
    num_speculative_tokens: int = 4  # drafts per round, 0 to 8; a request may ask for fewer
    max_length: int = 1024  # tokens of one request, prompt included
    page_size: int = 16
    num_pages: int | None = None  # None: enough for max_rows requests of max_length
    prefix_reuse: bool = True  # full pages of what was computed before serve requests that begin alike: same tokens, sooner
    prefix_cache_pages: int | None = None  # pages kept for that while nobody uses them; None: all that are free
    rounds_in_flight: int = 2  # rounds launched before the first of them is read
    prefill_chunk: int = 128  # prompt tokens taken between two rounds
    max_stop_ids: int = 8
    max_bias_ids: int = 256  # entries that a request's logit_bias and bad_token_ids may have together
    max_queued: int = 4096  # submits waiting for a row; more are refused
    forced_drafts: bool | None = (
        None  # draft what a grammar leaves no choice about, as the tokenizer writes it; None: where no model drafts
    )
    # beside a draft model: what followed where the text held as many equal tokens before is drafted in its stead; 0: nothing is
    look_up: int = 0
    draft_masks: bool = True  # False: drafts are not masked, one host node walks them afterwards; same tokens
    greedy_only: bool = False  # True: half the graphs; a request that needs more than a masked argmax is refused
    forced_acceptance: tuple[float, ...] | None = None  # for benchmarks: how often draft 1, 2, ... holds; texts mean nothing then
    attention: str = "auto"  # on a GPU: flashinfer, triton, reference, or auto: triton, and flashinfer for prompts where it proves right
    filters: str = "auto"  # top-k, top-p and their like on a GPU: flashinfer, triton, torch, or auto: the first that proves right there
    buckets: tuple[int, ...] | None = None  # batch sizes with a graph of their own; None: powers of two and max_rows
    backend: str = "auto"  # tape, cuda, or auto: where the target model is
    grammar_backend: BackendChoice = "auto"  # for constraints that name none: xgrammar, llguidance, or auto
    save_hidden_states: str | Path | None = None  # a folder: what the target thinks of every text is kept there, to train a draft from
    states_shard_bytes: int = 1 << 28  # of one file of these; twice as much may wait in memory
    grammar_limits: GrammarLimits = DEFAULTS  # what one constraint may cost
    grammar_cache_bytes: int = CACHE_BYTES  # of compiled grammars kept; those that live jobs use are kept beyond it
    compile_isolation: Isolation = "process"  # xgrammar compiles in a process of its own; "none": in this one, without bounds
    max_compiles: int = 2  # at a time, each with a worker process of its own; started when first needed
    check_masks: bool = False  # True: every token that a grammar takes is held against its mask; a disagreement is that request's error
    eager: bool = False  # True: run every round without recording it
    # what becomes of a batch size whose graph cannot be captured. "raise": capture() does; "eager": the report tells, and the next larger
    # graph of its kind serves it, or, where there is none, nothing recorded does
    on_capture_failure: OnFailure = "raise"
    capture_bytes: int | None = None  # that static buffers and graphs may take together, weights apart; None: what there is
    round_timeout_seconds: float | None = None  # that a step waits at most for the device; then it fails; None: as long as it takes
    nvtx: bool = False  # True: stages and rounds are ranges in nsys and its like
    host_link: str = "auto"  # who drives the matchers: native (C, no GIL), python, or auto: native where it was built

    def __post_init__(self) -> None:
        if self.backend not in ("auto", "tape", "cuda"):
            raise ValueError(f"EngineConfig.backend: got {clip_repr(self.backend)}, want 'auto', 'tape' or 'cuda'")
        if self.host_link not in HOST_LINKS:
            raise ValueError(f"EngineConfig.host_link: got {clip_repr(self.host_link)}, want one of {', '.join(HOST_LINKS)}")
        for name, wishes in (("filters", FILTERS), ("attention", ATTENTION)):
            if getattr(self, name) not in wishes:
                raise ValueError(f"EngineConfig.{name}: got {clip_repr(getattr(self, name))}, want one of {', '.join(map(repr, wishes))}")
        for name in ("max_queued", "states_shard_bytes", "grammar_cache_bytes", "max_compiles"):
            if not is_int(getattr(self, name)) or getattr(self, name) < 1:
                raise ValueError(f"EngineConfig.{name}: got {clip_repr(getattr(self, name))}, want a whole number >= 1")
        self._check_grammars()
        self._check_kept()
        self._check_failures()
        for name in ("forced_drafts", "draft_masks", "greedy_only", "check_masks", "eager", "prefix_reuse", "nvtx"):
            if not isinstance(getattr(self, name), bool) and (name, getattr(self, name)) != ("forced_drafts", None):
                wanted = "True, False or None" if name == "forced_drafts" else "True or False"
                raise ValueError(f"EngineConfig.{name}: got {clip_repr(getattr(self, name))}, want {wanted}")
        try:
            self.limits(vocab_size=1, num_tokens=1, feature_size=0)
        except ValueError as error:
            raise ValueError(str(error).replace("Limits.", "EngineConfig.")) from None
        self._check_forced()
        self._check_look_up()
        if self.forced_drafts and not self.draft_masks:
            raise ValueError("EngineConfig.forced_drafts: got True with draft_masks=False, want draft_masks=True: they show what is forced")
        if self.buckets is not None:
            checked_buckets(self.buckets, self.max_rows)

    def notes(self, host_link: str) -> tuple[str, ...]:
        """What a capture report should say besides its figures."""
        forced = ("acceptance is forced: the texts are not the models'",) if self.forced_acceptance else ()
        return (f"host link: {host_link}", *forced)

    def _check_grammars(self) -> None:
        checked_backend("EngineConfig.grammar_backend", self.grammar_backend)
        checked_isolation("EngineConfig.compile_isolation", self.compile_isolation)
        if not isinstance(self.grammar_limits, GrammarLimits):
            raise ValueError(f"EngineConfig.grammar_limits: got {type(self.grammar_limits).__name__}, want GrammarLimits")

    def _check_kept(self) -> None:
        if not isinstance(self.save_hidden_states, (str, Path, type(None))) or self.save_hidden_states == "":
            raise ValueError(
                f"EngineConfig.save_hidden_states: got {clip_repr(self.save_hidden_states)}, want the path of a folder, or None"
            )
        kept = self.prefix_cache_pages
        if kept is not None and (not is_int(kept) or kept < 0):
            raise ValueError(f"EngineConfig.prefix_cache_pages: got {clip_repr(kept)}, want a whole number >= 0, or None")

    def _check_failures(self) -> None:
        if self.on_capture_failure not in get_args(OnFailure):
            wanted = " or ".join(map(repr, get_args(OnFailure)))
            raise ValueError(f"EngineConfig.on_capture_failure: got {clip_repr(self.on_capture_failure)}, want {wanted}")
        if self.capture_bytes is not None and (not is_int(self.capture_bytes) or self.capture_bytes < 1):
            raise ValueError(f"EngineConfig.capture_bytes: got {clip_repr(self.capture_bytes)}, want a whole number >= 1, or None")
        limit = self.round_timeout_seconds
        if limit is not None and (isinstance(limit, bool) or not isinstance(limit, (int, float)) or not 0 < limit <= MOST_SECONDS):
            wanted = f"a number of seconds above 0, at most {MOST_SECONDS:,}, or None"
            raise ValueError(f"EngineConfig.round_timeout_seconds: got {clip_repr(limit)}, want {wanted}")

    def _check_look_up(self) -> None:
        if not is_int(self.look_up) or not 0 <= self.look_up <= ANCHOR:
            raise ValueError(f"EngineConfig.look_up: got {clip_repr(self.look_up)}, want a whole number from 0 to {ANCHOR}")
        if self.look_up and not self.num_speculative_tokens:
            raise ValueError(f"EngineConfig.look_up: got {self.look_up} with num_speculative_tokens=0, want 0: nothing is drafted")

    def _check_forced(self) -> None:
        forced, drafts = self.forced_acceptance, self.num_speculative_tokens
        if forced is None:
            return
        shares = isinstance(forced, tuple) and len(forced) == drafts > 0
        if not shares or not all(isinstance(share, (int, float)) and not isinstance(share, bool) and 0 <= share <= 1 for share in forced):
            wanted = f"a tuple of num_speculative_tokens={drafts} numbers from 0 to 1"
            raise ValueError(f"EngineConfig.forced_acceptance: got {clip_repr(forced)}, want {wanted}")

    @property
    def graph_terms(self) -> tuple[tuple[int, ...], OnFailure, int | None]:
        """What a GraphSet is made with besides a step."""
        return self.bucket_sizes, self.on_capture_failure, self.capture_bytes

    @property
    def bucket_sizes(self) -> tuple[int, ...]:
        return bucket_sizes(self.max_rows) if self.buckets is None else checked_buckets(self.buckets, self.max_rows)

    def grammar_compiler(self, vocabulary: Vocabulary) -> GrammarCompiler:
        return GrammarCompiler(
            vocabulary,
            backend=self.grammar_backend,
            check_masks=self.check_masks,
            limits=self.grammar_limits,
            isolation=self.compile_isolation,
            max_compiles=self.max_compiles,
            cache_bytes=self.grammar_cache_bytes,
        )

    def limits(self, vocab_size: int, num_tokens: int, feature_size: int) -> Limits:
        try:
            pages_per_row = -(-self.max_length // self.page_size)
            num_pages = self.max_rows * pages_per_row if self.num_pages is None else self.num_pages
        except (TypeError, ZeroDivisionError):
            num_pages = 1  # Limits names the field that is wrong
        return Limits(
            max_rows=self.max_rows,
            num_speculative_tokens=self.num_speculative_tokens,
            max_length=self.max_length,
            page_size=self.page_size,
            num_pages=num_pages,
            vocab_size=vocab_size,
            num_tokens=num_tokens,
            feature_size=feature_size,
            rounds_in_flight=self.rounds_in_flight,
            max_stop_ids=self.max_stop_ids,
            max_bias_ids=self.max_bias_ids,
            prefill_chunk=self.prefill_chunk,
        )
