"""The README does what it says: its requests are sent, its programs run, and what they print is what it shows."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from atoll.config import parse_settings
from atoll.gateway.catalog import build_catalog
from doubles.process import serving

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
EXAMPLES = [
    (language, program, output)
    for (language, program), (_, output) in itertools.pairwise(BLOCKS)
    if program.startswith("curl") or language == "python"
]


def settled(text: str) -> str:
    """`text` without what differs from run to run: ids and times."""
    text = re.sub(r'("(?:id|request_id|system_fingerprint)": ?)"[^"]*"', r'\1"…"', text)
    text = re.sub(r'("created": ?)\d+', r"\1…", text)
    return "\n".join(line.rstrip() for line in text.strip().splitlines())


@pytest.fixture(scope="module")
def base_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    pytest.importorskip("torch", reason="the embedded model needs the extra `local`")
    with serving(tmp_path_factory.mktemp("readme")) as running:
        yield running.url


def test_the_readme_has_its_examples() -> None:
    assert [language for language, _, _ in EXAMPLES] == ["sh", "sh", "python"]


@pytest.mark.slow
@pytest.mark.parametrize(("language", "program", "output"), EXAMPLES)
def test_an_example_prints_what_the_readme_shows(base_url: str, language: str, program: str, output: str) -> None:
    program = program.replace("http://127.0.0.1:8700", base_url)
    command = ["bash", "-c", program] if language == "sh" else [sys.executable, "-c", program]
    environ = {name: value for name, value in os.environ.items() if "proxy" not in name.lower()}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=environ)
    assert done.returncode == 0, done.stderr
    assert settled(done.stdout) == settled(output)


def test_the_configuration_of_the_readme_is_right() -> None:
    (text,) = [block for language, block in BLOCKS if language == "yaml"]
    settings = parse_settings(text, "README.md", {"OPENAI_API_KEY": "sk-1", "ANTHROPIC_API_KEY": "sk-2"})
    catalog = build_catalog(settings, {})
    assert all(candidate.output_usd_per_mtok > 0 for candidate in catalog.candidates.values())
