"""When two names mean the same model."""

from __future__ import annotations

import pytest

from atoll.routers.names import SAME_MODEL, canonical_name, match_name, size_in_name
from atoll.types import Candidate

KNOWN = (
    "Meta-Llama-3_1-8B",
    "Meta-Llama-3_1-8B-Instruct",
    "Meta-Llama-3_1-70B-Instruct",
    "Meta-Llama-3-70B",
    "Mistral-7B-Instruct-v0.1",
    "Mistral-7B-Instruct-v0.2",
    "mistralai/Mixtral-8x7B-Instruct-v0.1",
    "Qwen1.5-72B-Chat",
    "gemma-2-9b-it",
    "gemini-1.5-pro-002",
    "gpt-4-1106-preview",
    "claude-3-opus-20240229",
    "gpt-4o",
    "c4ai-command-r-v01",
)


def matched(name: str, *, model: str = "", aliases: tuple[str, ...] = ()) -> str | None:
    return match_name(Candidate(name, model or name, "u", aliases=aliases), KNOWN)


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("gpt-4-1106-preview", "gpt-4-1106-preview"),
        ("openai/gpt-4-1106-preview", "gpt-4-1106-preview"),
        ("GPT-4-1106-Preview", "gpt-4-1106-preview"),
        ("meta-llama/Meta-Llama-3.1-8B-Instruct", "Meta-Llama-3_1-8B-Instruct"),
        ("meta-llama/Meta-Llama-3.1-8B-Instruct-Turbo", "Meta-Llama-3_1-8B-Instruct"),
        ("accounts/fireworks/models/llama-v3p1-8b-instruct", "Meta-Llama-3_1-8B-Instruct"),
        ("groq/llama-3.1-8b-instant", "Meta-Llama-3_1-8B-Instruct"),
        ("llama3.1:8b", "Meta-Llama-3_1-8B-Instruct"),
        ("ollama/llama3.1:70b", "Meta-Llama-3_1-70B-Instruct"),
        ("meta-llama/llama-3.1-8b-instruct:free", "Meta-Llama-3_1-8B-Instruct"),
        ("mixtral-8x7b-32768", "mistralai/Mixtral-8x7B-Instruct-v0.1"),
        ("mistralai/Mixtral-8x7B-Instruct-v0.1", "mistralai/Mixtral-8x7B-Instruct-v0.1"),
        ("Mistral-7B-Instruct-v0.2-AWQ", "Mistral-7B-Instruct-v0.2"),
        ("gemma2-9b-it", "gemma-2-9b-it"),
        ("gemini/gemini-1.5-pro", "gemini-1.5-pro-002"),
        ("anthropic.claude-3-opus-20240229-v1:0", "claude-3-opus-20240229"),
        ("us.anthropic.claude-3-opus-20240229-v1:0", "claude-3-opus-20240229"),
        ("claude-3-opus", "claude-3-opus-20240229"),
        ("claude-3-opus-latest", None),
        ("gpt-4o-2024-08-06", "gpt-4o"),
        ("command-r", "c4ai-command-r-v01"),
        ("Qwen/Qwen1.5-72B-Chat", "Qwen1.5-72B-Chat"),
        ("qwen1.5:72b", "Qwen1.5-72B-Chat"),
    ],
)
def test_the_same_model_under_another_name(name: str, known: str | None) -> None:
    assert matched(name) == known


@pytest.mark.parametrize(
    "name",
    [
        "gpt-4",
        "gpt-4-0125-preview",
        "gpt-4-turbo",
        "gpt-4o-mini",
        "gpt-5",
        "claude-3-opus-20240301",
        "claude-opus-4-1",
        "gemini-1.5-pro-001",
        "gemini-2.5-pro",
        "llama-3.3-70b-instruct",
        "llama-3-70b-instruct",
        "Mistral-7B-Instruct-v0.3",
        "mixtral-8x22b-instruct",
        "gemma-2-27b-it",
        "command-r-plus",
        "llama3.1:405b",
        "smollm2-135m-instruct",
        "",
    ],
)
def test_another_model_is_not_taken_for_it(name: str) -> None:
    assert matched(name) is None


def test_the_upstreams_name_and_aliases_count_too() -> None:
    assert matched("fast", model="meta-llama/Llama-3.1-8B-Instruct") == "Meta-Llama-3_1-8B-Instruct"
    assert matched("ours", model="deployment-7", aliases=("gpt-4o",)) == "gpt-4o"


def test_a_base_model_is_found_by_its_own_name() -> None:
    assert matched("Meta-Llama-3_1-8B") == "Meta-Llama-3_1-8B"


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("Meta-Llama-3_1-8B-Instruct", 8.0),
        ("llama3.1:70b", 70.0),
        ("smollm2-135m-instruct", 0.135),
        ("Qwen2.5-0.5B-Instruct", 0.5),
        ("qwen3-30b-a3b", pytest.approx(9.487, abs=0.01)),
        ("Mixtral-8x7B-v0.1", pytest.approx(28.0)),
        ("openai/gpt-oss-120b", 120.0),
        ("gpt-4-1106-preview", None),
        ("mixtral-large-4", None),
        ("gemini-3.8-flash", None),
        ("phi-3-mini-4k-instruct", None),
        ("model-1m-context", 0.001),
    ],
)
def test_sizes_are_read_from_names(name: str, billions: float | None) -> None:
    assert size_in_name(name) == billions


@pytest.mark.parametrize("name", [*KNOWN, "a/b/c", ":::", "llama", "x" * 300, "ünïcode-7b"])
def test_spelling_is_settled_after_one_pass(name: str) -> None:
    assert canonical_name(canonical_name(name)) == canonical_name(name)


@pytest.mark.parametrize(("served_as", "published_as"), SAME_MODEL.items())
def test_every_alias_is_spelled_as_it_will_be_looked_up(served_as: str, published_as: str) -> None:
    assert canonical_name(served_as) == published_as
    assert canonical_name(published_as) == published_as
