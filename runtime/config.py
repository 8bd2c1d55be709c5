"""Engine configuration."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_args

from stepgraph.graphs.attention.choose import AttentionName
from stepgraph.graphs.capture import BackendName
from stepgraph.graphs.graph_set import OnFailure, bucket_sizes
from stepgraph.graphs.limits import SETTINGS, KvCacheDtype, Limits, PageAllocation, RoundsPerLaunch
from stepgraph.graphs.logits_processors import LogitsProcessor
from stepgraph.graphs.proposing import ANCHOR_TOKENS
from stepgraph.sampling.fields import BOOL, Check, check_fields, checked_fields, clip_repr, is_int, number, one_of, optional, whole
from stepgraph.sampling.grammar.compile.compiler import CACHE_BYTES, MAX_COMPILES, GrammarCompiler, Isolation
from stepgraph.sampling.grammar.compile.limits import DEFAULTS, MIB, GrammarLimits
from stepgraph.sampling.grammar.constraints.constraint import BackendChoice
from stepgraph.sampling.grammar.link.native import HostLinkName
from stepgraph.sampling.grammar.vocabulary import Vocabulary
from stepgraph.sampling.kernels.filters import FilterName

MAX_SECONDS = 86_400
LaneName = Literal["auto", "device", "host"]
PROCESSORS = Check(
    lambda value: (
        isinstance(value, tuple)
        and all(isinstance(each, LogitsProcessor) for each in value)
        and len({each.name for each in value}) == len(value)
    ),
    "a tuple of LogitsProcessors with different names",
)
_WORDS: dict[str, Any] = {
    **{"backend": BackendName, "attention": AttentionName, "filters": FilterName, "host_link": HostLinkName, "grammar_lane": LaneName},
    **{"grammar_backend": BackendChoice, "compile_isolation": Isolation, "on_capture_failure": OnFailure},
}
CHECKS = {  # of all fields but flags
    **SETTINGS,
    **{name: one_of(get_args(words)) for name, words in _WORDS.items()},
    **dict.fromkeys(("max_queued", "states_shard_bytes", "grammar_cache_bytes"), whole(1)),
    **dict.fromkeys(("forced_drafts", "prompt_graphs"), optional(BOOL)),
    "grammar_arena_bytes": whole(1 << 10),
    "num_pages": Check(
        lambda value: value is None or (is_int(value) and value >= 1) or (isinstance(value, float) and 0 < value < 1),
        "a whole number >= 1, a share of the free memory between 0 and 1, or None",
    ),
    "grammar_limits": Check(lambda value: isinstance(value, GrammarLimits), "GrammarLimits"),
    "save_hidden_states": optional(Check(lambda value: isinstance(value, (str, Path)) and value != "", "the path of a folder")),
    "logits_processors": PROCESSORS,
    "max_compiles": whole(1, MAX_COMPILES),
    "prefix_cache_pages": optional(whole(0)),
    "capture_bytes": optional(whole(1)),
    "round_timeout_seconds": optional(number(0, MAX_SECONDS, low_open=True)),
    "look_up": whole(0, ANCHOR_TOKENS),
    "forced_acceptance": optional(
        Check(lambda value: isinstance(value, tuple) and all(map(number(0, 1).accepts, value)), "a tuple of numbers from 0 to 1")
    ),
    "draft_length": Check(lambda value: value == "auto" or (is_int(value) and value >= 0), "'auto', or an integer >= 0"),
}
_CHANGED = object()  # every value but the default
# A setting and a value, another setting and the value with which the first one is refused, and what is expected instead.
CONFLICTS = (
    ("draft_length", "auto", "forced_acceptance", _CHANGED, "an integer: 'auto' needs measured acceptance"),
    ("rounds_per_launch", "until_event", "eager", True, "1: eager needs the host between two rounds"),
    ("rounds_per_launch", "until_event", "save_hidden_states", _CHANGED, "1: save_hidden_states needs the host between two rounds"),
    ("rounds_per_launch", "until_event", "draft_length", "auto", "1, or an integer: draft_length needs the host between two rounds"),
    *((name, _CHANGED, "greedy_only", True, "its default") for name in ("max_bad_words", "logits_processors", "relaxed_acceptance")),
    *(("look_up", _CHANGED, name, 0, "0: nothing is drafted") for name in ("num_speculative_tokens", "draft_length")),
    ("forced_drafts", True, "draft_masks", False, "draft_masks=True: masks show which drafts are forced"),
    ("host_link", "native", "check_masks", True, "'auto' or 'python': masks are compared in Python"),
    ("preemption", True, "save_hidden_states", _CHANGED, "False"),
    ("page_allocation", "grow", "save_hidden_states", _CHANGED, "'reserve'"),
)
NAMES_ELSEWHERE = {
    **dict.fromkeys(("max_num_seqs", "max_batch", "max_batch_size", "batch_size", "n_parallel", "max_running_requests"), "max_rows"),
    **dict.fromkeys(("max_model_len", "max_seq_len", "max_seq_length", "n_ctx", "context_length"), "max_length"),
    **dict.fromkeys(("max_num_batched_tokens", "max_num_tokens", "n_batch", "n_ubatch", "chunked_prefill_size"), "prefill_chunk"),
    **dict.fromkeys(("num_draft_tokens", "max_draft_len", "prompt_lookup_num_tokens", "num_pred_tokens"), "num_speculative_tokens"),
    **{"prefill_chunk_size": "prefill_chunk", "speculative_num_draft_tokens": "num_speculative_tokens"},
    **dict.fromkeys(("gpu_memory_utilization", "free_gpu_memory_fraction", "num_gpu_blocks_override", "mem_fraction_static"), "num_pages"),
    **dict.fromkeys(("cuda_graph_sizes", "cudagraph_capture_sizes", "cuda_graph_bs"), "buckets"),
    **dict.fromkeys(("type_k", "type_v"), "kv_cache_dtype"),
    **dict.fromkeys(("enable_prefix_caching", "enable_block_reuse", "disable_radix_cache"), "prefix_reuse"),
    **dict.fromkeys(("block_size", "tokens_per_block"), "page_size"),
    "capacity_scheduler_policy": "page_allocation",
    "max_logprobs": "max_top_logprobs",
    **dict.fromkeys(("enforce_eager", "disable_cuda_graph"), "eager"),
    **{"attention_backend": "attention", "sampling_backend": "filters", "max_loras_per_batch": "max_loras"},
    "device": "backend",
    **{name: f"Engine.from_pretrained({here}=)" for name, here in (("dtype", "dtype"), ("quantization", "weights"))},
    "tensor_parallel_size": "Engine.from_pretrained(tensor_parallel=)",
    "seed": "Engine.submit(sampling=SamplingParams(seed=))",
}  # in vLLM, SGLang, TensorRT-LLM, llama-cpp-python and transformers


@checked_fields(NAMES_ELSEWHERE)
@dataclass(frozen=True)
class EngineConfig:
    """Sizes and modes of one engine. All static memory is allocated from it."""

    max_rows: int = 8  # requests decoded at once
    num_speculative_tokens: int = 4  # most drafts per round, 0 to 8; a request may use fewer; 0 without a drafter
    draft_length: int | Literal["auto"] = "auto"  # drafts of every round; "auto": each round has the number that is fastest
    max_length: int = 1024  # tokens of one request, prompt included
    page_size: int = 16  # tokens per cache page
    # None: enough for max_rows requests of max_length. A float: on a GPU, as many as this share of the memory holds that is free once the
    # weights are loaded; the rest is for other buffers and graphs
    num_pages: int | float | None = None
    # "reserve": a request has pages for its prompt and max_new_tokens from its first step on. "grow": it gets pages while it decodes; if
    # none is free, the request that is last in order loses its row and continues later, with the same tokens. Sampled requests without a
    # seed that have drafts reserve pages in any case: their draws depend on the drafts
    page_allocation: PageAllocation = "reserve"
    # Type of cached keys and values. auto: the model's type; fp8_e4m3: eight bits without a scale, in any model, with less precision
    kv_cache_dtype: KvCacheDtype = "auto"
    prefix_reuse: bool = True  # reuse cached full pages of equal prefixes; outputs are the same
    prefix_cache_pages: int | None = None  # cached pages kept that no request holds; None: all that are free
    rounds_in_flight: int = 2  # rounds launched before the results of the first are read
    # 1, or "until_event": a launch runs rounds until a row has finished and a request waits, or until the host or a full ring of results
    # ends it. Batches with grammars on the host have one round per launch
    rounds_per_launch: RoundsPerLaunch = 1
    prefill_chunk: int = 128  # prompt tokens between two rounds
    # Whether a chunk of a prompt is one replay of a graph, padded to a few lengths; None: on a GPU, where issuing its kernels one by one
    # takes longer than running them
    prompt_graphs: bool | None = None
    max_stop_ids: int = 8  # per request, the vocabulary's included
    max_bias_ids: int = 256  # entries of a request's logit_bias and bad_token_ids together
    max_bad_words: int = 0  # most SamplingParams.bad_words of a request, where a text counts twice: alone and after a blank
    max_bad_word_tokens: int = 8  # most tokens of one bad word
    # Device functions that change the target's logits, for the requests that name them: part of each sampled round, and checked like a step
    logits_processors: tuple[LogitsProcessor, ...] = ()
    # True: requests may accept drafts that are not the target's choice (SamplingParams.relaxed_top_n); by default outputs are the target's
    relaxed_acceptance: bool = False
    max_loras: int = 0  # LoRA adapters loaded at once, each in a slot of the graphs; 0: requests cannot have an adapter
    max_lora_rank: int = 16  # memory is taken for this rank in every slot
    max_top_logprobs: int = 0  # limit of SamplingParams.top_logprobs, up to 100
    # True: a request takes the row of one with a larger priority number, which continues later, with the same tokens. After their prompts,
    # sampled requests without a seed that have drafts keep their rows: their draws depend on the drafts
    preemption: bool = False
    max_queued: int = 4096  # requests waiting for a row; more raise QueueFullError
    forced_drafts: bool | None = None  # propose tokens that are the grammar's only choice; None: only without a draft model
    look_up: int = 0  # beside a draft model: minimum n-gram match for look-up drafts; 0: none
    draft_masks: bool = True  # False: drafts are unmasked and one host node checks them; same tokens
    greedy_only: bool = False  # True: half the graphs; requests that need more than a masked argmax are refused
    forced_acceptance: tuple[float, ...] | None = None  # for benchmarks: acceptance rate of draft 1, 2, ...; outputs are meaningless
    attention: AttentionName = "auto"  # on a GPU: flashinfer, triton, reference; auto: triton, for prompts flashinfer if it passes a test
    filters: FilterName = "auto"  # top-k, top-p etc. on a GPU: triton, flashinfer, torch; auto: the first that can run and passes its test
    buckets: tuple[int, ...] | None = None  # batch sizes with a graph; None: powers of two and max_rows
    backend: BackendName = "auto"  # tape, cuda, or auto: by the device of the target model
    grammar_backend: BackendChoice = "auto"  # for constraints that name none: automaton, xgrammar, llguidance, or auto
    save_hidden_states: str | Path | None = None  # save target hidden states to this folder, to train a draft model
    states_shard_bytes: int = 1 << 28  # size of one such file; up to twice as much is buffered in memory
    grammar_limits: GrammarLimits = DEFAULTS  # time and memory limits of one constraint
    grammar_cache_bytes: int = CACHE_BYTES  # size of the compiled grammars kept; grammars in use are kept even if larger
    compile_isolation: Isolation = "process"  # "process": xgrammar compiles in a worker process; "none": in this process, without limits
    max_compiles: int = 2  # concurrent compiles, each in its own worker process, started on demand
    check_masks: bool = False  # True: check every accepted token against its mask; a mismatch ends that request with an error
    eager: bool = False  # True: run rounds without recording them
    # When a graph cannot be captured: "raise" from capture(); "eager": note it in the report, and serve its batches with the next larger
    # graph, or eagerly if there is none
    on_capture_failure: OnFailure = "raise"
    capture_bytes: int | None = None  # limit of static buffers and graphs together, without weights; None: no limit
    round_timeout_seconds: float | None = None  # a step that waits longer for the device fails; None: no limit
    nvtx: bool = False  # True: stages and rounds are NVTX ranges
    # Where grammars are followed. "host": by host nodes. "device": by kernels, from tables in device memory; a grammar without tables, or
    # without room for them, is followed on the host. "auto": "device" where its kernel is fast and no other setting needs the host
    grammar_lane: LaneName = "auto"
    grammar_arena_bytes: int = 16 * MIB  # device memory for these tables; those of ended requests are kept while there is room
    host_link: HostLinkName = "auto"  # what drives matchers on the host: native (C, without the GIL), python; auto: native if it was built

    def __post_init__(self) -> None:
        check_fields(self, CHECKS)
        try:
            self.limits(vocab_size=1, num_tokens=1, feature_size=0)
            object.__setattr__(self, "buckets", self.buckets if self.buckets is None else self.bucket_sizes)
        except ValueError as error:
            raise ValueError(f"EngineConfig.{str(error).removeprefix('Limits.')}") from None
        max_drafts, rates = self.num_speculative_tokens, self.forced_acceptance
        drafts = self.draft_length if is_int(self.draft_length) else max_drafts
        if rates is not None and not len(rates) == drafts > 0:
            raise ValueError(f"EngineConfig.forced_acceptance: got {rates}, expected a number for each of {drafts} drafts of a round")
        if drafts > max_drafts:
            raise ValueError(f"EngineConfig.draft_length: got {drafts}, expected at most num_speculative_tokens={max_drafts}, or 'auto'")
        for name, value, other, other_value, expected in CONFLICTS:
            if _has(self, name, value) and _has(self, other, other_value):
                got = f"{clip_repr(getattr(self, name))} with {other}={clip_repr(getattr(self, other))}"
                raise ValueError(f"EngineConfig.{name}: got {got}, expected {expected}")

    @property
    def bucket_sizes(self) -> tuple[int, ...]:
        return bucket_sizes(self.max_rows, self.buckets)

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
        """With a share of the memory as num_pages, those with the fewest possible pages."""
        pages = -(-self.max_length // self.page_size)
        num_pages = self.max_rows * pages if self.num_pages is None else pages if isinstance(self.num_pages, float) else self.num_pages
        sizes = {field.name: getattr(self, field.name) for field in fields(Limits) if hasattr(self, field.name)}
        return Limits(**sizes | {"num_pages": num_pages, "vocab_size": vocab_size, "num_tokens": num_tokens, "feature_size": feature_size})


def _has(config: EngineConfig, name: str, value: object) -> bool:
    found = getattr(config, name)
    return bool(found != getattr(EngineConfig, name) if value is _CHANGED else found == value)
