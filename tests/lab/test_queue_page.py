"""The queue panel in a real JupyterLab: requests as they wait and run, cancelling, what has ended, the empty queue, the
keyboard, both themes, narrow pages."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.lab

# what reaches beyond the panel's right edge; the table scrolls
WIDER = """panel => [...panel.querySelectorAll("*:not(.dsv4-unseen)")]
  .filter((it) => !it.closest(".dsv4-wide"))
  .filter((it) => it.getBoundingClientRect().right > panel.getBoundingClientRect().right + 1)
  .map((it) => it.outerHTML.slice(0, 200))"""

SHOW = """import dsv4nb
from dsv4nb.testing.fake_model import fake_model
m = fake_model(" ".join(f"w{i}" for i in range(20000)), delay_s=0.01, chunk=16, chunk_delay_s=0.6)
panel = dsv4nb.QueuePanel(m)
panel"""
ASK = """tickets = [m.submit(text, temperature=0) for text in (
    "Summarise the chapter about the lighthouse keeper and the two storms. " * 10,
    "What is the capital of France?", "Write a haiku about rivers.", "Translate <b>this</b> into Dutch.")]"""


@pytest.fixture
def opened(lab: Any, quiet: None, request: pytest.FixtureRequest) -> Callable[..., Any]:
    """Opens a notebook whose first cell shows the panel and whose other cells are given."""

    def open_(*cells: str, first: str = SHOW) -> Any:
        lab.open(lab.write(request.node.name, first, *cells))
        lab.run_cell(0)
        lab.page.locator(".dsv4-queue .dsv4-panel").first.wait_for(timeout=60_000)
        return lab.page

    return open_


def counts(page: Any, waiting: int, past: int) -> None:
    page.wait_for_function(
        "([w, p]) => document.querySelector(`.dsv4-queue[data-waiting='${w}'][data-past='${p}']`)", arg=[waiting, past]
    )


def test_a_persons_path(
    opened: Callable[..., Any], lab: Any, shots: Path, axe: Callable[[str], None], picture: Callable[..., None]
) -> None:
    page = opened('m.generate("Say hello.", max_new=3, temperature=0).text', ASK, "[t.cancel() for t in tickets]; None")
    page.get_by_text("Requests of every handle, chat and batch appear here").wait_for()
    page.get_by_text("idle", exact=True).wait_for()
    lab.run_cell(1)
    counts(page, 0, 1)
    lab.theme(dark=False)
    lab.run_cell(2)
    counts(page, 4, 1)
    first = page.locator(".dsv4-request").first
    first.get_by_text("reading the prompt").wait_for()
    page.get_by_text("1 running · 3 waiting").wait_for()
    assert (
        page.locator(".dsv4-request").nth(3).locator(".dsv4-about").inner_text() == "Translate <b>this</b> into Dutch."
    )

    panel = page.locator(".dsv4-queue")
    numbers = [
        page.locator(".dsv4-request .dsv4-facts"),
        page.locator(".dsv4-bar"),
        page.locator(".dsv4-past td:nth-child(n + 6)"),
    ]
    for dark in (False, True):
        lab.theme(dark=dark)
        axe(".dsv4-queue")
        panel.screenshot(path=shots / f"queue-seen-{'dark' if dark else 'light'}.png")
        picture(panel, "queue", mask=numbers)
    lab.theme(dark=False)

    # the second is cancelled where it waits, then the first where it runs
    page.get_by_role("button", name="Cancel request 3").click()
    counts(page, 3, 2)
    page.get_by_role("button", name="Cancel request 2").click()
    counts(page, 2, 3)
    page.locator(".dsv4-request[data-id='4'][data-state=running]").wait_for()
    page.locator(".dsv4-request[data-id='4']").get_by_text("answering").wait_for()
    page.wait_for_function("document.querySelector('.dsv4-request .dsv4-facts').textContent.includes('tok/s')")
    told = page.locator(".dsv4-past tbody tr").all_inner_texts()
    assert ["cancelled" in row for row in told] == [True, True, False] and "done" not in told[0]

    # the keyboard alone: the focus goes to the next request
    page.get_by_role("button", name="Cancel request 4").focus()
    page.keyboard.press("Enter")
    counts(page, 1, 4)
    page.wait_for_function("document.activeElement.ariaLabel === 'Cancel request 5'")
    page.keyboard.press("Space")
    counts(page, 0, 5)
    page.wait_for_function("document.activeElement.closest('.dsv4-history') !== null")
    page.get_by_text("idle", exact=True).wait_for()

    lab.command("application:toggle-left-area")
    for width in (900, 600, 480):
        lab.size(width)
        panel.screenshot(path=shots / f"queue-{width}.png")
        assert page.locator(".dsv4-queue .dsv4-panel").evaluate(WIDER) == [], width
    lab.size(1200)
    lab.command("application:toggle-left-area")


def test_a_closed_model_says_so(opened: Callable[..., Any], lab: Any) -> None:
    page = opened(ASK, "m.close()")
    lab.run_cell(1)
    page.get_by_text("1 running · 3 waiting").wait_for()
    lab.run_cell(2)
    page.get_by_text("The model is closed.").wait_for()
    lab.restart()
    page.get_by_text("The kernel was restarted or closed, and its requests with it").wait_for()
    assert page.locator(".dsv4-past tbody tr").count() == 4
