"""Typed, frozen settings, each default once. `load_settings` reads them from YAML.

A wrong key, type or value and a missing environment variable are `ConfigError`s that name file, line, key and what is
allowed. `${NAME}` in a value is replaced by the environment variable NAME; `${NAME:-default}` has a default.
"""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Literal, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, SecretStr, ValidationError, model_validator

from atoll._yaml import Document, EnvText, Key, parse_document
from atoll.errors import ConfigError

Capability = Literal["tools", "vision", "json_schema", "logprobs", "embeddings"]
AUTO_MODEL: Final = "auto"
PRIOR_ROUTER: Final = "prior"
"""The model name that asks for routing."""


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=())


class Timeouts(_Section):
    """How long an upstream may take, in seconds."""

    connect_s: Annotated[float, Field(gt=0)] = 5.0
    first_byte_s: Annotated[float, Field(gt=0)] = 120.0
    """Until the answer's head, and in a stream until its first data event."""
    idle_s: Annotated[float, Field(gt=0)] = 60.0
    """Between two reads once the answer has begun."""
    total_s: Annotated[float, Field(gt=0)] = 900.0


class _UpstreamBase(_Section):
    timeouts: Timeouts = Timeouts()
    max_connections: Annotated[int, Field(gt=0)] = 1000


class OpenAIUpstream(_UpstreamBase):
    """Any OpenAI-compatible base URL; bytes are passed through."""

    kind: Literal["openai"]
    base_url: Annotated[str, Field(pattern=r"^https?://[^\s]+$")]
    api_key: SecretStr | None = None
    headers: dict[str, str] = {}
    """Fixed headers sent with every request (an organisation, say)."""
    stream_usage: bool = True
    """Whether it understands `stream_options.include_usage`, which the gateway asks for to keep its books."""


class LiteLLMUpstream(_UpstreamBase):
    """Any other provider, through the litellm library."""

    kind: Literal["litellm"]
    provider: str
    """litellm's provider name: `anthropic`, `gemini`, `bedrock`, …"""
    api_key: SecretStr | None = None
    base_url: Annotated[str, Field(pattern=r"^https?://[^\s]+$")] | None = None


class LocalUpstream(_UpstreamBase):
    """A model served by Atoll's own engine in a process of its own."""

    kind: Literal["local"]
    model: str = "smollm2-135m-instruct"
    """`smollm2-135m-instruct` (embedded) or a path to a GGUF file or a folder with a Hugging Face checkpoint."""
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    context_tokens: Annotated[int, Field(gt=0)] | None = None
    """At most what the model was trained for, which is the default."""
    max_batch: Annotated[int, Field(gt=0)] = 64
    max_waiting: Annotated[int, Field(ge=0)] = 1024
    """Requests that may queue; the next one gets 429."""
    threads: Annotated[int, Field(gt=0)] | None = None
    start_timeout_s: Annotated[float, Field(gt=0)] = 180.0


class ReplayUpstream(_UpstreamBase):
    """Answers from a table of recorded answers: for demos and tests."""

    kind: Literal["replay"]
    table: Path
    """A JSONL file with one `{"model", "prompt", "answer", …}` a line."""
    chunk_delay_s: Annotated[float, Field(ge=0)] = 0.0


UpstreamSettings = Annotated[
    OpenAIUpstream | LiteLLMUpstream | LocalUpstream | ReplayUpstream, Field(discriminator="kind")
]


class Prices(_Section):
    """US dollars per million tokens."""

    input: Annotated[float, Field(ge=0)]
    output: Annotated[float, Field(ge=0)]
    cached_input: Annotated[float, Field(ge=0)] | None = None


class CandidateSettings(_Section):
    """A model that can be asked for, or chosen. What is left out comes from litellm's price table."""

    name: Annotated[str, Field(min_length=1, max_length=200)]
    upstream: str
    model: str | None = None
    """What the upstream calls it; the name, if left out."""
    effort: str | None = None
    prices: Prices | None = None
    context_tokens: Annotated[int, Field(gt=0)] | None = None
    max_output_tokens: Annotated[int, Field(gt=0)] | None = None
    capabilities: frozenset[Capability] | None = None
    quality_prior: Annotated[float, Field(ge=0, le=1)] | None = None
    sees_private_data: bool | None = None
    """Whether private data may be sent there; by default only to local models."""
    aliases: tuple[str, ...] = ()
    parameters_billion: Annotated[float, Field(gt=0)] | None = None
    is_routable: bool = True
    """Whether `auto` may choose it."""


class EmbedderSettings(_Section):
    kind: Literal["static", "minilm"] = "static"
    dtype: Literal["auto", "float32", "bfloat16", "int8"] = "auto"
    """For `minilm`. int8 needs the `onnx` extra."""
    time_limit_s: Annotated[float, Field(gt=0)] = 0.25
    """After which the static embedder decides."""
    batch_window_s: Annotated[float, Field(ge=0)] = 0.002
    max_batch: Annotated[int, Field(gt=0)] = 32
    cache_entries: Annotated[int, Field(ge=0)] = 10_000


class RouterSettings(_Section):
    """`router: prior` and `router: PATH` are short for `{name: prior}` and `{path: PATH}`."""

    name: str | None = None
    """Which router `path` must hold. Alone only `prior`, which ships with Atoll; the default."""
    path: Annotated[Path, Field(strict=False)] | None = None
    """A router made by `atoll fit`."""
    _place: str = PrivateAttr(default="routing.router")

    @property
    def place(self) -> str:
        """File, line and key, for errors that only show when the router is opened."""
        return self._place

    @model_validator(mode="before")
    @classmethod
    def _from_text(cls, given: Any) -> Any:
        if isinstance(given, str):
            return {"name": given} if given == PRIOR_ROUTER else {"path": given}
        return given

    def __str__(self) -> str:
        if self.path is None:
            return self.name or PRIOR_ROUTER
        return str(self.path) if self.name is None else f"{self.name} from {self.path}"


class RoutingSettings(_Section):
    router: RouterSettings = RouterSettings()
    """`prior` (shipped), the path of a router made by `atoll fit`, or `{name, path}`."""
    reload_s: Annotated[float, Field(gt=0)] | None = None
    """How often to look whether the router's file has changed; by default never, only SIGHUP makes it be read anew."""
    embedder: EmbedderSettings = EmbedderSettings()
    default_candidate: str | None = None
    """Answers when routing fails; the first routable candidate, if left out."""
    default_preference: Annotated[float, Field(ge=0, le=1)] = 0.5
    exploration: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of `auto` requests that try another candidate, so that the router keeps learning."""
    session_ttl_s: Annotated[float, Field(gt=0)] = 3600.0
    max_sessions: Annotated[int, Field(gt=0)] = 100_000
    cooldown_s: Annotated[float, Field(ge=0)] = 5.0
    """How long a candidate that failed is tried last, unless its upstream named a time."""
    max_attempts: Annotated[int, Field(ge=1, le=20)] = 4
    """Calls of upstreams for one request of `auto`, the first one included."""


class LimitSettings(_Section):
    max_body_bytes: Annotated[int, Field(gt=0)] = 20_000_000
    max_json_depth: Annotated[int, Field(gt=0)] = 64
    max_response_bytes: Annotated[int, Field(gt=0)] = 100_000_000
    body_timeout_s: Annotated[float, Field(gt=0)] = 60.0
    """How long a client may take to send its body."""
    client_stall_s: Annotated[float, Field(gt=0)] = 120.0
    """How long a client may leave what it was sent unread before its request is given up."""


class LedgerSettings(_Section):
    enabled: bool = True
    store_content: bool = False
    """Whether prompts and answers are kept."""
    flush_interval_s: Annotated[float, Field(gt=0, le=1)] = 0.05
    max_text_chars: Annotated[int, Field(gt=0)] = 2000
    """No text in a row is longer, errors included; content has its own limit."""
    max_content_chars: Annotated[int, Field(gt=0)] = 100_000


class ServerSettings(_Section):
    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 8700
    """0 takes any free port."""
    workers: Annotated[int, Field(ge=1, le=256)] = 1
    api_keys: tuple[SecretStr, ...] = ()
    """Keys that clients must send. Without any, everybody on this machine may call, and only loopback can be bound."""
    allowed_hosts: tuple[str, ...] = ()
    """Names that the Host header may hold besides localhost. Bound to loopback, others are refused (DNS rebinding);
    elsewhere every name is accepted unless some are listed here."""
    keepalive_comment_s: Annotated[float, Field(gt=0)] | None = None
    """Send an SSE comment when a stream has been silent for so long; None sends none."""
    drain_s: Annotated[float, Field(ge=0)] = 30.0
    """How long running requests may go on after SIGTERM."""


class Settings(_Section):
    """The whole configuration."""

    server: ServerSettings = ServerSettings()
    data_dir: Path = Path("~/.local/share/atoll")
    upstreams: dict[str, UpstreamSettings] = {}
    candidates: tuple[CandidateSettings, ...] = ()
    routing: RoutingSettings = RoutingSettings()
    limits: LimitSettings = LimitSettings()
    ledger: LedgerSettings = LedgerSettings()

    @property
    def data_path(self) -> Path:
        return self.data_dir.expanduser()


def load_settings(path: Path | None, environ: Mapping[str, str] | None = None) -> Settings:
    """Read a YAML file into settings; without a file, the defaults.

    Raises ConfigError with one line for each thing that is wrong, each naming file, line, key and what is allowed.
    """
    if path is None:
        return Settings()
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}. Name an existing file with --config") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 at byte {error.start}") from None
    return parse_settings(text, str(path), os.environ if environ is None else environ)


def parse_settings(text: str, name: str, environ: Mapping[str, str]) -> Settings:
    """`load_settings` for a text that is already here; `name` stands for the file in errors."""
    document = parse_document(text, name, environ)
    if document.data is None:
        return Settings()
    if not isinstance(document.data, dict):
        raise ConfigError(
            f"{name}:1: expected keys and values ({', '.join(Settings.model_fields)}), found {document.data!r}"
        )
    settings = _validate(document)
    if "router" in settings.routing.model_fields_set:
        settings.routing.router._place = f"{name}:{document.line(('routing', 'router'))}: routing.router"
    problems = [document.error(key, message) for key, message in _contradictions(settings)]
    if problems:
        raise ConfigError("\n".join(map(str, problems)))
    return settings


def _validate(document: Document) -> Settings:
    """Strict validation; a value from the environment may be read as a number or a boolean where one is wanted."""
    try:
        return Settings.model_validate_json(json.dumps(document.data))
    except ValidationError as error:
        typed = [_give_type(document.data, _way(document.data, problem["loc"])) for problem in error.errors()]
        if any(typed):
            return _validate(document)
        raise ConfigError("\n".join(str(problem) for problem in _problems(document, error))) from None


def _give_type(data: Any, way: Key) -> bool:
    """Read the environment's text at `way` as YAML would; whether there was such a text."""
    if not way:
        return False
    parent = data
    for part in way[:-1]:
        parent = parent[part]
    last: Any = way[-1]
    value = parent[last] if isinstance(parent, list) or last in parent else None
    if not isinstance(value, EnvText):
        return False
    plain = value.plain()
    parent[last] = str(value) if isinstance(plain, str) else plain
    return not isinstance(plain, str)


def _way(data: Any, location: Sequence[str | int]) -> Key:
    """pydantic's location without the union tags that the file does not hold."""
    way: list[str | int] = []
    for index, part in enumerate(location):
        held = (isinstance(data, dict) and part in data) or (
            isinstance(data, list) and isinstance(part, int) and part < len(data)
        )
        if held:
            data = data[part]
            way.append(part)
        elif index == len(location) - 1 and isinstance(data, dict):
            way.append(part)
    return tuple(way)


def _problems(document: Document, error: ValidationError) -> Iterator[ConfigError]:
    for problem in error.errors(include_url=False):
        way = _way(document.data, problem["loc"])
        kind, value = problem["type"], problem.get("input")
        if kind == "extra_forbidden":
            allowed = _keys_at(problem["loc"][:-1])
            yield document.error(way, f"unknown key{_near(str(way[-1]), allowed)}. Allowed here: {', '.join(allowed)}")
        elif kind == "missing":
            yield document.error(way[:-1] or way, f"the key {str(problem['loc'][-1])!r} is missing")
        elif kind in ("union_tag_invalid", "union_tag_not_found"):
            kinds = ", ".join(_kinds())
            yield document.error(way, f"`kind` must be one of {kinds}")
        else:
            shown = "" if _is_secret(way) else f", found {value!r:.80}"
            yield document.error(way, f"{problem['msg'].removeprefix('Input ')}{shown}")


def _is_secret(way: Key) -> bool:
    return any(isinstance(part, str) and ("key" in part or part == "headers") for part in way)


def _near(name: str, allowed: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(allowed), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def _kinds() -> list[str]:
    return [str(member.model_fields["kind"].annotation.__args__[0]) for member in _upstream_models()]


def _upstream_models() -> tuple[Any, ...]:
    return get_args(get_args(UpstreamSettings)[0])


def _keys_at(location: Sequence[str | int]) -> list[str]:
    """The keys allowed in the section at pydantic's `location`."""
    model: Any = Settings
    for part in location:
        if isinstance(model, type) and issubclass(model, BaseModel):
            field = model.model_fields.get(str(part))
            model = field.annotation if field else model
        elif get_origin(model) in (dict, tuple):
            model = [argument for argument in get_args(model) if argument is not Ellipsis][-1]
        if model is not None and get_origin(model) is Annotated:
            tag = part
            model = next((m for m in _upstream_models() if tag in get_args(m.model_fields["kind"].annotation)), model)
        optional = [a for a in get_args(model) if isinstance(a, type) and issubclass(a, BaseModel)]
        if get_origin(model) not in (dict, tuple, Annotated) and optional:
            model = optional[0]
    if isinstance(model, type) and issubclass(model, BaseModel):
        return list(model.model_fields)
    return []


def _contradictions(settings: Settings) -> Iterator[tuple[Key, str]]:
    """What is well formed but cannot be meant."""
    upstreams = ", ".join(settings.upstreams) or "none yet"
    seen: dict[str, int] = {}
    for index, candidate in enumerate(settings.candidates):
        way: Key = ("candidates", index)
        if candidate.upstream not in settings.upstreams:
            yield (*way, "upstream"), f"no upstream is called {candidate.upstream!r}. Under `upstreams`: {upstreams}"
        if candidate.name == AUTO_MODEL:
            yield (*way, "name"), f"{AUTO_MODEL!r} asks for routing and cannot name a candidate; choose another name"
        if candidate.name in seen:
            yield (*way, "name"), f"{candidate.name!r} is taken by candidates[{seen[candidate.name]}]; names are unique"
        seen.setdefault(candidate.name, index)
    default = settings.routing.default_candidate
    if default is not None and settings.candidates and default not in seen:
        yield ("routing", "default_candidate"), f"no candidate is called {default!r}. There are: {', '.join(seen)}"
    if settings.candidates and not any(candidate.is_routable for candidate in settings.candidates):
        yield ("candidates",), "at least one candidate must be routable (`is_routable: true`)"
