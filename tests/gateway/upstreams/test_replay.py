"""Answers from a table of recorded answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pytest

from atoll.config import ReplayUpstream, Timeouts
from atoll.errors import ConfigError
from atoll.gateway.upstreams.base import UpstreamRequest
from atoll.gateway.upstreams.replay import Replay
from atoll.types import Candidate


async def started(folder: Path, *entries: dict[str, Any]) -> Replay:
    table = folder / "answers.jsonl"
    table.write_bytes(b"\n".join(map(orjson.dumps, entries)))
    replay = Replay("demo", ReplayUpstream(kind="replay", table=table))
    await replay.start()
    return replay


async def ask(replay: Replay, model: str, path: str = "/chat/completions", **body: Any) -> tuple[int, Any]:
    request = UpstreamRequest(path, orjson.dumps({"model": model, **body}), False, Timeouts())
    response = await replay.send(request, Candidate(model, model, "demo"))
    return response.status, orjson.loads(await response.read())


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


async def test_the_most_specific_answer_wins(tmp_path: Path) -> None:
    history = [user("Hi"), {"role": "assistant", "content": "Hello"}, user("Again")]
    replay = await started(
        tmp_path,
        {"prompt": "*", "answer": "anything"},
        {"prompt": "Again", "answer": "any model"},
        {"model": "m", "prompt": "Again", "answer": "m alone"},
        {"model": "m", "messages": history, "answer": "m after hello"},
    )
    texts = [
        (await ask(replay, model, messages=messages))[1]["choices"][0]["message"]["content"]
        for model, messages in [("m", history), ("m", [user("Again")]), ("x", [user("Again")]), ("x", [user("?")])]
    ]
    assert texts == ["m after hello", "m alone", "any model", "anything"]


async def test_content_parts_and_plain_completions_are_matched(tmp_path: Path) -> None:
    replay = await started(tmp_path, {"prompt": "Hi", "answer": "Hello"})
    parts = [{"type": "text", "text": "Hi"}, {"type": "image_url", "image_url": {"url": "data:"}}]
    assert (await ask(replay, "m", messages=[user(parts)]))[0] == 200
    status, answer = await ask(replay, "m", "/completions", prompt="Hi", n=2)
    assert status == 200
    assert [choice["text"] for choice in answer["choices"]] == ["Hello", "Hello"]


async def test_a_question_nobody_recorded_says_which_table(tmp_path: Path) -> None:
    replay = await started(tmp_path, {"prompt": "Hi", "answer": "Hello"})
    status, answer = await ask(replay, "m", messages=[user("What?")])
    assert status == 404
    assert "answers.jsonl" in answer["error"]["message"]
    assert "'What?'" in answer["error"]["message"]


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("{", "answers.jsonl:1: not JSON"),
        ("[]", "expected an object"),
        ('{"answer": "x"}', "'prompt' (a text) or 'messages' (a list) is missing"),
        ('{"prompt": "x", "answer": "y", "reply": "z"}', "unknown key 'reply'"),
        ('{"prompt": "x", "answer": "y", "usage": [5]}', "'usage' must be an object of token counts, found [5]"),
        ('{"prompt": "x", "answer": "y", "usage": {"prompt_tokens": "5"}}', "'usage' must be an object"),
    ],
)
async def test_a_wrong_table_names_the_line(tmp_path: Path, line: str, told: str) -> None:
    table = tmp_path / "answers.jsonl"
    table.write_text(line)
    with pytest.raises(ConfigError) as caught:
        await Replay("demo", ReplayUpstream(kind="replay", table=table)).start()
    assert told in str(caught.value)


async def test_a_missing_table_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"upstreams\.demo\.table: .*nowhere"):
        await Replay("demo", ReplayUpstream(kind="replay", table=tmp_path / "nowhere")).start()


@pytest.mark.parametrize("choices", [-1, 10**9, "two", 1.5])
async def test_a_number_of_choices_that_nobody_gives_is_refused(tmp_path: Path, choices: Any) -> None:
    replay = await started(tmp_path, {"prompt": "Hi", "answer": "Hello"})
    status, answer = await ask(replay, "m", messages=[user("Hi")], n=choices)
    assert status == 400
    assert "from 1 to 128" in answer["error"]["message"]
