"""The official Python client, unchanged."""

from __future__ import annotations

import time
from collections.abc import Iterator

import openai
import pytest

from doubles.process import Process
from doubles.scripted import ScriptedUpstream

MODELS = ["auto", "gpt-4o-mini"]


@pytest.fixture
def client(gateway: Process) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="client-key", max_retries=0) as client:
        yield client


@pytest.mark.parametrize("model", MODELS)
def test_chat(client: openai.OpenAI, model: str) -> None:
    answer = client.chat.completions.create(model=model, messages=[{"role": "user", "content": "Hi"}], n=2)
    assert [choice.message.content for choice in answer.choices] == ["Hello 0", "Hello 1"]
    assert answer.usage is not None
    assert answer.usage.total_tokens == 15


@pytest.mark.parametrize("model", MODELS)
def test_streamed_chat_with_usage(client: openai.OpenAI, model: str) -> None:
    chunks = list(
        client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": "Hi"}],
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "Hello"
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 5


def test_a_stream_without_usage_has_no_usage_chunk(client: openai.OpenAI) -> None:
    messages: list[openai.types.chat.ChatCompletionMessageParam] = [{"role": "user", "content": "Hi"}]
    chunks = list(client.chat.completions.create(model="auto", messages=messages, stream=True))
    assert all(chunk.choices for chunk in chunks)
    assert all(chunk.usage is None for chunk in chunks)


@pytest.mark.parametrize("model", MODELS)
def test_tool_calls(client: openai.OpenAI, model: str) -> None:
    weather = {"name": "get_weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}
    with client.chat.completions.stream(
        model=model,
        messages=[{"role": "user", "content": "tools"}],
        tools=[{"type": "function", "function": weather}],  # type: ignore[typeddict-item]
    ) as stream:
        (call,) = stream.get_final_completion().choices[0].message.tool_calls or []
    assert (call.id, call.function.name, call.function.arguments) == ("call_1", "get_weather", '{"city":"Oslo"}')
    answer = client.chat.completions.create(model=model, messages=[{"role": "user", "content": "tools"}])
    assert answer.choices[0].finish_reason == "tool_calls"


def test_logprobs(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="auto", messages=[{"role": "user", "content": "logprobs"}], logprobs=True, top_logprobs=1
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert logprobs.content[0].token == "Hello"


def test_completions(client: openai.OpenAI) -> None:
    assert client.completions.create(model="gpt-4o-mini", prompt="Hello").choices[0].text == " world"


def test_embeddings_of_an_upstream_and_of_the_gateway(client: openai.OpenAI) -> None:
    # The client asks for base64 by itself and decodes what it gets.
    remote = client.embeddings.create(model="text-embedding-3-small", input="Hi", encoding_format="float")
    assert remote.data[0].embedding == [0.5, 0.25]
    own = client.embeddings.create(model="auto", input=["Hi", "Hello"])
    assert len(own.data) == 2
    assert sum(x * x for x in own.data[0].embedding) == pytest.approx(1, abs=1e-3)


def test_models(client: openai.OpenAI) -> None:
    assert {model.id for model in client.models.list()} >= {"auto", "gpt-4o-mini", "gpt-4o"}
    assert client.models.retrieve("gpt-4o").id == "gpt-4o"


def test_atolls_own_wishes_travel_in_extra_body(client: openai.OpenAI) -> None:
    raw = client.chat.completions.with_raw_response.create(
        model="auto",
        messages=[{"role": "user", "content": "Hi"}],
        extra_body={"atoll": {"preference": 1.0, "explain": True}},
    )
    assert raw.headers["x-atoll-model"] in ("gpt-4o", "gpt-4o-mini")
    assert raw.headers["x-atoll-reason"]
    assert float(raw.headers["x-atoll-cost-usd"]) > 0
    extra = raw.parse().model_extra
    assert extra is not None
    assert {estimate["candidate"] for estimate in extra["atoll"]["decision"]["estimates"]} == {"gpt-4o", "gpt-4o-mini"}


@pytest.mark.parametrize(
    ("wish", "kind"),
    [
        ("status 400", openai.BadRequestError),
        ("status 429", openai.RateLimitError),
        ("status 500", openai.InternalServerError),
        ("status 401", openai.InternalServerError),
    ],
)
def test_an_upstreams_error_raises_the_right_class(
    client: openai.OpenAI, wish: str, kind: type[openai.APIStatusError]
) -> None:
    with pytest.raises(kind):
        client.chat.completions.create(model="gpt-4o-mini", messages=[{"role": "user", "content": wish}])


def test_our_own_errors_raise_the_right_class(client: openai.OpenAI, gateway: Process) -> None:
    with pytest.raises(openai.NotFoundError, match="no model 'gpt-9'"):
        client.chat.completions.create(model="gpt-9", messages=[{"role": "user", "content": "Hi"}])
    with pytest.raises(openai.BadRequestError, match="messages"):
        client.chat.completions.create(model="auto", messages=[])
    with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="wrong", max_retries=0) as stranger:
        with pytest.raises(openai.AuthenticationError):
            stranger.models.list()
        with pytest.raises(openai.AuthenticationError):
            stranger.chat.completions.create(model="auto", messages=[{"role": "user", "content": "Hi"}])


def test_leaving_a_stream_ends_it_at_the_upstream(client: openai.OpenAI, upstream: ScriptedUpstream) -> None:
    stream = client.chat.completions.create(
        model="gpt-4o-mini", messages=[{"role": "user", "content": "endless"}], stream=True
    )
    next(iter(stream))
    assert upstream.running_requests == 1
    stream.close()
    ends_at = time.monotonic() + 5
    while upstream.running_requests and time.monotonic() < ends_at:
        time.sleep(0.02)
    assert upstream.running_requests == 0


async def test_the_asynchronous_client(gateway: Process) -> None:
    async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="client-key") as client:
        stream = await client.chat.completions.create(
            model="auto", messages=[{"role": "user", "content": "Hi"}], stream=True
        )
        texts = [chunk.choices[0].delta.content or "" async for chunk in stream]
    assert "".join(texts) == "Hello"
