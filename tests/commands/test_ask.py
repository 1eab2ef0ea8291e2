from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from click.testing import CliRunner, Result

from atoll.cli import atoll

HEADERS = {
    "content-type": "text/event-stream",
    "x-atoll-request-id": "req_1",
    "x-atoll-model": "small",
    "x-atoll-router": "prior",
    "x-atoll-reason": "Good enough",
}


def chunk(text: str | None = None, **more: Any) -> bytes:
    finish_reason = more.pop("finish_reason", None)
    choice = {"index": 0, "delta": {} if text is None else {"content": text}, "finish_reason": finish_reason}
    return b"data: " + json.dumps({"choices": [choice], "usage": None} | more).encode() + b"\n\n"


WHOLE = [
    b": ping\n\n",
    chunk("Grüße, "),
    chunk("🙂\x1b[2J!"),
    chunk(finish_reason="stop"),
    chunk(
        choices=[],
        usage={"prompt_tokens": 7, "completion_tokens": 3},
        atoll={"model": "small", "cost_usd": 1.5e-5, "reason": "Good enough", "request_id": "req_1"},
    ),
    b"data: [DONE]\n\n",
]


@dataclass
class Scripted:
    """A gateway that answers as told and keeps what it was asked."""

    url: str = ""
    status: int = 200
    parts: list[bytes] = field(default_factory=lambda: list(WHOLE))
    asked: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    is_cut: bool = False


@pytest.fixture
def gateway() -> Iterator[Scripted]:
    script = Scripted()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            script.headers.append({name.lower(): value for name, value in self.headers.items()})
            script.asked.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(script.status)
            for name, value in HEADERS.items():
                self.send_header(name, value)
            self.send_header("transfer-encoding", "chunked")
            self.end_headers()
            for part in script.parts:
                self.wfile.write(b"%x\r\n%s\r\n" % (len(part), part))
            if not script.is_cut:
                self.wfile.write(b"0\r\n\r\n")
            self.close_connection = True

        def log_message(self, *arguments: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    script.url = f"http://127.0.0.1:{server.server_port}/v1"
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield script
    server.shutdown()
    server.server_close()


@pytest.fixture
def ask(gateway: Scripted, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    monkeypatch.delenv("ATOLL_API_KEY", raising=False)

    def run(*arguments: str, stdin: str | bytes | None = None) -> Result:
        return CliRunner().invoke(atoll, ["ask", "--url", gateway.url, *arguments], input=stdin)

    return run


def test_the_answer_and_then_one_line(ask: Callable[..., Result]) -> None:
    done = ask("Hello")
    assert done.exit_code == 0, done.stderr
    assert done.stdout == "Grüße, 🙂\x1b[2J!\n"
    assert done.stderr == "small · 7 + 3 tokens · $1.50e-05 · Good enough\n"


def test_what_is_asked(ask: Callable[..., Result], gateway: Scripted) -> None:
    ask("Hello")
    assert gateway.asked == [
        {
            "model": "auto",
            "messages": [{"role": "user", "content": "Hello"}],
            "stream": True,
            "stream_options": {"include_usage": True},
            "atoll": {},
        }
    ]
    assert "authorization" not in gateway.headers[0]


def test_every_option_is_passed_on(ask: Callable[..., Result], gateway: Scripted) -> None:
    options = (
        "--model large --preference 0.9 --max-cost 0.01 --session s --system Briefly --max-tokens 9 --temperature 0"
    )
    assert ask("Hello", *options.split(), "--api-key", "secret").exit_code == 0
    (asked,) = gateway.asked
    assert asked["model"] == "large"
    assert asked["messages"][0] == {"role": "system", "content": "Briefly"}
    assert asked["atoll"] == {"preference": 0.9, "max_cost_usd": 0.01, "session": "s"}
    assert (asked["max_tokens"], asked["temperature"]) == (9, 0)
    assert gateway.headers[0]["authorization"] == "Bearer secret"


def test_for_programs(ask: Callable[..., Result]) -> None:
    done = ask("Hello", "--json")
    assert json.loads(done.stdout) == {
        "answer": "Grüße, 🙂\x1b[2J!",
        "request_id": "req_1",
        "model": "small",
        "router": "prior",
        "reason": "Good enough",
        "cost_usd": 1.5e-5,
        "usage": {"prompt_tokens": 7, "completion_tokens": 3},
        "finish_reason": "stop",
        "decision": None,
    }
    assert done.stderr == ""


def test_the_question_from_standard_input(ask: Callable[..., Result], gateway: Scripted) -> None:
    assert ask("-", stdin=b"What is \xff this?\n").exit_code == 0
    assert gateway.asked[0]["messages"][0]["content"] == "What is \ufffd this?"


def test_no_question_on_standard_input(ask: Callable[..., Result], gateway: Scripted) -> None:
    done = ask("-", stdin=" \n")
    assert done.exit_code == 1
    assert done.stderr == "atoll: There is no question on standard input\n"
    assert gateway.asked == []


def test_a_question_that_is_no_utf8(gateway: Scripted) -> None:
    command = [sys.executable, "-m", "atoll", "ask", "--url", gateway.url, "--session", b"\xff", b"caf\xe9"]
    done = subprocess.run(command, capture_output=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert gateway.asked[0]["messages"][0]["content"] == "caf\ufffd"


@pytest.mark.parametrize("as_json", [(), ("--json",)])
def test_an_error_answer(ask: Callable[..., Result], gateway: Scripted, as_json: tuple[str, ...]) -> None:
    gateway.status = 404
    gateway.parts = [b'{"error": {"message": "There is no model \'larg\'. Did you mean \'large\'?", "code": "x"}}']
    done = ask("Hello", *as_json)
    assert done.exit_code == 1
    assert done.stdout == ""
    assert done.stderr == "atoll: There is no model 'larg'. Did you mean 'large'? (HTTP 404)\n"


def test_a_key_that_is_wanted(ask: Callable[..., Result], gateway: Scripted) -> None:
    gateway.status, gateway.parts = 401, [b'{"error": {"message": "A key is needed"}}']
    assert ask("Hello").stderr == "atoll: A key is needed (HTTP 401) Set ATOLL_API_KEY or --api-key\n"


@pytest.mark.parametrize("body", [b"<html>Bad Gateway</html>", b"\xff\xfe", b"[]", b'{"error": "gone"}', b"null", b""])
def test_an_error_answer_of_something_else(ask: Callable[..., Result], gateway: Scripted, body: bytes) -> None:
    gateway.status, gateway.parts = 502, [body] if body else []
    done = ask("Hello")
    assert done.exit_code == 1
    assert "(HTTP 502)" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("parts", "is_cut", "message"),
    [
        (WHOLE[:2], True, "The answer broke off: the connection ended before the stream did"),
        (WHOLE[:2], False, "The answer broke off: the connection ended before the stream did"),
        ([*WHOLE[:2], b'data: {"error": {"message": "upstream lost"}}\n\n'], False, "upstream lost"),
        ([*WHOLE[:2], b"data: {nonsense\n\n"], False, "The gateway sent an event that is not JSON: b'{nonsense'"),
    ],
)
def test_a_stream_that_breaks(
    ask: Callable[..., Result], gateway: Scripted, parts: list[bytes], is_cut: bool, message: str
) -> None:
    """GW-08: half an answer must not pass for a whole one."""
    gateway.parts, gateway.is_cut = parts, is_cut
    done = ask("Hello")
    assert done.exit_code == 1
    assert done.stdout == "Grüße, \n"
    assert done.stderr == f"atoll: {message}\n"


def test_nobody_where_the_gateway_was_said_to_be() -> None:
    done = CliRunner().invoke(atoll, ["ask", "--url", "http://127.0.0.1:1/v1", "Hello"])
    assert done.exit_code == 1
    assert done.stderr.startswith(
        "atoll: No gateway answers at http://127.0.0.1:1/v1 (Connection refused). Start one with"
    )


@pytest.mark.parametrize("url", ["127.0.0.1:8700", "ftp://x/v1", "http://", "http://x:port/v1", ""])
def test_what_is_no_address(url: str) -> None:
    done = CliRunner().invoke(atoll, ["ask", "--url", url, "Hello"])
    assert done.exit_code == 2
    assert "is no gateway's address" in done.stderr


def test_a_terminal_is_not_commanded_by_an_answer(gateway: Scripted) -> None:
    program = f"""
import os, pty, sys
os.environ["ATOLL_URL"] = {gateway.url!r}
sys.exit(os.waitstatus_to_exitcode(pty.spawn([sys.executable, "-m", "atoll", "ask", "Hello"])))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, timeout=60, check=True, stdin=subprocess.DEVNULL
    )
    assert b"Gr\xc3\xbc\xc3\x9fe, \xf0\x9f\x99\x82\xef\xbf\xbd[2J!" in done.stdout
    assert b"small \xc2\xb7 7 + 3 tokens" in done.stdout


def test_leaving_ends_the_call(gateway: Scripted) -> None:
    gateway.parts = [WHOLE[1], *[b": ping\n\n"] * 3_000_000]
    command = [sys.executable, "-m", "atoll", "ask", "--url", gateway.url, "Hello"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=os.environ | {"PYTHONUNBUFFERED": "1"}
    ) as asking:
        assert asking.stdout is not None
        assert asking.stderr is not None
        assert asking.stdout.read(4)
        asking.send_signal(2)
        assert asking.wait(30) == 130
        assert asking.stderr.read().strip() == b""
