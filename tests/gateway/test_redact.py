from __future__ import annotations

import hashlib
import io
import logging

import pytest
from pydantic import SecretStr

from atoll.config import OpenAIUpstream, ServerSettings, Settings
from atoll.gateway.redact import MASK, RedactingFilter, Redactor, secrets_of

SECRET = "hunter2-very-secret"


def test_known_secrets_and_their_hashes_are_masked() -> None:
    redactor = Redactor([SECRET])
    digest = hashlib.sha256(SECRET.encode()).hexdigest()
    shown = redactor.text(f"https://x/?key={SECRET}&h={digest}")
    assert SECRET not in shown
    assert digest not in shown
    assert MASK in shown


@pytest.mark.parametrize(
    "key",
    [
        "sk-abcdefghijklmnop1234",
        "sk-proj-AAAA_BBBB-CCCCDDDD",
        "gsk_0123456789abcdefgh",
        "AIza" + "x" * 30,
        "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.c2lnbmF0dXJl",
    ],
)
def test_what_looks_like_a_key_is_masked(key: str) -> None:
    assert key not in Redactor().text(f"Incorrect API key provided: {key}. Try again")


def test_a_bearer_value_is_masked_whatever_it_looks_like() -> None:
    assert "opaque-token" not in Redactor().text("header Authorization: Bearer opaque-token-123, next")


def test_ordinary_text_stays() -> None:
    text = "The model gpt-4o answered 429: slow down, risk-free retry in 7 s"
    assert Redactor([SECRET]).text(text) == text


def test_a_secret_at_the_cut_is_masked_before_cutting() -> None:
    shown = Redactor([SECRET]).text("x" * 95 + SECRET + "y" * 5000, 100)
    assert len(shown) == 100
    assert "hunter2" not in shown


def test_a_short_value_masks_nothing() -> None:
    assert Redactor(["a"]).text("banana") == "banana"


def test_log_lines_and_tracebacks_are_masked_at_the_sink() -> None:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.addFilter(RedactingFilter(Redactor([SECRET])))
    logger = logging.Logger("test")
    logger.addHandler(handler)
    try:
        raise ValueError(f"url?key={SECRET}")
    except ValueError:
        logger.exception("call with %s failed", SECRET)
    assert SECRET not in stream.getvalue()
    assert "ValueError" in stream.getvalue()


def test_every_secret_of_the_configuration_is_known() -> None:
    upstream = OpenAIUpstream(
        kind="openai", base_url="http://x", api_key=SecretStr("upstream-key"), headers={"x-org": "organisation-id"}
    )
    settings = Settings(server=ServerSettings(api_keys=(SecretStr("client-key"),)), upstreams={"u": upstream})
    assert set(secrets_of(settings, [upstream])) == {"client-key", "upstream-key", "organisation-id"}
