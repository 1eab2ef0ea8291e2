from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.errors import EngineError, InvalidRequest
from atoll.local_backend.codec import Codec, TextDecoder
from doubles.tiny_model import write_tiny_tokenizer

SAMPLES = [
    "Hello, world!",
    "  two spaces, a\ttab and\n\nlines",
    "12345 and 3.14, year 2024",
    "naïve café — “quotes” …",
    "日本語のテキスト",
    "👋🏽 👩‍👩‍👧 🇩🇪",
    "def f(x):\n    return x ** 2  # comment",
    "<|im_start|>user\nhi<|im_end|>",
    "",
]


@pytest.mark.parametrize("text", SAMPLES)
def test_decoding_gives_the_text_back(smol_codec: Codec, text: str) -> None:
    plain = text.replace("<|im_start|>", "").replace("<|im_end|>", "")
    assert smol_codec.decode(smol_codec.encode(text)) == plain


# Without private and unassigned planes and control characters: the model's vocabulary has no tokens for their bytes.
@given(st.text(st.characters(exclude_categories=["Cs", "Cn", "Co", "Cc"]), max_size=60))
def test_every_text_survives_token_by_token(smol_codec: Codec, text: str) -> None:
    decoder = TextDecoder(smol_codec)
    pieces = [decoder.push(token_id) for token_id in smol_codec.encode(text)]
    hidden = {"<|endoftext|>", "<|im_start|>", "<|im_end|>"}
    if not any(name in text for name in hidden):
        assert "".join(pieces) + decoder.flush() == text


def test_an_emoji_comes_whole_or_not_at_all(smol_codec: Codec) -> None:
    ids = smol_codec.encode("a👋")
    decoder = TextDecoder(smol_codec)
    pieces = [decoder.push(token_id) for token_id in ids]
    assert len(ids) > 2
    assert [piece for piece in pieces if piece] == ["a", "👋"]
    assert decoder.flush() == ""


def test_a_cut_character_becomes_a_replacement_character(smol_codec: Codec) -> None:
    decoder = TextDecoder(smol_codec)
    pieces = [decoder.push(token_id) for token_id in smol_codec.encode("👋")[:-1]]
    assert "".join(pieces) == ""
    assert decoder.flush() == "\ufffd"


def test_token_bytes_join_to_the_text(smol_codec: Codec) -> None:
    text = "naïve 👋 2024"
    assert b"".join(smol_codec.token_bytes(token_id) for token_id in smol_codec.encode(text)) == text.encode()
    assert smol_codec.token_bytes(2) == b"<|im_end|>"


def test_digits_stand_alone(smol_codec: Codec) -> None:
    """As the model was trained, even behind several spaces."""
    pieces = [smol_codec.token_bytes(token_id) for token_id in smol_codec.encode("the  2024")]
    assert pieces == [b"the", b"  ", b"2", b"0", b"2", b"4"]


def test_the_embedded_models_template_and_end(smol_codec: Codec) -> None:
    text = smol_codec.render([{"role": "user", "content": "Hi"}])
    assert text == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert smol_codec.end_ids == {0, 2}
    assert smol_codec.encode(text)[0] == 1


def test_messages_that_a_template_does_not_know_are_told_in_words(smol_codec: Codec) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": "é"}'}}
    text = smol_codec.render(
        [
            {"role": "developer", "content": "Be brief"},
            {"role": "user", "content": None},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "1", "content": "7"},
            {"role": "function", "name": "f", "content": "8"},
        ]
    )
    assert "<|im_start|>system\nBe brief<|im_end|>" in text
    assert '<tool_call>{"name": "f", "arguments": "{\\"x\\": \\"é\\"}"}</tool_call>' in text
    assert text.count("<|im_start|>tool") == 2


def codec_with_template(folder: Path, template: str) -> Codec:
    write_tiny_tokenizer(folder)
    (folder / "chat_template.jinja").write_text(template)
    return Codec.load(folder)


def test_a_template_may_refuse(tmp_path: Path) -> None:
    codec = codec_with_template(tmp_path, "{{ raise_exception('roles must alternate') }}")
    with pytest.raises(InvalidRequest, match="roles must alternate"):
        codec.render([{"role": "user", "content": "x"}])


def test_a_template_cannot_reach_out_of_its_sandbox(tmp_path: Path) -> None:
    codec = codec_with_template(tmp_path, "{{ messages.__class__.__mro__[1].__subclasses__() }}")
    with pytest.raises(InvalidRequest, match="unsafe"):
        codec.render([{"role": "user", "content": "x"}])


def test_a_broken_template_is_told_when_the_model_is_loaded(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="template"):
        codec_with_template(tmp_path, "{% for %}")


def test_generation_markers_of_training_templates_are_understood(tmp_path: Path) -> None:
    codec = codec_with_template(tmp_path, "{% generation %}{{ messages[0].content }}{% endgeneration %}")
    assert codec.render([{"role": "user", "content": "x"}]) == "x"


def test_a_model_without_a_template_says_so(tmp_path: Path) -> None:
    write_tiny_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    with pytest.raises(InvalidRequest, match="no chat template"):
        Codec.load(tmp_path).render([{"role": "user", "content": "x"}])


def test_a_folder_without_a_tokenizer_says_so(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"tokenizer\.json"):
        Codec.load(tmp_path)


def test_the_end_is_what_the_generation_config_says(tmp_path: Path) -> None:
    write_tiny_tokenizer(tmp_path)
    assert Codec.load(tmp_path).end_ids == {2}
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 0}))
    assert Codec.load(tmp_path).end_ids == {0}
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 2]}))
    assert Codec.load(tmp_path).end_ids == {1, 2}


def test_other_decoders_stream_too(tmp_path: Path) -> None:
    """Sentencepiece-like: a space is part of the token, bytes stand for what is not in the vocabulary."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    vocab = {"<unk>": 0, "▁Hi": 1, "▁you": 2} | {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    codec = Codec.load(tmp_path)
    emoji = [3 + byte for byte in "👋".encode()]
    assert codec.decode([1, 2, *emoji, 2]) == "Hi you👋 you"
