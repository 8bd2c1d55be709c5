"""How errors name the flags of a command, also where another part of the runtime refuses their values."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import re
from collections.abc import Iterator, Mapping

# Names in errors of the runtime -> dest of the flag that sets them, where that has another name.
_OTHER_NAMES = {
    "num_speculative_tokens": "drafts",
    "max_loras": "lora_modules",
    "marker": "after",
    "path": "model",
    "prompt": "token_ids",
    **dict.fromkeys(("ebnf", "lark"), "grammar"),  # kinds of constraints
    "json_schema": "schema",
}
_OF_SERVERS = {  # flags of vLLM's and llama.cpp's servers -> dest
    **dict.fromkeys(("served_model_name", "alias"), "name"),
    **{"ctx_size": "max_length", "parallel": "max_rows", "data_parallel_size": "replicas", "draft_max": "drafts"},
    **{"tool_call_parser": "tool_format", "enable_lora": "lora_modules", "disable_log_requests": "log", "timeout": "answer_seconds"},
}
_FIELD = r"(?:(?:EngineConfig|SamplingParams|Constraint|sampling)\.)?"
_SUBJECT = re.compile(rf"(?:constraint |Constraint\.payload of )?{_FIELD}(\w+)(?:\[\d+\])*(?=:)")
_SETTING = re.compile(rf"'[^']*'|\"[^\"]*\"|\b{_FIELD}(\w+)=(?=\S)")  # quoted text is input


def flag_names(parser: argparse.ArgumentParser) -> dict[str, str]:
    """How errors name each argument, by its dest: as errors of argparse do."""
    return {action.dest: "/".join(action.option_strings) or str(action.metavar) for action in parser._actions}


def flag_hint(argument: str, flags: Mapping[str, str]) -> str:
    """The flag for one that has this name in another library, or a similar one; empty if there is none."""
    from stepgraph.runtime.validate import ENGINE_NAMES, REQUEST_NAMES  # imports torch, for an error only

    name = argument[2:].partition("=")[0].replace("-", "_")
    words = re.findall(r"\w+", {**ENGINE_NAMES, **REQUEST_NAMES}.get(name, ""))
    dests = [_OTHER_NAMES.get(f"constraint {word}", _OTHER_NAMES.get(word, word)) for word in words]
    close = difflib.get_close_matches(name, flags, 1, 0.8)
    return next((flags[dest] for dest in (_OF_SERVERS.get(name, ""), *dests, *close) if dest in flags), "")


@contextlib.contextmanager
def naming_flags(flags: Mapping[str, str]) -> Iterator[None]:
    """Within the block, a ValueError that names a field of the runtime names its flag instead. flags: as from flag_names."""

    def flag_of(name: str) -> str | None:
        return flags.get(_OTHER_NAMES.get(name, name))

    try:
        yield
    except ValueError as error:
        message = str(error)
        if "lower max_rows" in message:
            from stepgraph.graphs.errors import MEMORY_SETTINGS

            names = filter(None, map(flag_of, (*re.findall(r"\w+", MEMORY_SETTINGS), "max_new_tokens")))
            message = message.replace(MEMORY_SETTINGS, ", ".join(dict.fromkeys(names)))
        if (subject := _SUBJECT.match(message)) and (flag := flag_of(subject[1])):
            message = flag + message[subject.end() :]
        raise ValueError(_SETTING.sub(lambda found: f"{flag} " if (flag := flag_of(found[1])) else found[0], message)) from None
