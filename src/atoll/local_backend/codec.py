"""Between text and token ids: the tokenizer, the chat template, and the bytes of every token.

Reads the files of a Hugging Face folder with `tokenizers` and `jinja2` alone; transformers is not imported, which saves
seconds at every start.
"""

from __future__ import annotations

import codecs
import datetime
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from atoll.errors import EngineError, InvalidRequest

_ROLES_OF_OLD: Final = {"developer": "system", "function": "tool"}
"""Roles that a chat template need not know, and what they are called in one that does not."""


_TRAINING_MARKERS: Final = re.compile(r"\{%-?\s*(?:end)?generation\s*-?%\}")
"""Tags that mark what to train on; transformers' own extension of jinja, without effect on the text."""


class Codec:
    """A model's tokenizer and chat template. Safe to use from several threads."""

    def __init__(
        self, tokenizer: Any, *, template: str | None, special: Mapping[str, str], end_ids: Sequence[int]
    ) -> None:
        self._tokenizer = tokenizer
        self.template_source = template
        self._template = _compile_template(template) if template else None
        self._special = dict(special)
        self.end_ids = frozenset(end_ids)
        """Tokens that end an answer."""
        self.vocab_size: int = tokenizer.get_vocab_size(with_added_tokens=True)
        added = tokenizer.get_added_tokens_decoder()
        self._hidden_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self._added_text = {token_id: token.content for token_id, token in added.items() if not token.special}
        self._bytes = self._byte_table()

    @classmethod
    def load(cls, folder: Path) -> Codec:
        """Read a Hugging Face folder. Raises EngineError if it has no `tokenizer.json`."""
        from tokenizers import Tokenizer

        path = folder / "tokenizer.json"
        if not path.is_file():
            raise EngineError(f"{folder}: no tokenizer.json. Save the tokenizer there with tokenizer.save_pretrained()")
        tokenizer = Tokenizer.from_file(str(path))
        tokenizer.no_truncation()
        tokenizer.no_padding()
        settings = _read_json(folder / "tokenizer_config.json")
        return cls(
            tokenizer,
            template=_read_template(folder, settings),
            special=_special_tokens(settings),
            end_ids=_end_ids(folder, settings, tokenizer),
        )

    def encode(self, text: str, *, with_special: bool = False) -> list[int]:
        """Token ids of a text. `with_special` adds what the tokenizer puts around a text (a BOS token, say)."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=with_special).ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids, without special tokens."""
        text = TextDecoder(self)
        return "".join(text.push(token_id) for token_id in ids) + text.flush()

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """A conversation as the model wants to read it, up to where its answer begins.

        Messages have string contents. Raises InvalidRequest where the template refuses them (roles that do not
        alternate, say) or there is none.
        """
        import jinja2

        if self._template is None:
            raise InvalidRequest(
                "This model has no chat template. Use /v1/completions, or serve an instruct model", param="messages"
            )
        source = self.template_source or ""
        shaped = [_shape_message(message, source) for message in messages]
        try:
            return str(self._template.render(messages=shaped, add_generation_prompt=True, **self._special))
        except jinja2.TemplateError as error:
            raise InvalidRequest(
                f"The model's chat template refuses these messages: {error}", param="messages"
            ) from None

    def token_bytes(self, token_id: int) -> bytes:
        """What a token stands for. Special tokens give their name."""
        if self._bytes is not None and token_id in self._bytes:
            return self._bytes[token_id]
        return str(self._tokenizer.decode([token_id], skip_special_tokens=False)).encode()

    def is_hidden(self, token_id: int) -> bool:
        """Whether a token never shows in an answer's text."""
        return token_id in self._hidden_ids

    def _byte_table(self) -> dict[int, bytes] | None:
        """Token id to bytes for byte-level vocabularies; None for the others."""
        decoder = json.loads(self._tokenizer.to_str()).get("decoder") or {}
        parts = decoder.get("decoders", [decoder])
        if [part.get("type") for part in parts] != ["ByteLevel"]:
            return None
        alphabet = {character: byte for byte, character in _byte_alphabet().items()}
        added = self._tokenizer.get_added_tokens_decoder()
        table = {token_id: token.content.encode() for token_id, token in added.items()}
        for token, token_id in self._tokenizer.get_vocab(with_added_tokens=False).items():
            if token_id not in table:
                known = all(character in alphabet for character in token)
                table[token_id] = bytes(alphabet[character] for character in token) if known else token.encode()
        return table


class TextDecoder:
    """The text of one answer, token by token; never half a character.

    >>> # "👋" is two tokens in many vocabularies: the first push gives "", the second the whole character.
    """

    def __init__(self, codec: Codec) -> None:
        self._codec = codec
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace") if codec._bytes is not None else None
        self._stream: Any = None
        if self._utf8 is None:
            from tokenizers.decoders import DecodeStream

            self._stream = DecodeStream(skip_special_tokens=True)

    def push(self, token_id: int) -> str:
        """The characters that this token completes; special tokens give none."""
        if self._codec.is_hidden(token_id):
            return ""
        if self._utf8 is not None:
            return self._utf8.decode(self._codec.token_bytes(token_id))
        return self._stream.step(self._codec._tokenizer, token_id) or ""

    def flush(self) -> str:
        """The answer is over: bytes of an unfinished character become U+FFFD."""
        return self._utf8.decode(b"", True) if self._utf8 is not None else ""


def _byte_alphabet() -> dict[int, str]:
    """GPT-2's printable stand-in for every byte (Radford et al. 2019, `encoder.py: bytes_to_unicode`)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + place) for place, byte in enumerate(others)}


def _compile_template(source: str) -> Any:
    """A chat template comes with a model from anywhere: it runs in jinja's sandbox, with nothing to call."""
    import jinja2.ext
    import jinja2.sandbox

    def refuse(message: str) -> str:
        raise jinja2.TemplateError(message)

    def to_json(value: Any, indent: int | None = None, **_options: Any) -> str:
        return json.dumps(value, ensure_ascii=False, indent=indent)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().astimezone().strftime(form)
    try:
        return environment.from_string(_TRAINING_MARKERS.sub("", source))
    except jinja2.TemplateError as error:
        raise EngineError(f"the model's chat template cannot be compiled: {error}") from None


def _shape_message(message: Mapping[str, Any], template: str) -> dict[str, Any]:
    """A message that any template can print: `content` is a string, and what it does not know is told in words."""
    shaped = dict(message)
    role, content = str(shaped.get("role")), str(shaped.get("content") or "")
    if role not in template:
        role = _ROLES_OF_OLD.get(role, role)
    calls = shaped.get("tool_calls")
    if calls and "tool_calls" not in template:
        shaped.pop("tool_calls")
        told = "\n".join(
            f"<tool_call>{json.dumps(call.get('function', call), ensure_ascii=False)}</tool_call>" for call in calls
        )
        content = f"{content}\n{told}" if content else told
    return shaped | {"role": role, "content": content}


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise EngineError(f"{path}: not JSON ({error})") from None
    return data if isinstance(data, dict) else {}


def _read_template(folder: Path, settings: Mapping[str, Any]) -> str | None:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = settings.get("chat_template")
    if isinstance(template, list):  # several, each with a name
        named = {entry.get("name"): entry.get("template") for entry in template}
        template = named.get("default", next(iter(named.values()), None))
    return template if isinstance(template, str) else None


def _special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """`bos_token` and its like, which templates print."""
    found = {}
    for name in ("bos_token", "eos_token", "unk_token", "pad_token"):
        token = settings.get(name)
        text = token.get("content") if isinstance(token, dict) else token
        if isinstance(text, str):
            found[name] = text
    return found


def _end_ids(folder: Path, settings: Mapping[str, Any], tokenizer: Any) -> list[int]:
    """What ends an answer: the generation config's word first, then the model's, then the tokenizer's."""
    for name in ("generation_config.json", "config.json"):
        value = _read_json(folder / name).get("eos_token_id")
        ids = value if isinstance(value, list) else [value]
        if all(isinstance(token_id, int) for token_id in ids):
            return list(ids)
    token = _special_tokens(settings).get("eos_token")
    token_id = tokenizer.token_to_id(token) if token else None
    return [] if token_id is None else [token_id]
