"""Which candidates a configuration, or an environment, leads to."""

from __future__ import annotations

import pytest

from atoll.config import LiteLLMUpstream, OpenAIUpstream, Settings, parse_settings
from atoll.errors import ConfigError
from atoll.gateway import catalog, prices
from atoll.gateway.catalog import EMBEDDED_MODEL, build_catalog


def configured(text: str) -> Settings:
    return parse_settings(text, "atoll.yaml", {})


ALL_KEYS = {provider["env"][0]: f"key-of-{name}" for name, provider in catalog._providers().items()}


def test_without_keys_there_is_the_embedded_model() -> None:
    found = build_catalog(Settings(), {})
    assert list(found.candidates) == [EMBEDDED_MODEL] == list(found.routable)
    embedded = found.candidates[EMBEDDED_MODEL]
    assert embedded.sees_private_data
    assert embedded.context_tokens == 8192
    assert embedded.output_usd_per_mtok == 0


@pytest.mark.parametrize("name", catalog._providers())
def test_every_default_model_has_a_price_and_a_context_in_the_table(name: str) -> None:
    provider = catalog._providers()[name]
    for model in provider["models"]:
        entry = prices.lookup(provider["litellm"] + model)
        assert entry is not None, model
        assert entry.output_usd_per_mtok > 0
        assert entry.max_input_tokens
        assert entry.mode == "chat"


@pytest.mark.parametrize("name", catalog._providers())
def test_a_key_in_the_environment_brings_its_provider(name: str) -> None:
    provider = catalog._providers()[name]
    found = build_catalog(Settings(), {provider["env"][-1]: "sk-1"})
    offered = [candidate for candidate in found.candidates.values() if candidate.upstream == name]
    assert [candidate.model for candidate in offered] == provider["models"]
    assert all(candidate.output_usd_per_mtok > 0 for candidate in offered)
    assert found.default == offered[0].name
    upstream = found.upstreams[name]
    assert isinstance(upstream, OpenAIUpstream | LiteLLMUpstream)
    assert upstream.api_key is not None
    assert upstream.api_key.get_secret_value() == "sk-1"


def test_all_providers_together_have_distinct_names() -> None:
    found = build_catalog(Settings(), ALL_KEYS)
    assert len(found.candidates) == 1 + sum(len(provider["models"]) for provider in catalog._providers().values())


def test_an_empty_key_is_no_key() -> None:
    assert list(build_catalog(Settings(), {"OPENAI_API_KEY": ""}).candidates) == [EMBEDDED_MODEL]


def test_a_key_for_another_base_url_is_not_sent_to_the_provider() -> None:
    found = build_catalog(Settings(), {"OPENAI_API_KEY": "k", "OPENAI_BASE_URL": "http://127.0.0.1:9/v1/"})
    upstream = found.upstreams["openai"]
    assert isinstance(upstream, OpenAIUpstream)
    assert upstream.base_url == "http://127.0.0.1:9/v1"


def test_what_the_file_says_wins_over_the_table() -> None:
    found = build_catalog(
        configured(
            """
upstreams: {o: {kind: openai, base_url: "http://127.0.0.1:9/v1"}}
candidates:
  - {name: gpt-4o-mini, upstream: o}
  - {name: cheap, model: gpt-4o-mini, upstream: o, prices: {input: 1, output: 2, cached_input: 0.5}, context_tokens: 99}
  - {name: nobody-knows-me, upstream: o}
"""
        ),
        {},
    )
    known, own, unknown = found.candidates.values()
    assert (known.input_usd_per_mtok, known.cached_input_usd_per_mtok, known.output_usd_per_mtok) == (0.15, 0.075, 0.6)
    assert known.context_tokens == 128_000
    assert known.capabilities == {"tools", "vision", "json_schema", "logprobs"}
    assert (own.input_usd_per_mtok, own.cached_input_usd_per_mtok, own.output_usd_per_mtok) == (1, 0.5, 2)
    assert own.context_tokens == 99
    assert unknown.context_tokens is None
    assert "vision" not in unknown.capabilities
    assert found.default == "gpt-4o-mini"
    assert found.notes == ("No price is known for nobody-knows-me: counted as free. Set `prices` where that is wrong",)
    assert not any(candidate.sees_private_data for candidate in found.candidates.values())


def test_a_model_that_only_embeds_is_never_routed_to() -> None:
    found = build_catalog(
        configured(
            """
upstreams: {o: {kind: openai, base_url: "http://127.0.0.1:9/v1"}}
candidates:
  - {name: text-embedding-3-small, upstream: o, capabilities: [embeddings]}
  - {name: gpt-4o-mini, upstream: o}
  - {name: asked-for-only, upstream: o, is_routable: false}
"""
        ),
        {},
    )
    assert found.routable == ("gpt-4o-mini",)
    assert found.default == "gpt-4o-mini"
    assert len(found.candidates) == 3


def test_a_local_upstream_needs_no_candidate() -> None:
    found = build_catalog(configured("upstreams: {own: {kind: local, model: /models/llama-8b.gguf}}"), {})
    assert list(found.candidates) == ["llama-8b"]
    assert found.candidates["llama-8b"].upstream == "own"


def test_upstreams_without_models_serve_nothing_and_say_so() -> None:
    with pytest.raises(ConfigError, match=r"`candidates` is empty.*upstreams o"):
        build_catalog(configured("upstreams: {o: {kind: openai, base_url: 'http://127.0.0.1:9/v1'}}"), {})


def test_the_table_is_exact_about_prices() -> None:
    entry = prices.lookup("gpt-4o-mini")
    assert entry is not None
    assert (entry.input_usd_per_mtok, entry.output_usd_per_mtok) == (0.15, 0.6)
    assert prices.lookup("no-such-model") is None
    assert prices.lookup("deepseek-v4-flash", "deepseek") is not None
