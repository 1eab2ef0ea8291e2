"""Keep the docs true: write the parts that come from code, and check every link between the pages.

python scripts/docs.py           writes docs/configuration.md anew
python scripts/docs.py --check   fails when it differs, or when a link or an anchor leads nowhere
"""

from __future__ import annotations

import argparse
import ast
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from atoll import config

ROOT = Path(__file__).resolve().parent.parent
CONFIGURATION = ROOT / "docs" / "configuration.md"
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
_TYPE_NAMES = {
    "str": "text",
    "Path": "path",
    "int": "integer",
    "float": "number",
    "bool": "boolean",
    "SecretStr": "secret",
}
_SIGNS: dict[type, tuple[str, str]] = {Ge: ("≥", "ge"), Gt: (">", "gt"), Le: ("≤", "le"), Lt: ("<", "lt")}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing, fail when something is not true")
    is_check = parser.parse_args().check
    problems = []
    text = configuration_page()
    if is_check and (not CONFIGURATION.exists() or CONFIGURATION.read_text() != text):
        problems.append("docs/configuration.md is not what config.py says: run `make docs`")
    elif not is_check:
        CONFIGURATION.write_text(text)
    problems.extend(broken_links())
    print("\n".join(problems) or "docs: every link leads somewhere, every generated page is current")
    return 1 if problems else 0


def configuration_page() -> str:
    """The reference of the configuration file, from the settings' fields and docstrings."""
    sections = [
        "# Configuration",
        "",
        "One YAML file, read by `atoll serve --config atoll.yaml` (without `--config`, `./atoll.yaml` where it exists,",
        "else the defaults below). `${NAME}` in a value is the environment variable NAME, `${NAME:-default}` has a",
        "default. Unknown keys, wrong types and missing variables are errors with file, line and key;",
        "`atoll config check` looks for them without serving.",
        "",
        "This page is generated from `src/atoll/config.py` by `make docs`.",
    ]
    for title, model in _sections():
        sections += ["", f"## {title}", ""]
        if model.__doc__:
            sections += [inspect.cleandoc(model.__doc__), ""]
        sections += ["| key | type | default | |", "| --- | --- | --- | --- |"]
        docstrings = _docstrings(model)
        sections += [_row(name, field, docstrings.get(name, "")) for name, field in model.model_fields.items()]
    return "\n".join(sections) + "\n"


def _sections() -> Iterator[tuple[str, type[BaseModel]]]:
    yield "The file", config.Settings
    yield "`server`", config.ServerSettings
    for model in get_args(get_args(config.UpstreamSettings)[0]):
        yield f"`upstreams.NAME`, `kind: {get_args(model.model_fields['kind'].annotation)[0]}`", model
    yield "`upstreams.NAME.timeouts`", config.Timeouts
    yield "`candidates[]`", config.CandidateSettings
    yield "`candidates[].prices`", config.Prices
    yield "`routing`", config.RoutingSettings
    yield "`routing.router`", config.RouterSettings
    yield "`routing.embedder`", config.EmbedderSettings
    yield "`limits`", config.LimitSettings
    yield "`ledger`", config.LedgerSettings


def _row(name: str, field: FieldInfo, documentation: str) -> str:
    text = " ".join(documentation.split()).replace("|", "\\|")
    return f"| `{name}` | {_type(field.annotation)}{_range(field)} | {_default(field)} | {text} |"


def _type(annotation: Any) -> str:
    """A type as a writer of YAML thinks of it."""
    if annotation is type(None):
        return "null"
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _type(arguments[0])
    if origin in (tuple, frozenset):
        return f"list of {_type(arguments[0])}"
    if origin is dict:
        return f"map of {_type(arguments[1])}"
    if str(origin) == "typing.Literal":
        return " \\| ".join(f"`{value}`" for value in arguments)
    if arguments:
        return " or ".join(dict.fromkeys(_type(argument) for argument in arguments))
    return _TYPE_NAMES.get(annotation.__name__, "section")


def _range(field: FieldInfo) -> str:
    metadata = list(field.metadata)
    for argument in get_args(field.annotation):
        metadata += getattr(argument, "__metadata__", ())
    for part in list(metadata):
        metadata += getattr(part, "metadata", ())
    bounds = [
        f"{sign} {getattr(part, key)}"
        for part in metadata
        for kind, (sign, key) in _SIGNS.items()
        if isinstance(part, kind)
    ]
    return f", {' and '.join(bounds)}" if bounds else ""


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.default
    if isinstance(value, BaseModel):
        return "see there"
    if value in ((), {}, frozenset()):
        return "empty"
    if value is None:
        return "none"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def _docstrings(model: type[BaseModel]) -> dict[str, str]:
    """The string under each field, of this class and those it extends."""
    found: dict[str, str] = {}
    for ancestor in reversed(model.__mro__):
        if ancestor.__module__ != config.__name__:
            continue
        body = ast.parse(inspect.getsource(ancestor)).body[0]
        assert isinstance(body, ast.ClassDef)
        for statement, following in zip(body.body, body.body[1:], strict=False):
            if isinstance(statement, ast.AnnAssign) and isinstance(following, ast.Expr):
                assert isinstance(statement.target, ast.Name)
                assert isinstance(following.value, ast.Constant)
                found[statement.target.id] = str(following.value.value)
    return found


def broken_links() -> Iterator[str]:
    """Links of README, CHANGELOG and docs to files or headings that are not there."""
    for page in [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        if not page.exists():
            yield f"{page.name} is missing"
            continue
        for link in _LINK.findall(_FENCE.sub("", page.read_text())):
            if link.startswith(("http://", "https://", "mailto:")):
                continue
            name, _, anchor = link.partition("#")
            target = (page.parent / name).resolve() if name else page
            if not target.exists():
                yield f"{page.relative_to(ROOT)}: {link} leads to no file"
            elif anchor and target.suffix == ".md" and anchor not in _anchors(target):
                yield f"{page.relative_to(ROOT)}: {link} leads to no heading"


def _anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as code hosts make them."""
    headings = re.findall(r"^#+ (.+)$", _FENCE.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


if __name__ == "__main__":
    sys.exit(main())
