from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from atoll.local_backend.answer import Answer
from atoll.local_backend.codec import Codec
from atoll.local_backend.sampling import Drawn

letters = st.text(alphabet="abc é👋", max_size=30)


def said(codec: Codec, text: str, stop: list[str]) -> tuple[str, str, bool]:
    """Push a text's tokens one by one: the text and the tokens' bytes that came out, and whether it was stopped."""
    answer = Answer(codec, stop)
    out, raw, is_stopped = "", b"", False
    for token_id in codec.encode(text):
        part, tokens, is_stopped = answer.push(Drawn(token_id, -1.0))
        out += part
        raw += b"".join(token.raw for token in tokens)
        if is_stopped:
            return out, raw.decode("utf-8", "replace"), True
    part, tokens = answer.flush()
    return out + part, (raw + b"".join(token.raw for token in tokens)).decode(), False


@given(letters)
def test_text_and_tokens_tell_the_same(smol_codec: Codec, text: str) -> None:
    assert said(smol_codec, text, ["never"]) == (text, text, False)


@given(letters, st.text(alphabet="abc é👋", min_size=1, max_size=4))
def test_tokens_end_with_the_text(smol_codec: Codec, text: str, stop: str) -> None:
    """A token that lies across the border belongs to the answer if some of its text does."""
    out, raw, is_stopped = said(smol_codec, text, [stop])
    assert is_stopped == (stop in text)
    assert out == text.split(stop)[0]
    assert raw.startswith(out)
    assert out or not raw
    if is_stopped and out:
        longest = max(len(smol_codec.token_bytes(token_id)) for token_id in smol_codec.encode(text))
        assert len(raw) - len(out) < longest


def test_a_stop_string_over_token_borders_is_cut_off(smol_codec: Codec) -> None:
    text = "The end is near"
    assert len(smol_codec.encode("e end i")) > 1
    assert said(smol_codec, text, ["e end i"])[0] == "Th"


def test_an_unfinished_character_at_the_end_is_told(smol_codec: Codec) -> None:
    answer = Answer(smol_codec, ["x"])
    ids = smol_codec.encode("👋")
    assert [answer.push(Drawn(token_id))[0] for token_id in ids[:-1]] == [""] * (len(ids) - 1)
    assert answer.flush() == ("\ufffd", ())
