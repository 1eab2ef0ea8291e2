"""`/v1/embeddings` by the embedder that routes: the gateway's own, no upstream is called."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt
import orjson

from atoll.config import AUTO_MODEL
from atoll.errors import InvalidRequest
from atoll.gateway.parse import Endpoint, ParsedRequest
from atoll.routers.embedding.prompt_tokens import estimate_prompt_tokens
from atoll.types import Usage

MAX_INPUTS: Final = 2048
"""As at OpenAI."""


class TextEmbedder(Protocol):
    """Embeds whole texts, off the event loop where that takes long."""

    async def embed_api(self, texts: Sequence[str]) -> npt.NDArray[np.float32]:
        """float32 of shape (len(texts), d), unit length."""


@dataclass(frozen=True, slots=True)
class EmbeddingsAnswer:
    model: str
    body: bytes
    usage: Usage


class EmbeddingsEndpoint:
    """Answers for the models in `embedders` (by name, the first is also `auto`); other models are candidates."""

    def __init__(self, embedders: dict[str, TextEmbedder]) -> None:
        self._embedders = embedders
        self.names = tuple(embedders)

    def serves(self, request: ParsedRequest) -> bool:
        if request.endpoint is not Endpoint.EMBEDDINGS:
            return False
        return request.model in self._embedders or (request.model == AUTO_MODEL and bool(self._embedders))

    async def answer(self, request: ParsedRequest) -> EmbeddingsAnswer:
        """OpenAI's embeddings object. Raises InvalidRequest for what the embedders here cannot do."""
        model = request.model if request.model in self._embedders else self.names[0]
        texts = _texts(request.data)
        encoding = request.data.get("encoding_format") or "float"
        if encoding not in ("float", "base64"):
            raise InvalidRequest(
                f"'encoding_format' must be 'float' or 'base64', found {str(encoding)[:40]!r}", param="encoding_format"
            )
        vectors = await self._embedders[model].embed_api(texts)
        dimensions = request.data.get("dimensions")
        if dimensions is not None and dimensions != vectors.shape[1]:
            raise InvalidRequest(
                f"{model!r} gives {vectors.shape[1]} dimensions and cannot give {str(dimensions)[:20]}. "
                "Leave 'dimensions' out",
                param="dimensions",
            )
        usage = Usage(prompt_tokens=estimate_prompt_tokens(request.data), is_estimated=True)
        body = orjson.dumps(
            {
                "object": "list",
                "data": [
                    {"object": "embedding", "index": index, "embedding": _encoded(vector, encoding)}
                    for index, vector in enumerate(vectors)
                ],
                "model": model,
                "usage": {"prompt_tokens": usage.prompt_tokens, "total_tokens": usage.prompt_tokens},
            },
            option=orjson.OPT_SERIALIZE_NUMPY,
        )
        return EmbeddingsAnswer(model, body, usage)


def _texts(data: dict[str, Any]) -> list[str]:
    given = data["input"]
    texts = [given] if isinstance(given, str) else given
    if not all(isinstance(text, str) for text in texts):
        raise InvalidRequest(
            "'input' must be a text or a list of texts here: token ids are another model's words", param="input"
        )
    if len(texts) > MAX_INPUTS:
        raise InvalidRequest(f"'input' has {len(texts)} texts, at most {MAX_INPUTS} are allowed", param="input")
    return texts


def _encoded(vector: npt.NDArray[np.float32], encoding: str) -> npt.NDArray[np.float32] | str:
    if encoding == "base64":
        return base64.b64encode(vector.astype("<f4").tobytes()).decode()
    return np.ascontiguousarray(vector)
