"""Typed, frozen settings, each default once. `load_settings` reads them from YAML.

A wrong key, type or value and a missing environment variable are `ConfigError`s that name file, line, key and what is
allowed. `${NAME}` in a value is replaced by the environment variable NAME; `${NAME:-default}` has a default.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import yaml
from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError, model_validator

from atoll.errors import ConfigError

Capability = Literal["tools", "vision", "json_schema", "logprobs", "embeddings"]
AUTO_MODEL = "auto"
"""The model name that asks for routing."""


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, protected_namespaces=())


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


UpstreamSettings = Annotated[OpenAIUpstream | LiteLLMUpstream | LocalUpstream | ReplayUpstream, Field(discriminator="kind")]


class Prices(_Section):
    """US dollars per million tokens."""

    input: Annotated[float, Field(ge=0)]
    output: Annotated[float, Field(ge=0)]
    cached_input: Annotated[float, Field(ge=0)] | None = None


class CandidateSettings(_Section):
    """A model that can be asked for, or chosen. What is left out comes from litellm's price table where it knows the model."""

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


class RoutingSettings(_Section):
    router: str = "prior"
    """`prior` (shipped), or the path of a router made by `atoll fit`."""
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


class LimitSettings(_Section):
    max_body_bytes: Annotated[int, Field(gt=0)] = 20_000_000
    max_json_depth: Annotated[int, Field(gt=0)] = 64
    max_response_bytes: Annotated[int, Field(gt=0)] = 100_000_000
    body_timeout_s: Annotated[float, Field(gt=0)] = 60.0
    """How long a client may take to send its body."""


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
    workers: Annotated[int, Field(ge=1, le=256)] = 1
    api_keys: tuple[SecretStr, ...] = ()
    """Keys that clients must send. Without any, everybody on this machine may call, and only loopback can be bound."""
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
