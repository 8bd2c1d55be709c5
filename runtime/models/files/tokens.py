"""The token table of a model that is loaded: as wide as its logits, with the stop ids that its own files name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stepgraph.runtime.models.files.gguf import GgufSource
from stepgraph.sampling.grammar.tokenizers.gguf_fields import table_of_fields
from stepgraph.sampling.grammar.tokenizers.tokenizer_json import read_folder
from stepgraph.sampling.grammar.vocabulary import Vocabulary


def folder_vocabulary(folder: Path, config: Mapping[str, Any], logits_width: int) -> Vocabulary:
    """The table of tokenizer.json, with the stop ids that generation_config.json or config.json names."""
    return Vocabulary.from_table(read_folder(folder, config, logits_width))


def gguf_vocabulary(source: GgufSource, path: Path, logits_width: int) -> Vocabulary:
    """The table inside a GGUF file."""
    return Vocabulary.from_table(table_of_fields(source.field, path, logits_width))
