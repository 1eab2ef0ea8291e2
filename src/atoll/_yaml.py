"""YAML that remembers where each key stands and fills in environment variables."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import yaml

from atoll.errors import ConfigError

Key = tuple[str | int, ...]
"""The way to a value: `("candidates", 0, "prices", "input")`."""

_VARIABLE: Final = re.compile(r"\$(?:\$|\{([A-Za-z_][A-Za-z0-9_]*)(?::-([^}]*))?\})")
_MERGE_TAG: Final = "tag:yaml.org,2002:merge"


class _Loader(yaml.SafeLoader):
    """SafeLoader without timestamps: a version such as 2024-08-06 in a model's name is text."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


class EnvText(str):
    """A value that came from the environment, still without a type: `plain()` reads it as YAML would."""

    __slots__ = ()

    def plain(self) -> Any:
        return yaml.load(str(self), Loader=_Loader)  # noqa: S506 - a SafeLoader


@dataclass(slots=True)
class Document:
    """A parsed file: its data, and the line of every key and item."""

    name: str
    data: Any = None
    lines: dict[Key, int] = field(default_factory=dict)

    def line(self, key: Sequence[str | int]) -> int:
        """The line of the nearest thing on the way to `key` that the file holds."""
        way = tuple(key)
        while way and way not in self.lines:
            way = way[:-1]
        return self.lines.get(way, 1)

    def error(self, key: Sequence[str | int], message: str) -> ConfigError:
        """A ConfigError that begins with file, line and key."""
        return ConfigError(
            f"{self.name}:{self.line(key)}: {dotted(key)}: {message}" if key else f"{self.name}: {message}"
        )


def dotted(key: Sequence[str | int]) -> str:
    """`candidates[0].prices.input`."""
    text = ""
    for part in key:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text


def parse_document(text: str, name: str, environ: Mapping[str, str]) -> Document:
    """Parse one YAML document; raises ConfigError for bad YAML, doubled keys and missing environment variables."""
    document = Document(name)
    try:
        root = yaml.compose(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f":{mark.line + 1}" if mark else ""
        raise ConfigError(f"{name}{where}: not valid YAML: {error.problem or error}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{name}: not valid YAML: {error}") from None
    if root is not None:
        document.data = _Builder(document, environ).value(root, ())
    return document


class _Builder:
    """Turns a node tree into plain data, noting lines on the way."""

    def __init__(self, document: Document, environ: Mapping[str, str]) -> None:
        self._document = document
        self._environ = environ
        self._scalars = _Loader("")
        self._open: set[int] = set()

    def value(self, node: yaml.Node, key: Key) -> Any:
        self._document.lines.setdefault(key, node.start_mark.line + 1)
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node, key)
        if id(node) in self._open:
            raise self._document.error(key, "an alias that contains itself is not allowed")
        self._open.add(id(node))
        try:
            if isinstance(node, yaml.SequenceNode):
                return [self.value(item, (*key, index)) for index, item in enumerate(node.value)]
            assert isinstance(node, yaml.MappingNode)
            return self._mapping(node, key)
        finally:
            self._open.discard(id(node))

    def _mapping(self, node: yaml.MappingNode, key: Key) -> dict[str, Any]:
        mapping: dict[str, Any] = {}
        for name_node, value_node in node.value:
            line = name_node.start_mark.line + 1
            if name_node.tag == _MERGE_TAG:
                for merged in value_node.value if isinstance(value_node, yaml.SequenceNode) else [value_node]:
                    mapping = {**self.value(merged, key), **mapping}
                continue
            name = name_node.value
            if not isinstance(name, str):
                raise ConfigError(f"{self._document.name}:{line}: a key must be plain text")
            way = (*key, name)
            if way in self._document.lines and name in mapping:
                first = self._document.lines[way]
                raise ConfigError(
                    f"{self._document.name}:{line}: {dotted(way)}: stands twice, on line {first} too; keep one"
                )
            self._document.lines[way] = line
            mapping[name] = self.value(value_node, way)
        return mapping

    def _scalar(self, node: yaml.ScalarNode, key: Key) -> Any:
        if "$" in node.value and node.tag == "tag:yaml.org,2002:str":
            text = _VARIABLE.sub(lambda match: self._variable(match, key), node.value)
            return EnvText(text)
        try:
            return self._scalars.construct_object(node)
        except (yaml.YAMLError, ValueError) as error:
            raise self._document.error(key, f"{node.value!r} cannot be read: {error}") from None

    def _variable(self, match: re.Match[str], key: Key) -> str:
        name, default = match.group(1), match.group(2)
        if name is None:
            return "$"
        value = self._environ.get(name) or default
        if value is None:
            raise self._document.error(
                key, f"the environment variable {name} is not set; set it, or write ${{{name}:-default}}"
            )
        return value
