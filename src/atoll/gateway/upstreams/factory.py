"""From settings to an upstream, by its kind."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from atoll.config import LiteLLMUpstream, LocalUpstream, OpenAIUpstream, ReplayUpstream, UpstreamSettings
from atoll.gateway.upstreams.base import Upstream


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What upstreams share of the process they live in."""

    cache_dir: Path
    """Where converted models are kept."""
    runtime_dir: Path
    """Where sockets and logs of engines are."""
    max_response_bytes: int


def build_upstream(name: str, settings: UpstreamSettings, surroundings: Surroundings) -> Upstream:
    """An upstream, not started yet. What a kind needs is imported only where it is used."""
    if isinstance(settings, OpenAIUpstream):
        from atoll.gateway.upstreams.openai import OpenAICompatible

        return OpenAICompatible(
            name,
            settings.base_url,
            api_key=settings.api_key,
            headers=settings.headers,
            max_connections=settings.max_connections,
            max_response_bytes=surroundings.max_response_bytes,
        )
    if isinstance(settings, LiteLLMUpstream):
        from atoll.gateway.upstreams.litellm import LiteLLM

        return LiteLLM(name, settings)
    if isinstance(settings, LocalUpstream):
        from atoll.gateway.upstreams.local import Local

        return Local(
            name,
            settings,
            cache_dir=surroundings.cache_dir,
            runtime_dir=surroundings.runtime_dir,
            max_response_bytes=surroundings.max_response_bytes,
        )
    assert isinstance(settings, ReplayUpstream)
    from atoll.gateway.upstreams.replay import Replay

    return Replay(name, settings)
