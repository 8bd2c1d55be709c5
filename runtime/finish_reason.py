"""Why jobs end."""

from __future__ import annotations

import enum


class FinishReason(str, enum.Enum):
    """Why a job ended. Every job ends with one of these."""

    STOP = "stop"  # a stop token was emitted, which is the last token of the output; or the text contains a stop text
    LENGTH = "length"  # max_new_tokens were emitted; a constrained text may be complete, but its end is found one token later
    CONSTRAINT_COMPLETE = "constraint_complete"  # the grammar allows only a stop token, which is not emitted
    CANCELLED = "cancelled"
    DEAD_END = "dead_end"  # the output is incomplete, but grammar and bad_token_ids leave no legal token
    ERROR = "error"
    __str__ = str.__str__
