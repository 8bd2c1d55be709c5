"""Constants of the data that host nodes and the device exchange: columns of the row table, states of rows and masks, tags."""

from __future__ import annotations

from enum import IntEnum

TAG_FIELDS = 4  # owner, committed tokens, index, MaskStatus
CONTENT_FIELDS = 17  # fields of mask_content in link/c/host_link.h
BITS_PER_WORD = 32  # of a packed mask


class HostColumn(IntEnum):
    """The leading columns of the device's row table, which host nodes read."""

    OWNER = 0  # serial of the request
    GENERATED = 1  # generated tokens
    LAST_TOKEN = 2
    ACCEPTED = 3  # drafts that the latest round accepted
    FINISH = 4  # FinishCode


class FinishCode(IntEnum):
    """State of a row. 0 is inactive, so a row of zeroed memory is not run."""

    RETIRED = 0  # no request owns the row, or its owner was cancelled
    RUNNING = 1
    STOP = 2
    LENGTH = 3
    CONSTRAINT_COMPLETE = 4
    DEAD_END = 5
    MASK_FAULT = 6  # no valid mask for this row, history and position: nothing may be sampled
    LOGITS_FAULT = 7  # the best legal logit is not finite


class MaskStatus(IntEnum):
    """The state of a mask row. A token may be sampled only under an OK row."""

    NONE = 0  # never filled, or tagged for another row
    OK = 1  # a token other than a stop token is legal
    COMPLETE = 2  # the text is complete; only a stop token is legal
    TERMINATED = 3  # a stop token was accepted; no token is legal
    DEAD_END = 4  # no token is legal, and the text is not complete
    ILLEGAL = 5  # the draft before this row was not accepted; set by the host link
    FAULT = 6  # the grammar library failed; the matcher can no longer be used
