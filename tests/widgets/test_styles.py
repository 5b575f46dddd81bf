"""A panel's style sheet reaches its own elements alone."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

SHEETS = sorted((Path(__file__).parents[2] / "dsv4nb/widgets/static").glob("*.css"))
_GROUPS = ("@media", "@container", "@supports")


def outer_selectors(style: str) -> Iterator[str]:
    """Yield the selectors of all rules that stand in no other rule."""
    inside: list[str] = []
    for head, brace in re.findall(r"([^{};]*)([{};])", style):
        if brace == "{":
            rule = head.strip()
            if not rule.startswith("@") and all(one.startswith(_GROUPS) for one in inside):
                yield from re.split(r",(?![^(]*\))", rule)
            inside.append(rule)
        elif brace == "}":
            inside.pop()


@pytest.mark.parametrize("sheet", SHEETS, ids=lambda sheet: sheet.stem)
def test_the_style_touches_nothing_of_the_host(sheet: Path) -> None:
    selectors = list(outer_selectors(re.sub(r"/\*.*?\*/", "", sheet.read_text(encoding="utf-8"), flags=re.DOTALL)))
    assert len(selectors) > 10
    assert [selector for selector in selectors if ".dsv4" not in selector] == []


@pytest.mark.parametrize("sheet", SHEETS, ids=lambda sheet: sheet.stem)
def test_nothing_is_placed_outside_the_panel(sheet: Path) -> None:
    style = sheet.read_text(encoding="utf-8")
    assert not re.search(r"position:\s*fixed", style)
    assert "@import" not in style and "url(" not in style.replace("url(data:", "")


def test_a_rule_without_a_class_of_ours_is_found() -> None:
    found = list(outer_selectors(".dsv4{p{color:red}}@media print{b,.dsv4-x{color:red}}i :is(u,s){top:0}"))
    assert found == [".dsv4", "b", ".dsv4-x", "i :is(u,s)"]
