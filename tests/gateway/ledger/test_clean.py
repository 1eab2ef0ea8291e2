from __future__ import annotations

import base64
import hashlib
import json
import os
import random
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.gateway.ledger.clean import clean_content, clean_text

any_text = st.text(st.characters(exclude_categories=()), max_size=300)


def image(size: int = 5000) -> bytes:
    return b"\x89PNG\r\n\x1a\n" + random.Random(0).randbytes(size)


@given(any_text, st.integers(1, 50))
def test_text_is_bounded_and_can_be_stored(text: str, max_chars: int) -> None:
    cleaned = clean_text(text, max_chars)
    assert len(cleaned) == min(len(text), max_chars)
    cleaned.encode()
    assert not any(ord(c) < 32 and c not in "\t\n\r" for c in cleaned)


@given(any_text, st.integers(1, 50))
def test_short_content_is_as_text(text: str, max_chars: int) -> None:
    assert clean_content(text, max_chars) == clean_text(text, max_chars)


def test_harmless_text_is_untouched() -> None:
    text = "Grüße, 你好 🙂\n\tindented\r\n"
    assert clean_text(text, 100) == text


def test_a_terminal_is_not_commanded() -> None:
    assert clean_text("a\x1b[2Jb\x9b31m\x00c", 100) == "a\ufffd[2Jb\ufffd31m\ufffdc"


def test_half_a_surrogate_pair() -> None:
    assert clean_text("ok \ud83d end", 100) == "ok \ufffd end"


def test_a_cut_text_says_so() -> None:
    assert clean_text("abcdef", 4) == "abc…"


@pytest.mark.parametrize("mime", ["image/png", "audio/x-wav", "application/vnd.ms-excel"])
def test_a_data_url_becomes_type_size_and_hash(mime: str) -> None:
    """GW-69: base64 files were stored in the log database."""
    data = image()
    body = {
        "messages": [{"content": [{"image_url": {"url": f"data:{mime};base64,{base64.b64encode(data).decode()}"}}]}]
    }
    kept = json.loads(clean_content(json.dumps(body), 100_000))
    url = kept["messages"][0]["content"][0]["image_url"]["url"]
    assert url == f"data:{mime};base64,[{mime}, {len(data)} bytes, sha256:{hashlib.sha256(data).hexdigest()}]"


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (image(), "image/png"),
        (b"\xff\xd8\xff" + os.urandom(1000), "image/jpeg"),
        (b"%PDF-1.7" + os.urandom(1000), "application/pdf"),
        (b"RIFF1234WAVE" + os.urandom(1000), "audio/wav"),
        (b"RIFF1234WEBP" + os.urandom(1000), "image/webp"),
        (b"\x00" + os.urandom(1000), "application/octet-stream"),
    ],
)
def test_the_type_is_told_by_the_first_bytes(data: bytes, kind: str) -> None:
    body = json.dumps({"input_audio": {"data": base64.b64encode(data).decode(), "format": "?"}})
    kept = json.loads(clean_content(body, 100_000))
    digest = hashlib.sha256(data).hexdigest()
    assert kept["input_audio"]["data"] == f"[{kind}, {len(data)} bytes, sha256:{digest}]"


def test_escaped_slashes_wrapped_lines_and_the_url_alphabet_are_base64_too() -> None:
    data = image()
    digest = hashlib.sha256(data).hexdigest()
    plain = base64.b64encode(data).decode()
    for written in (
        plain.replace("/", "\\/"),
        base64.encodebytes(data).decode().replace("\n", "\\n"),
        base64.urlsafe_b64encode(data).decode(),
    ):
        assert digest in clean_content(f'{{"data":"{written}"}}', 100_000)


def test_what_is_cut_in_the_middle_of_an_image_is_an_image_too() -> None:
    text = '{"url":"data:image/png;base64,' + base64.b64encode(image(50_000)).decode()[:30_001]
    kept = clean_content(text, 1000)
    assert kept.startswith('{"url":"data:image/png;base64,[image/png, 22500 bytes, sha256:')
    assert kept.endswith("]")


def test_an_image_of_megabytes_before_the_text_leaves_room_for_the_text() -> None:
    data = base64.b64encode(image(8_000_000)).decode()
    kept = clean_content(json.dumps([{"url": data}, {"text": "What is in the picture?"}]), 2000)
    assert json.loads(kept)[1] == {"text": "What is in the picture?"}


@pytest.mark.parametrize("indent", [None, 2])
def test_vectors_become_their_length_and_hash(indent: int | None) -> None:
    """GW-69: whole embedding vectors were stored in the log database."""
    vector = [random.Random(1).gauss(0, 1) for _ in range(384)]
    body = {"data": [{"embedding": vector, "index": n} for n in range(100)], "usage": {"prompt_tokens": 7}}
    text = clean_content(json.dumps(body, indent=indent), 100_000)
    kept = json.loads(text)
    assert [entry["embedding"][0].split(",")[0] for entry in kept["data"]] == ["[384 numbers"] * 100
    assert kept["usage"] == {"prompt_tokens": 7}
    assert len(text) < 20_000


@pytest.mark.parametrize(
    "text",
    [
        "word " * 500,
        "-" * 3000,
        "a" * 3000,
        "0123456789" * 100,
        "[" + " " * 2000 + "]",
        json.dumps([1, 2, 3]),
        "/usr/lib/python3/dist-packages" * 40,
    ],
)
def test_long_text_that_is_no_binary_stays(text: str) -> None:
    assert clean_content(text, 100_000) == text


@given(
    st.lists(
        st.sampled_from(["A1b2" * 127, "A1b2" * 129, " ", "\\n", "\\/", "=", "[", "0.5,", "data:x/y;base64,", "é"])
    )
)
def test_pieces_of_anything_are_bounded_and_lose_no_other_text(pieces: list[str]) -> None:
    text = "".join(pieces)
    kept = clean_content(text, 100_000)
    assert len(kept) <= max(len(text), 1)
    assert kept.count("é") == text.count("é")


def test_runs_just_below_the_limit_do_not_make_it_slow() -> None:
    """A search that begins anew at each character of a run would take minutes."""
    text = ("A1b2" * 127 + " ") * 2000 + "[" + "1" * 511 + "x" + "[" * 100_000
    began = time.process_time()
    clean_content(text, 10_000_000)
    assert time.process_time() - began < 5
