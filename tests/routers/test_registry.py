"""Routers by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from atoll.errors import DataError, RouterError
from atoll.routers.registry import ROUTERS, load_router, make_router, router_class


@pytest.mark.parametrize("name", ROUTERS)
def test_every_router_is_found_by_its_name(name: str) -> None:
    assert router_class(name).name == name
    assert type(make_router(name)) is router_class(name)


def test_a_wrong_name_lists_the_right_ones() -> None:
    with pytest.raises(RouterError, match=f"no router 'kmm'; choose one of {', '.join(ROUTERS)}"):
        make_router("kmm")


def test_a_wrong_parameter_is_named() -> None:
    with pytest.raises(RouterError, match="neighbours"):
        make_router("knn", neighbours=3)


def test_what_is_no_router_is_not_loaded(tmp_path: Path) -> None:
    (tmp_path / "router.json").write_text('{"router": "knn"}')
    with pytest.raises(DataError, match="not a router of format 1"):
        load_router(tmp_path)
    with pytest.raises(DataError, match="not a router that Atoll saved"):
        load_router(tmp_path / "nothing")
