"""What Engine.submit() takes: prompts, and the options beside them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, TypedDict

import numpy as np
import numpy.typing as npt
from torch import Tensor

from stepgraph.runtime.text import Message
from stepgraph.sampling.params import SamplingParams

TokenIds: TypeAlias = Sequence[int] | npt.NDArray[np.integer[Any]] | Tensor


Prompt: TypeAlias = str | Sequence[Message] | TokenIds


Prompts: TypeAlias = list[str] | Sequence[Sequence[int]] | Sequence[Sequence[Message]]


class RequestOptions(TypedDict, total=False):
    """The options of Engine.submit(), where they are described."""

    constraint: object
    sampling: SamplingParams | None
    max_new_tokens: int | None
    num_speculative_tokens: int | None
    draft_ids: TokenIds | None
    cache_salt: str
    lora_name: str
    prompt_embeddings: Mapping[int, Tensor] | None
    resume_from: TokenIds | None
    priority: int
    tenant: str
