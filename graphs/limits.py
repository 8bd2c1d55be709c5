"""Limits that determine the shapes of static tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from stepgraph.sampling.fields import Check, check_fields, is_int, one_of, whole
from stepgraph.sampling.params import MAX_TOP_LOGPROBS

KvCacheDtype = Literal["auto", "fp8_e4m3"]
PageAllocation = Literal["reserve", "grow"]
RoundsPerLaunch = Literal[1, "until_event"]
MAX_DRAFTS = 8  # per round
MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS = 1024, 32
SETTINGS = {  # accepted values of the fields that EngineConfig has, too
    **dict.fromkeys(("max_rows", "max_length", "page_size", "rounds_in_flight", "prefill_chunk"), whole(1)),
    **dict.fromkeys(("max_stop_ids", "max_bias_ids", "max_lora_rank"), whole(1)),
    "num_speculative_tokens": whole(0, MAX_DRAFTS),
    "max_bad_words": whole(0, MAX_BAD_WORDS),
    "max_bad_word_tokens": whole(2, MAX_BAD_WORD_TOKENS),
    "max_top_logprobs": whole(0, MAX_TOP_LOGPROBS),
    "max_loras": whole(0),
    "rounds_per_launch": Check(lambda value: value == "until_event" or (is_int(value) and value == 1), "1 or 'until_event'"),
    "kv_cache_dtype": one_of(get_args(KvCacheDtype)),
    "page_allocation": one_of(get_args(PageAllocation)),
}


@dataclass(frozen=True)
class Limits:
    """Sizes of the static memory. submit() refuses a request that exceeds them; nothing is truncated."""

    max_rows: int
    num_speculative_tokens: int
    max_length: int  # tokens of one row, prompt included
    page_size: int
    num_pages: int  # usable pages, without the scratch page
    vocab_size: int  # width of the logits
    num_tokens: int  # ids from here to vocab_size are padding and never generated
    feature_size: int  # width of the features that the target passes to the draft
    rounds_in_flight: int = 2
    max_stop_ids: int = 8
    max_bias_ids: int = 256  # entries of logit_bias and bad_token_ids together
    max_bad_words: int = 0  # per request
    max_bad_word_tokens: int = 8  # per bad word
    max_top_logprobs: int = 0  # most probable tokens reported per position
    prefill_chunk: int = 128
    rounds_per_launch: RoundsPerLaunch = 1  # until_event: graphs/publishing.py
    kv_cache_dtype: KvCacheDtype = "auto"  # fp8_e4m3: attention/float8.py
    page_allocation: PageAllocation = "reserve"  # grow: a request has pages for the rounds in flight, not for its maximum length
    max_loras: int = 0
    max_lora_rank: int = 16

    def __post_init__(self) -> None:
        check_fields(self, SETTINGS | dict.fromkeys(("num_pages", "vocab_size", "num_tokens"), whole(1)) | {"feature_size": whole(0)})
        if self.num_tokens > self.vocab_size:
            raise ValueError(f"Limits.num_tokens: got {self.num_tokens}, expected at most vocab_size={self.vocab_size}")
        if self.num_pages < self.pages_per_row:
            raise ValueError(
                f"Limits.num_pages: got {self.num_pages}, expected >= {self.pages_per_row} for one row of max_length={self.max_length}"
            )

    @property
    def rows(self) -> int:
        """Rows of state: one per request, and the dummy row that pads batches."""
        return self.max_rows + 1

    @property
    def dummy_row(self) -> int:
        return self.max_rows

    @property
    def positions(self) -> int:
        """Positions that one row takes in target_verify: its last token and its drafts."""
        return self.num_speculative_tokens + 1

    @property
    def pages_per_row(self) -> int:
        return -(-self.max_length // self.page_size)

    @property
    def cache_slots(self) -> int:
        """Cache entries of a model. Page 0 is the scratch page, for inert positions."""
        return (self.num_pages + 1) * self.page_size

    @property
    def prompt_window(self) -> int:
        """Prompt tokens on the device at once: a chunk and the next token. The first chunk after a shared prefix has at least two."""
        return max(self.prefill_chunk, 2) + 1

    @property
    def mask_words(self) -> int:
        return -(-self.vocab_size // 32)

    @property
    def ring_depth(self) -> int:
        """Slots of a ring that each round uses once: one per round in flight, and one that is being written."""
        return self.rounds_in_flight + 1

    @property
    def loops(self) -> bool:
        """Whether a launch may run many rounds."""
        return self.rounds_per_launch == "until_event"

    @property
    def grows(self) -> bool:
        """Whether requests get pages while they decode."""
        return self.page_allocation == "grow"

    @property
    def result_slots(self) -> int:
        """Slots of the rings of results. With loops, rounds run ahead of the host by as many."""
        return 256 if self.loops else self.ring_depth

    @property
    def admission_ring_depth(self) -> int:
        """Slots of a ring that each row may use once between two rounds. With fewer, a burst of arrivals would wait for the device."""
        return self.max_rows * self.ring_depth
