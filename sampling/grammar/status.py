"""The numbers that host nodes and the device exchange: columns of the row table, states of rows and of masks, tags."""

from __future__ import annotations

from enum import IntEnum

TAG_FIELDS = 4  # owner, committed tokens, index, MaskStatus
CONTENT_FIELDS = 17  # of a mask: mask_content of link/c/host_link.h
BITS_PER_WORD = 32  # of a packed mask


class HostColumn(IntEnum):
    """The columns of the device's row table that host nodes read; its leading columns."""

    OWNER = 0  # serial of the request
    GENERATED = 1  # generated tokens
    LAST_TOKEN = 2
    ACCEPTED = 3  # drafts that the latest round accepted
    FINISH = 4  # FinishCode


class FinishCode(IntEnum):
    """State of a row. 0 is inert, so zeroed memory runs nothing."""

    RETIRED = 0  # no request owns the row, or its owner was cancelled
    RUNNING = 1
    STOP = 2
    LENGTH = 3
    CONSTRAINT_COMPLETE = 4
    DEAD_END = 5
    MASK_FAULT = 6  # no valid mask for this row, history and position: nothing may be sampled
    LOGITS_FAULT = 7  # the best legal logit is not finite


class MaskStatus(IntEnum):
    """The state of a mask row. Only from an OK row may a token be sampled."""

    NONE = 0  # never filled, or tagged for another row
    OK = 1  # a token other than a stop token is legal
    COMPLETE = 2  # the text is complete; only a stop token is legal
    TERMINATED = 3  # a stop token was accepted; no token is legal
    DEAD_END = 4  # no token is legal, and the text is not complete
    ILLEGAL = 5  # the draft before this row was not accepted; set by the host link
    FAULT = 6  # the grammar library failed; the matcher can no longer be used
