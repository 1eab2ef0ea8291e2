"""Our WordPiece gives the ids of the `tokenizers` library."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

from atoll.routers.embedding.static import ABOUT_FILE, SHIPPED_TABLE
from atoll.routers.embedding.wordpiece import WordPiece

VOCABULARY = {
    token: row for row, token in enumerate(json.loads((SHIPPED_TABLE / ABOUT_FILE).read_text("utf-8"))["tokens"])
}


@pytest.fixture(scope="module")
def ours() -> WordPiece:
    return WordPiece(VOCABULARY)


@pytest.fixture(scope="module")
def reference() -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(VOCABULARY, unk_token="[UNK]", max_input_chars_per_word=100))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return tokenizer


TEXTS = {
    "prose": "The quick brown fox, unaffordably jumped; didn't it? 3.14159 -> ok!",
    "code": "def f(x_1: int) -> str:\n\treturn f'{x_1!r}'  # ünïcode",
    "accents": "Crème brûlée, naïve façade, Ångström, İstanbul, ß",
    "chinese": "什么是机器学习？abc数学",
    "korean": "안녕하세요 세계",
    "mathematics": "∑_{i=1}^{n} x² ≤ √2 · π — “quoted”…",
    "emoji": "so good 👍🏽 👩‍👩‍👧 done",
    "controls": "a\x00b\x07c\td\r\ne\x7ff\u200bg\ufffdh",
    "spaces": "a\u00a0b\u2003c\u3000d",
    "long word": "x" * 100 + " " + "x" * 101,
    "joined": "foo_bar-baz@example.com/path?x=1&y=[2]",
    "empty": "",
    "blank": " \n\t ",
}


@pytest.mark.parametrize("name", TEXTS)
def test_known_texts(name: str, ours: WordPiece, reference: Tokenizer) -> None:
    assert ours.ids(TEXTS[name]) == reference.encode(TEXTS[name], add_special_tokens=False).ids


@given(text=st.text(st.characters(max_codepoint=0x7F)))
def test_any_ascii(text: str, ours: WordPiece, reference: Tokenizer) -> None:
    assert ours.ids(text) == reference.encode(text, add_special_tokens=False).ids


# Beyond this, Python's Unicode tables and the library's differ in a few hundred rare characters.
COMMON = st.one_of(
    st.characters(max_codepoint=0x2FF),
    st.characters(min_codepoint=0x400, max_codepoint=0x45F),
    st.characters(min_codepoint=0x4E00, max_codepoint=0x9FA5),
    st.characters(min_codepoint=0xAC00, max_codepoint=0xD7A3),
    st.characters(min_codepoint=0x2010, max_codepoint=0x2027),
)


@settings(max_examples=300)
@given(text=st.text(COMMON))
def test_any_common_character(text: str, ours: WordPiece, reference: Tokenizer) -> None:
    assert ours.ids(text) == reference.encode(text, add_special_tokens=False).ids


@given(text=st.text(st.characters(categories=["Cs", "Cn", "Co", "Mn", "Lo"])))
def test_strange_characters_are_no_error(text: str, ours: WordPiece) -> None:
    assert all(0 <= token < len(VOCABULARY) for token in ours.ids(text))


def test_words_are_remembered_with_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("atoll.routers.embedding.wordpiece._MAX_CACHED_WORDS", 10)
    tokenizer = WordPiece(VOCABULARY)
    words = [f"word{number}" for number in range(100)]
    first = [tokenizer.ids(word) for word in words]
    assert [tokenizer.ids(word) for word in words] == first
    assert len(tokenizer._ids_of_word) <= 10
