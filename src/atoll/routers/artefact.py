"""How a router lies on disk: arrays as safetensors, everything else as JSON. Nothing in it is ever executed.

A path that ends in `.safetensors` is one file, with the JSON in its header; any other is a folder with `router.json`
and `router.safetensors`. Both are written beside their place and moved there when complete.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from atoll.errors import DataError
from atoll.types import Candidate

FORMAT: Final = 1
ABOUT_FILE: Final = "router.json"
TENSORS_FILE: Final = "router.safetensors"
_HEADER_KEY: Final = "atoll"
_FILE_MODE: Final = 0o644
_FOLDER_MODE: Final = 0o755
"""A router is no secret: whoever serves may read what somebody else has fitted."""

Tensors = dict[str, npt.NDArray[Any]]


def write_artefact(path: Path, router: str, about: Mapping[str, Any], tensors: Mapping[str, npt.NDArray[Any]]) -> None:
    """Raises DataError where `path` cannot be written or is a folder that holds anything but a router."""
    text = json.dumps({"router": router, "format": FORMAT, **about}, allow_nan=False)
    arrays = {name: np.ascontiguousarray(array) for name, array in tensors.items()}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".safetensors":
            _write_file(path, text, arrays)
        else:
            _write_folder(path, text, arrays)
    except OSError as error:
        raise DataError(f"the router cannot be written to {str(path)!r}: {error.strerror or error}") from error


def read_artefact(path: Path, router: str | None = None) -> tuple[dict[str, Any], Tensors]:
    """What `write_artefact` wrote. Raises DataError for anything else, and for another router than `router`."""
    from safetensors import SafetensorError, safe_open

    about = read_about(path, router)
    try:
        with safe_open(path / TENSORS_FILE if path.is_dir() else path, framework="numpy") as stored:
            tensors = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118  # it is no mapping
    except (OSError, SafetensorError) as error:
        raise _unreadable(path, error) from error
    return about, tensors


def read_about(path: Path, router: str | None = None) -> dict[str, Any]:
    """The JSON of `read_artefact` alone."""
    from safetensors import SafetensorError, safe_open

    try:
        if path.is_dir():
            text = (path / ABOUT_FILE).read_text(encoding="utf-8")
        else:
            with safe_open(path, framework="numpy") as stored:
                text = (stored.metadata() or {}).get(_HEADER_KEY, "")
        about = json.loads(text)
    except (OSError, ValueError, SafetensorError) as error:
        raise _unreadable(path, error) from error
    if not isinstance(about, dict) or about.get("format") != FORMAT or not isinstance(about.get("router"), str):
        raise DataError(f"{str(path)!r} is not a router of format {FORMAT}. Make it anew with `atoll fit`")
    if router is not None and about["router"] != router:
        raise DataError(f"{str(path)!r} is a {about['router']!r} router, not {router!r}")
    return about


def _unreadable(path: Path, error: Exception) -> DataError:
    return DataError(f"{str(path)!r} is not a router that Atoll saved ({error}). Make one with `atoll fit`")


def candidates_to_json(candidates: Sequence[Candidate]) -> list[dict[str, Any]]:
    return [asdict(candidate) | {"capabilities": sorted(candidate.capabilities)} for candidate in candidates]


def candidates_from_json(rows: Sequence[Mapping[str, Any]]) -> tuple[Candidate, ...]:
    """Raises DataError for anything that `candidates_to_json` did not write."""
    known = {field.name for field in fields(Candidate)}
    try:
        return tuple(
            Candidate(
                **{key: value for key, value in row.items() if key in known}
                | {"capabilities": frozenset(row["capabilities"]), "aliases": tuple(row["aliases"])}
            )
            for row in rows
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise DataError(f"the saved candidates cannot be read: {error}") from error


def _write_file(path: Path, text: str, arrays: Tensors) -> None:
    from safetensors.numpy import save_file

    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
    os.close(handle)
    part = Path(name)
    try:
        save_file(arrays, part, metadata={_HEADER_KEY: text})
        part.chmod(_FILE_MODE)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def _write_folder(path: Path, text: str, arrays: Tensors) -> None:
    from safetensors.numpy import save_file

    if path.exists() and not path.is_dir():
        raise DataError(f"{str(path)!r} is a file; name a folder, or a file that ends in .safetensors")
    if path.is_dir() and any(path.iterdir()) and not (path / ABOUT_FILE).exists():
        raise DataError(f"{str(path)!r} holds something else than a router and is left alone; name another folder")
    part = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part"))
    try:
        save_file(arrays, part / TENSORS_FILE)
        (part / TENSORS_FILE).chmod(_FILE_MODE)
        (part / ABOUT_FILE).write_text(text, encoding="utf-8")
        part.chmod(_FOLDER_MODE)
        if path.is_dir():
            old = part.with_suffix(".old")
            path.rename(old)
            part.rename(path)
            shutil.rmtree(old)
        else:
            part.rename(path)
    finally:
        shutil.rmtree(part, ignore_errors=True)
