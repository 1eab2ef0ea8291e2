"""What clients send that is wrong, and what they are told. Nothing here may reach an upstream or stop the server."""

from __future__ import annotations

import asyncio
import hashlib
import io
from collections.abc import AsyncIterator
from typing import Any

import orjson
import pytest
from pydantic import SecretStr

from atoll.gateway.http.protocol import MAX_HEAD_BYTES
from doubles.gateway import Running, running_gateway
from doubles.scripted import ScriptedUpstream

KEY = "client-secret-key-9876543210"
MESSAGES = [{"role": "user", "content": "x"}]


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        (b"", 400, "invalid_json"),
        (b"{", 400, "invalid_json"),
        (b'{"model": "first", "messages": [{"role": "user", "content": "\xff"}]}', 400, "invalid_json"),
        (b"[]", 400, "invalid_json"),
        (b'{"model":"first","messages":[]}', 400, None),
        (b'{"model":"first","messages":"hello"}', 400, None),
        (b'{"messages":[{"role":"user","content":"x"}]}', 400, None),
        (b'{"model":"nope","messages":[{"role":"user","content":"x"}]}', 404, "model_not_found"),
        (b"[" * 100_000 + b"]" * 100_000, 400, "json_too_deep"),
        (b"[" * 5_000_000, 400, None),
    ],
)
async def test_a_bad_body_is_told_in_openais_shape_with_our_id(
    gateway: Running, first: ScriptedUpstream, body: bytes, status: int, code: str | None
) -> None:
    answer = await gateway.post("/v1/chat/completions", body)
    assert answer.status == status
    assert answer.error["type"] == "invalid_request_error"
    if code:
        assert answer.error["code"] == code
    assert answer.headers["x-atoll-request-id"].startswith("req_")
    row = await gateway.last_row()
    assert (row.status, row.served_model, row.attempts) == (status, None, 0)
    assert first.received == []
    assert (await gateway.chat()).status == 200


@pytest.mark.parametrize("is_declared", [True, False])
async def test_a_body_over_the_limit_is_413_before_it_is_read(first: ScriptedUpstream, is_declared: bool) -> None:
    async with running_gateway({"first": first.base_url}, limits={"max_body_bytes": 100_000}) as gateway:

        async def endless() -> AsyncIterator[bytes]:
            for _ in range(50):
                yield b"x" * 10_000

        data: Any = io.BytesIO(b"x" * 500_000) if is_declared else endless()
        async with gateway.client.post("/v1/chat/completions", data=data) as answer:
            assert answer.status == 413
            assert (await answer.json())["error"]["code"] == "payload_too_large"
        assert (await gateway.chat()).status == 200


async def test_a_compressed_body_is_415(gateway: Running) -> None:
    answer = await gateway.post("/v1/chat/completions", b"\x1f\x8b", content_encoding="gzip")
    assert (answer.status, answer.error["code"]) == (415, "unsupported_encoding")


async def test_five_megabytes_are_passed_on(gateway: Running, first: ScriptedUpstream) -> None:
    answer = await gateway.chat(messages=[{"role": "user", "content": "word " * 1_000_000}])
    assert answer.status == 200
    assert len(first.received[0].body) > 5_000_000


async def test_a_prompt_of_sixty_thousand_tokens_is_routed(gateway: Running) -> None:
    """GW-26."""
    answer = await gateway.chat("auto", messages=[{"role": "user", "content": "lorem ipsum " * 30_000}])
    assert (answer.status, answer.headers["x-atoll-router"]) == (200, "in-order/1")


async def test_a_router_that_fails_never_fails_the_request(gateway: Running) -> None:
    gateway.chooser.error = RuntimeError("index is broken")
    answer = await gateway.chat("auto")
    assert answer.status == 200
    assert answer.headers["x-atoll-model"] == "first"
    assert "RuntimeError" in answer.headers["x-atoll-reason"]
    row = await gateway.last_row()
    assert orjson.loads(row.decision_json or "")["is_fallback"] is True
    assert "atoll_router_fallbacks_total 1.0" in (await gateway.get("/metrics")).body.decode()


async def test_a_prompt_that_fits_nobody_goes_to_the_one_with_most_room(
    first: ScriptedUpstream, second: ScriptedUpstream
) -> None:
    urls = {"first": first.base_url, "second": second.base_url}
    candidates = {"first": {"context_tokens": 100}, "second": {"context_tokens": 200}}
    async with running_gateway(urls, candidates=candidates) as gateway:
        answer = await gateway.chat("auto", messages=[{"role": "user", "content": "word " * 2000}])
        assert answer.headers["x-atoll-model"] == "second"
        short = await gateway.chat("auto", max_tokens=150)
        assert short.headers["x-atoll-model"] == "second"


@pytest.mark.parametrize("name", ["api_base", "base_url", "API_BASE", "api_key", "extra_headers"])
async def test_nothing_is_sent_to_a_host_that_a_client_chose(
    gateway: Running, first: ScriptedUpstream, second: ScriptedUpstream, name: str
) -> None:
    """GW-53."""
    answer = await gateway.chat("first", **{name: second.base_url})
    assert answer.status == 400
    assert answer.error["param"] == name
    nested = await gateway.chat(
        "first", headers={"x_api_base": second.base_url, "x_portkey_custom_host": second.base_url}, metadata={name: "x"}
    )
    assert nested.status == 200
    assert second.received == []


async def test_a_key_is_needed_where_keys_are_set(first: ScriptedUpstream, caplog: pytest.LogCaptureFixture) -> None:
    """GW-55, GW-61, GW-66: each route without a key, with a wrong one, with the right one; no key is ever shown."""
    async with running_gateway({"first": first.base_url}, server={"api_keys": (SecretStr(KEY),)}) as gateway:
        routes = [("POST", "/v1/chat/completions"), ("POST", "/v1/completions"), ("POST", "/v1/embeddings")]
        routes += [("POST", "/v1/route"), ("POST", "/v1/feedback"), ("GET", "/v1/models"), ("GET", "/v1/models/first")]
        routes += [("GET", "/metrics")]
        seen = b""
        for method, path in routes:
            for headers in ({}, {"authorization": "Bearer wrong-key-5555"}, {"authorization": f"Basic {KEY}"}):
                async with gateway.client.request(method, path, data=b"{}", headers=headers) as answer:
                    seen += await answer.read() + repr(answer.headers).encode()
                    assert answer.status == 401, path
                    assert "www-authenticate" in answer.headers
            headers = {"authorization": f"Bearer {KEY}"}
            async with gateway.client.request(method, path, data=b"{}", headers=headers) as answer:
                seen += await answer.read() + repr(answer.headers).encode()
                assert answer.status in (200, 400), path
        for path in ("/", "/health", "/ready"):
            assert (await gateway.get(path)).status == 200
        answer = await gateway.chat(headers={"authorization": f"Bearer {KEY}"})
        row = await gateway.last_row(1)
        seen += repr(gateway.ledger.rows).encode() + caplog.text.encode()
    assert answer.status == 200
    assert row.key_id is not None
    assert row.key_id.startswith("key-")
    for secret in (KEY, "wrong-key-5555", hashlib.sha256(KEY.encode()).hexdigest()):
        assert secret.encode() not in seen


async def test_a_page_of_another_name_cannot_call(gateway: Running) -> None:
    for path in ("/v1/models", "/health"):
        answer = await gateway.get(path, host="evil.example")
        assert (answer.status, answer.error["code"]) == (403, "host_not_allowed")
    answer = await gateway.post("/v1/chat/completions", {}, host="evil.example")
    assert answer.status == 403


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/chat/completions", 405),
        ("PUT", "/v1/embeddings", 405),
        ("DELETE", "/v1/models", 405),
        ("GET", "/v1/feedback", 405),
        ("POST", "/v1/nothing", 404),
        ("GET", "/admin/keys", 404),
        ("GET", "/docs", 404),
        ("GET", "/openapi.json", 404),
        ("POST", "/v1/chat/completions/", 404),
        ("POST", "/v1//chat/completions", 404),
        ("GET", "/%2e%2e/etc/passwd", 404),
        ("GET", "/\u00e9" + "x" * 5000, 404),
    ],
)
async def test_wrong_paths_and_methods_are_told_in_openais_shape(
    gateway: Running, method: str, path: str, status: int
) -> None:
    async with gateway.client.request(method, path) as answer:
        assert answer.status == status
        error = (await answer.json())["error"]
        assert error["type"] == "invalid_request_error"
        assert len(error["message"]) < 500
        if status == 405:
            assert answer.headers["allow"]


async def _send_for_ever(writer: asyncio.StreamWriter, data: bytes) -> None:
    while True:
        writer.write(data)
        await writer.drain()
        await asyncio.sleep(0.001)


@pytest.mark.parametrize("is_whole", [True, False])
async def test_endless_headers_are_refused(gateway: Running, is_whole: bool) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\n")
    async with asyncio.timeout(10):
        lines = b"x-long: " + b"y" * 990 + b"\r\n"
        if is_whole:
            writer.write(lines * (MAX_HEAD_BYTES // 900))
            assert b" 431 " in await reader.read(1000)
        else:
            with pytest.raises(ConnectionError):
                await _send_for_ever(writer, lines)
    writer.close()
    assert (await gateway.get("/health")).status == 200


async def test_what_is_not_http_does_no_harm(gateway: Running) -> None:
    for data in (
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc",
        b"GET\r\n\r\n",
        b"POST / HTTP/1.1\r\ncontent-length: -5\r\n\r\n",
    ):
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
        writer.write(data)
        assert b" 400 " in await asyncio.wait_for(reader.read(1000), 5)
        writer.close()
    assert (await gateway.get("/health")).status == 200


async def test_a_model_name_cannot_forge_headers_or_labels(gateway: Running) -> None:
    answer = await gateway.chat('x"\r\nset-cookie: a=b\u2028')
    assert answer.status == 404
    assert "set-cookie" not in answer.headers


async def test_bad_requests_leave_no_memory_behind(gateway: Running) -> None:
    """GW-41, in small: bodies and exceptions of error paths are freed."""
    import gc
    import tracemalloc

    body = b'{"model":"first","messages":[{"role":"user","content":"' + b"x" * 1_000_000 + b'"}'
    for _ in range(5):
        await gateway.post("/v1/chat/completions", body)
    gateway.ledger.rows.clear()
    gc.collect()
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for _ in range(30):
            assert (await gateway.post("/v1/chat/completions", body)).status == 400
        gateway.ledger.rows.clear()
        gc.collect()
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert after - before < 3_000_000


@pytest.mark.parametrize(
    "data",
    [
        b"hello\r\n\r\n",
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: -5\r\n\r\n",
        b"POST /v1/route HTTP/1.1\r\nhost: localhost\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\n",
    ],
)
async def test_what_is_not_http_gets_our_error_body(gateway: Running, data: bytes) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    writer.write(data)
    async with asyncio.timeout(10):
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    writer.close()
    assert head.startswith(b"HTTP/1.1 400 ")
    assert orjson.loads(body)["error"]["code"] == "invalid_http"


@pytest.mark.parametrize(
    ("method", "path", "allowed"), [("DELETE", "/v1/models", "GET"), ("GET", "/v1/feedback", "POST")]
)
async def test_a_wrong_method_is_told_the_right_one(gateway: Running, method: str, path: str, allowed: str) -> None:
    async with gateway.client.request(method, path) as answer:
        assert answer.status == 405
        assert answer.headers["allow"] == allowed
        assert f"takes {allowed}, not {method}" in await answer.text()
