"""Constants of the choice of the draft length, the same for all models. tests/runtime/test_draft_length.py shows what they achieve."""

from __future__ import annotations

# Estimates of acceptance.
DISCOUNT = 0.97  # factor of the weight of older rounds, per round with drafts
PAUSED_DISCOUNT = 0.95  # the same for the estimate of a row, per round without drafts: it soon equals the estimate of all rows again
PAUSED_DISCOUNT_OF_ALL = 0.98  # the same for the estimate of all rows, which returns to the constant prior slowly
PRIOR_ACCEPTANCE = 0.55  # probability that each draft is accepted, before any result
PRIOR_ACCEPTANCE_WITHOUT_MODEL = 0.3  # the same in rounds without the model. Lower, since rounds with the model also measure the look-up
PRIOR_ROUNDS = 3.0  # rounds with drafts that have together the weight of the prior
# When the choice changes. Shares of expected tokens per second.
HYSTERESIS = 0.02  # another length must be better by at least this share
PLAIN_HYSTERESIS = 0.25  # plain rounds must: few results vary as much, later drafts cost a catch-up, and the account bounds the loss
RETRY_SHARE = 0.9  # a length that was not used for STALE_ROUNDS is tried if it has this share of the best; after twice as many, its square
STALE_ROUNDS = 64  # rounds after which the time of a draft length may have been measured on a busier machine
# Lengths of runs, in rounds.
DRAFT_RUN = 3  # fewest with drafts after plain ones, as the first verifies none and results arrive later; and most of one choice
PLAIN_RUN = 5  # plain ones after a choice of PLAIN, unless the requests change
# The account: what rounds with drafts may lose against plain ones.
INITIAL_CREDIT = 3.0  # plain rounds whose time it holds at first, at least
TRIAL_ROUNDS = 5  # rounds with drafts that it pays at first, a run and those in flight: in a batch drafts may double the time
MAX_CREDIT = 16.0  # plain rounds whose time it holds at most
SLACK = 0.01  # share of the time of each plain round that is credited to it
FREE_TRIES = 3  # runs of drafts without an accepted one; after more, SLACK is divided by their multiple of this, so later runs are rarer
MAX_BACKOFF = 8  # largest divisor of SLACK: a drafter that was never right is still tried about every 300 rounds
# Measured times of rounds.
COST_WEIGHT = 0.05  # least weight of a new round in the time of its choice
MIN_COST_RATIO = 1.03  # a round with more drafts takes at least this multiple of the time of one with fewer
SETTLED_ROUNDS = 8  # rounds of a choice after others that measure its time relative to theirs; later changes are the machine's
