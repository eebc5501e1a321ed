"""Safe reading of untrusted JSON, YAML and safetensors headers, with limits on size and depth.

Every function that reads returns a value or raises a short ``ValueError``, in bounded time and memory.
"""

import json
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pql.errors import ConfigError

JSON_BYTES = 16 << 20
YAML_BYTES = 256 << 10
HEADER_BYTES = 4 << 20  # of a safetensors file: some 40,000 tensors
DEPTH = 64  # of nested lists and mappings
VALUES = 1_000_000


def expanded(setting: str, path: str | Path) -> Path:
    """Return the path with a leading ``~`` or ``~user`` replaced by that user's home directory.

    Args:
        setting: name of the setting or argument, for errors.
    Raises:
        ConfigError: there is no such user, or none with a home directory.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError:
        user = Path(path).parts[0]
        raise ConfigError(setting, path, f"a path whose {user} is a home directory on this machine") from None


def read_bytes(path: Path, most: int) -> bytes:
    """Return the content of a file. Raises ``OSError``: it cannot be read; ``ValueError``: it is no ordinary file, or
    larger than ``most`` bytes."""
    check_ordinary(path)
    with path.open("rb") as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise ValueError(f"{path.name} is larger than {most:,} bytes")
    return data


def create_file(path: Path, text: str) -> None:
    """Write a new file, replacing any of that name; links are replaced, not followed. Raises ``OSError``."""
    path.unlink(missing_ok=True)
    with path.open("x") as file:  # "x" does not follow links either
        file.write(text)


def check_ordinary(path: Path) -> None:
    """Raise ``ValueError`` if the path exists and is not a regular file: reading a pipe might never end."""
    if path.exists() and not path.is_file():
        raise ValueError(f"{path.name} is no ordinary file")


def read_json(path: Path) -> Any:
    """Return the value of a JSON file. Raises as :func:`read_bytes` and :func:`parse_json`."""
    return parse_json(read_bytes(path, JSON_BYTES))


def parse_json(text: bytes | str) -> Any:
    """Parse JSON. Raises ``ValueError`` if it is invalid, too large or nested too deep."""
    if len(text) > JSON_BYTES:
        raise ValueError(f"more than {JSON_BYTES:,} bytes of JSON")
    try:
        data = json.loads(text)
    except RecursionError:
        raise ValueError(f"nested more than {DEPTH} deep") from None
    check_tree(data)
    return data


def read_yaml(path: Path) -> Any:
    """A YAML file's value, of plain types. Raises as :func:`read_json`; ``ValueError`` also for an alias: what it
    repeats may be repeated a billion times."""
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        text, depth = read_bytes(path, YAML_BYTES).decode(), 0
        for event in yaml.parse(text, Loader=loader):
            if isinstance(event, yaml.AliasEvent):
                raise ValueError("an alias, which no run writes")
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > DEPTH:
                raise ValueError(f"nested more than {DEPTH} deep")
        data = yaml.load(text, Loader=loader)
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from error
    check_tree(data)
    return data


def check_tree(data: Any, depth: int = DEPTH, values: int = VALUES) -> None:
    """Raises ``ValueError`` where nested lists and mappings are too deep, too many, or have keys that are no text."""
    for level, value in walk(data):
        values -= 1
        if level > depth:
            raise ValueError(f"nested more than {depth} deep")
        if values < 0:
            raise ValueError("too many values")
        if isinstance(value, dict) and not all(isinstance(key, str) for key in value):
            raise ValueError("names that are no text")


def walk(data: Any) -> Iterator[tuple[int, Any]]:
    """Yield every value of nested lists and mappings with its depth, from 0; without recursion."""
    left = [(0, data)]
    while left:
        level, value = left.pop()
        yield level, value
        if isinstance(value, dict | list):
            left += [(level + 1, v) for v in (value.values() if isinstance(value, dict) else value)]


def check_header(path: Path) -> None:
    """Raises ``ValueError`` for a safetensors file whose header is larger than any that is written here; ``OSError``
    where it cannot be read."""
    check_ordinary(path)
    with path.open("rb") as file:
        start = file.read(8)
    if len(start) < 8:
        raise ValueError(f"{path.name} is cut off")
    (size,) = struct.unpack("<Q", start)
    if size > HEADER_BYTES:
        raise ValueError(f"{path.name} has a header of {size:,} bytes, more than {HEADER_BYTES:,}")


def flat(settings: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted name, value) of every leaf; an empty mapping is a leaf."""
    for key, value in settings.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
