"""Importing Atoll is quick: it pulls in nothing heavy, and its help needs neither extra, key nor network."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
HEAVY = {
    "alembic",
    "aiohttp",
    "faiss",
    "fastapi",
    "litellm",
    "numpy",
    "onnxruntime",
    "pyarrow",
    "sentence_transformers",
    "sklearn",
    "sqlalchemy",
    "torch",
    "transformers",
}


def modules_after(program: str) -> set[str]:
    """The top-level modules that a fresh interpreter holds once `program` has run."""
    program += "\nimport sys; print('MODULES', *sorted({name.partition('.')[0] for name in sys.modules}))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    return set(done.stdout.splitlines()[-1].split()[1:])


def test_importing_atoll_imports_nothing_else() -> None:
    assert not modules_after("import atoll") & (HEAVY | {"pydantic", "click", "orjson", "yaml"})


def test_the_help_imports_nothing_heavy() -> None:
    program = """
from click.testing import CliRunner
from atoll.cli import atoll
result = CliRunner().invoke(atoll, ["--help"])
assert result.exit_code == 0, result.output
assert "serve" in result.output
"""
    assert not modules_after(program) & HEAVY


@pytest.mark.parametrize(
    "module",
    [
        "atoll.config",
        "atoll.errors",
        "atoll.types",
        "atoll.gateway.catalog",
        "atoll.routers.embedding.static",
        "atoll.routers.prior",
        "atoll.local_backend.supervisor",
    ],
)
def test_the_parts_of_the_core_need_no_extra(module: str) -> None:
    extras = {"torch", "transformers", "sentence_transformers", "gguf", "sklearn", "pyarrow", "onnxruntime", "litellm"}
    assert not modules_after(f"import {module}") & extras


@pytest.mark.parametrize("name", ["gateway", "routers", "agents", "memory", "local_backend"])
def test_the_links_at_the_root_lead_to_the_packages(name: str) -> None:
    link = ROOT / name
    assert link.is_symlink()
    assert link.resolve() == ROOT / "src" / "atoll" / name
    assert (link / "__init__.py").is_file()


def test_the_package_is_typed() -> None:
    assert (ROOT / "src" / "atoll" / "py.typed").is_file()
