"""The cache panel in a real JupyterLab, on the bundled model: why a prefix was reused, what a token read, which
experts; snapshots that are pinned, moved and deleted; the keyboard, both themes, narrow pages, a restarted kernel."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

TOY = Path(__file__).parents[2] / "dsv4nb/toy/model"

pytestmark = [
    pytest.mark.lab,
    pytest.mark.skipif(not (TOY / "config.json").exists(), reason="the bundled model is not in dsv4nb/toy/model"),
]

LOAD = """import dsv4nb
m = dsv4nb.load("toy", host_cache_mib=16)
chat = m.chat(temperature=0)
panel = dsv4nb.CachePanel(m, chat, title="Caches of the toy")
panel"""
TALK = """towns = ["Oslo", "Lima", "Rome", "Paris", "Madrid", "Cairo", "Berlin", "Tokyo", "Athens", "Vienna"]
days = ["Monday", "Friday", "Sunday"]
told = " ".join(f"Tom went from {towns[i % 10]} to {towns[(i + 1) % 10]} on {days[i % 3]}." for i in range(20))
chat.send("Remember: the code word is silver otter. " + told)
chat.send("What is the capital of France?")
chat.edit(-1, "What is the code word?").text"""
TABS = ("Ledger", "Decisions", "Snapshots", "Memory", "Attention", "Experts")


@pytest.fixture
def opened(lab: Any, quiet: None, request: pytest.FixtureRequest) -> Callable[..., Any]:
    """Opens a notebook that shows the panel of a chat, and lets it talk."""

    def open_(*cells: str) -> Any:
        lab.open(lab.write(request.node.name, LOAD, TALK, *cells))
        lab.run_cell(0)
        lab.page.locator(".dsv4-cache .dsv4-panel").first.wait_for(timeout=120_000)
        lab.page.locator(".dsv4-cache .dsv4-empty", has_text="Nothing is committed yet").wait_for()
        lab.run_cell(1)
        lab.page.locator(".jp-Cell").nth(1).locator(".jp-OutputArea-output").wait_for(timeout=60_000)
        lab.page.locator(".dsv4-cache .dsv4-state", has_text="tokens").wait_for()
        return lab.page

    return open_


def go(page: Any, name: str) -> None:
    page.get_by_role("tab", name=name).click()


def answered(page: Any) -> None:
    """Wait until nothing is asked of the engine."""
    page.wait_for_function("() => !document.querySelector('.dsv4-cache .dsv4-state').textContent.includes('…')")


def told(page: Any, text: str) -> None:
    """Wait until the line under what is shown says so."""
    page.locator(".dsv4-cache .dsv4-told:visible", has_text=text).wait_for()


def test_a_persons_path(opened: Callable[..., Any], lab: Any) -> None:
    page = opened("[one.is_pinned for one in m.cache.stats().anchors], len(m.cache.host)")
    panel = page.locator(".dsv4-cache")

    go(page, "Decisions")
    newest = panel.locator(".dsv4-decision").first
    assert "from an anchor" in newest.inner_text()
    assert "cached is ‘·capital’, the prompt has ‘·code’" in newest.inner_text()
    assert panel.locator(".dsv4-decision").count() == 3

    go(page, "Snapshots")
    rows = panel.locator("[data-entry^=anchor]")
    n = rows.count()
    last = rows.last.get_attribute("data-entry").split()[1]
    panel.get_by_role("button", name=f"Pin anchor {last}", exact=True).click()
    panel.get_by_role("button", name=f"Unpin anchor {last}", exact=True).wait_for()
    panel.get_by_role("button", name="Bring back to the device: prefix 1").click()
    panel.get_by_role("alert").get_by_text("on the device already").wait_for()
    panel.locator("[data-entry='host 1']").get_by_role("button", name="Delete").click()
    panel.get_by_text("None yet. Long prompts").wait_for()
    rows.nth(1).get_by_role("button", name="Delete").click()
    page.wait_for_function("n => document.querySelectorAll('[data-entry^=anchor]').length === n", arg=n - 1)
    lab.run_cell(2)
    page.locator(".jp-Cell").nth(2).get_by_text("([True, ").wait_for()

    go(page, "Memory")
    assert [row.get_attribute("data-class") for row in panel.locator("tr[data-class]").all()] == [
        *("window", "compressor", "indexer", "source", "drafter"),
    ]

    go(page, "Ledger")
    box = panel.locator(".dsv4-map").bounding_box()
    page.mouse.move(box["x"] + 4 + 2 * 17 + 6, box["y"] + 12)
    told(page, "token 2 · ")
    panel.locator(".dsv4-around", has_text="code word is silver").wait_for()
    page.mouse.dblclick(box["x"] + 4 + 9 * 17 + 6, box["y"] + 12)
    assert panel.get_attribute("data-tab") == "reads"
    told(page, "Token 9 ")

    last_token = panel.locator("[data-token]").last
    last_token.click()
    answered(page)
    told(page, "32 of ")
    panel.get_by_label("Entries by").select_option("position")
    first = panel.locator(".dsv4-entries tbody tr").first
    first.hover()
    lit = "".join(panel.locator("[data-token].dsv4-lit").all_text_contents())
    assert lit and lit == first.locator("td").last.text_content()
    panel.get_by_label("Layer", exact=True).select_option("3")
    told(page, "2 entries (")
    first.hover()
    assert panel.locator("[data-token].dsv4-lit").count() == 128

    go(page, "Experts")
    panel.get_by_label("Tokens", exact=True).select_option(label="the reply")
    answered(page)
    panel.locator(".dsv4-heat").hover(position={"x": 90, "y": 30})
    told(page, "layer 0, expert 0: ")
    assert " of 7 tokens (" in panel.locator(".dsv4-page:visible .dsv4-told").inner_text()

    lab.restart()
    panel.get_by_role("alert").get_by_text("The kernel was restarted or closed").wait_for(timeout=30_000)
    go(page, "Decisions")
    assert "from an anchor" in panel.locator(".dsv4-decision").first.inner_text()
    assert page.locator(".dsv4-cache-saved").count() == 1


def test_everything_by_keyboard(opened: Callable[..., Any]) -> None:
    page = opened()
    panel = page.locator(".dsv4-cache")
    panel.get_by_role("tab", name="Ledger").focus()
    seen = []
    for _ in TABS:
        seen.append(page.evaluate("document.activeElement.textContent"))
        page.keyboard.press("ArrowRight")
    assert tuple(seen) == TABS
    page.keyboard.press("Tab")
    assert "dsv4-map" in page.evaluate("document.activeElement.className")
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("ArrowLeft")
    heard = panel.locator("[role=status]")
    assert "generated" in heard.inner_text()
    page.keyboard.press("Enter")
    answered(page)
    told(page, " of the window (")
    assert page.evaluate("document.activeElement.textContent") == "Attention"
    for _ in range(3):
        page.keyboard.press("Tab")
    assert "dsv4-source" in page.evaluate("document.activeElement.className")
    before = panel.locator(".dsv4-told:visible").inner_text()
    page.keyboard.press("ArrowUp")
    page.wait_for_function(
        "it => ![...document.querySelectorAll('.dsv4-told')].some(n => n.textContent === it)", arg=before
    )
    answered(page)
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.getAttribute('aria-label')").startswith("Entry ")
    one = panel.locator("[data-token].dsv4-lit").count()
    page.keyboard.press("ArrowDown")
    assert panel.locator("[data-token].dsv4-lit").count() == one == 4
    panel.get_by_role("tab", name="Experts").focus()
    page.keyboard.press("Enter")
    answered(page)
    page.keyboard.press("Tab")
    page.keyboard.press("Tab")
    assert "dsv4-heat" in page.evaluate("document.activeElement.className")
    for key in ("ArrowRight", "ArrowRight", "ArrowDown"):
        page.keyboard.press(key)
    assert heard.inner_text().startswith("layer 1, expert 1: ")


def test_looks(opened: Callable[..., Any], lab: Any, axe: Any, picture: Any) -> None:
    page = opened()
    panel = page.locator(".dsv4-cache")
    for dark in (False, True):
        lab.theme(dark=dark)
        for name in TABS:
            go(page, name)
            answered(page)
            if name == "Attention":
                told(page, "32 of ")
            if name == "Experts":
                told(page, "# routed by")
            page.wait_for_timeout(250)
            axe(".dsv4-cache")
            if name in ("Ledger", "Attention", "Experts"):
                picture(panel, f"cache-{name.lower()}")
    lab.command("application:toggle-left-area")
    for width in (600, 480):
        lab.size(width)
        for name in TABS:
            go(page, name)
            answered(page)
            wide = panel.evaluate("it => [it.scrollWidth, it.clientWidth]")
            assert wide[0] <= wide[1], (name, width, wide)
    lab.size(1200)
    lab.command("application:toggle-left-area")
    lab.theme(dark=False)
