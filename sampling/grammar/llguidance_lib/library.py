"""llguidance over one vocabulary. Imported by the engine and by the compile worker, so it does not import torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import llguidance

LIMIT_FIELDS = {  # the library's name of a count -> the field of GrammarLimits
    "initial_lexer_fuel": "compile_fuel",
    "max_grammar_size": "grammar_symbols",
    "max_lexer_states": "lexer_states",
    "step_lexer_fuel": "mask_fuel",
    "step_max_items": "mask_items",
    "max_items_in_row": "row_items",
}


def library_limits(limits: Mapping[str, float]) -> dict[str, int]:
    """The limits on llguidance's work in GrammarLimits, under the library's names."""
    return {name: int(limits[field]) for name, field in LIMIT_FIELDS.items()}


class TokenizerWrapper:
    """The token table in the form that the library expects.

    The library's tokenizer refers to it in a way that the garbage collector does not see, so it must not refer to the tokenizer.
    """

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokens: list[bytes], eos_token_id: int, special_token_ids: Sequence[int]) -> None:
        self.tokens, self.eos_token_id, self.special_token_ids = tokens, eos_token_id, special_token_ids

    def __call__(self, text: str) -> Sequence[int]:
        raise RuntimeError("no grammar names tokens, so no text is tokenized")


MAX_TOKEN_BYTES = 1024  # of a token: with longer ones the library panics


class LLGuidance:
    def __init__(self, tokens: list[bytes], stop_token_ids: Sequence[int], non_text_ids: Sequence[int], fuel: Mapping[str, int]) -> None:
        if (longest := max(map(len, tokens))) > MAX_TOKEN_BYTES:
            raise ValueError(f"Vocabulary.tokens: got a token of {longest} bytes, expected at most {MAX_TOKEN_BYTES} for llguidance")
        wrapper = TokenizerWrapper(tokens, stop_token_ids[0], non_text_ids)
        self._tokenizer = llguidance.LLTokenizer(wrapper, eos_token=list(stop_token_ids))  # type: ignore[arg-type]
        # The limits on counted work are reached before the time limit, so that the same text is rejected on every machine.
        self._limits = llguidance.LLParserLimits(verbose_errors=False, **fuel)  # type: ignore[arg-type]

    def matcher(self, grammar: str) -> llguidance.LLMatcher:
        """A matcher at the start of a text; its `is_error()` is true if the grammar cannot be compiled."""
        return llguidance.LLMatcher(self._tokenizer, grammar, log_level=0, limits=self._limits)
