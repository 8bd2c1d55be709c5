"""Values of flags: files, standard input, folders and lists of ids. ValueErrors have the form `--flag: got VALUE, expected ACCEPTED`."""

from __future__ import annotations

import contextlib
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from stepgraph.sampling.fields import clip_repr, parse_exact_json


def read_schema(flag: str, value: str) -> dict[str, Any] | bool:
    """A JSON schema: the value itself if it starts with {, otherwise the content of the file at this path."""
    text = value if value.lstrip().startswith("{") else read_file(flag, value, "a JSON schema: the path of a file, or the schema itself")
    try:
        schema = parse_exact_json(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{flag}: got {clip_repr(value)}, which is not JSON ({error}), expected a JSON schema") from None
    if not isinstance(schema, (dict, bool)):
        raise ValueError(f"{flag}: got {clip_repr(value)} with a {type(schema).__name__}, expected an object, true or false")
    return schema


def read_file(flag: str, path: str, expected: str) -> str:
    why: object = "empty"  # Path("") is the current folder
    try:
        if path:
            return Path(path).read_bytes().decode("utf-8-sig")  # some editors start a file with a byte order mark; CRLF stays CRLF
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
    raise ValueError(f"{flag}: got {clip_repr(path)} ({why}), expected {expected}")


def read_standard_input(flag: str) -> str:
    try:
        return sys.stdin.buffer.read().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{flag}: got bytes that are not UTF-8 ({error}), expected text") from None


def parse_token_ids(flag: str, value: str | None) -> list[int] | None:
    """Ids separated by commas or spaces."""
    if value is None:
        return None
    with contextlib.suppress(ValueError):
        if ids := [int(word) for word in value.replace(",", " ").split()]:
            return ids
    raise ValueError(f"{flag}: got {clip_repr(value)}, expected token ids such as 1,2,3")


def require_writable(flag: str, path: Path) -> None:
    """Creates the file and its folder, since decoding takes minutes before it is written."""
    with writing(flag, path):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("a").close()


@contextlib.contextmanager
def writing(flag: str, path: Path) -> Iterator[None]:
    """ValueError with flag and path if the file cannot be written: errors of a full disk do not contain them."""
    try:
        yield
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise ValueError(f"{flag}: got {clip_repr(str(path))} ({why}), expected the path of a file that can be written") from None


def open_listener(host: str, port: int) -> socket.socket:
    """A listening socket. ValueError if the address cannot be used, and for an empty host, which would mean all addresses."""
    why = "0.0.0.0 listens on all addresses"
    try:
        if host:
            listener = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
            # Accepted sockets inherit it. Without it the body of an answer waits 40 ms for the acknowledgement of the head.
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return listener
    except (OSError, ValueError, TypeError) as error:  # TypeError: a NUL, or a name that IDNA refuses
        why = getattr(error, "strerror", None) or str(error)
    expected = "an address of this machine and a free port"
    raise ValueError(f"--host, --port: got {clip_repr(host)}, {port} ({why}), expected {expected}")
