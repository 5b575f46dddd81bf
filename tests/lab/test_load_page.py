"""The load panel in a real JupyterLab, while the cell that loads blocks the kernel: progress, Cancel, an interrupt, the
card, the keyboard, both themes, narrow pages."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.lab

WIDER = """panel => [...panel.querySelectorAll("*:not(.dsv4-unseen)")]
  .filter((it) => it.getBoundingClientRect().right > panel.getBoundingClientRect().right + 1)
  .map((it) => it.outerHTML.slice(0, 200))"""

# a small checkpoint on a slow disk
PREPARE = """import shutil
import time
import dsv4nb
from pathlib import Path
from dsv4nb.testing.tiny_checkpoint import write_tiny_checkpoint
from dsv4nb.testing.tiny_tokenizer import write_tiny_tokenizer
from dsv4nb.weights.reader import Reader
shutil.rmtree("slow", ignore_errors=True)  # that of the test before
write_tiny_tokenizer(write_tiny_checkpoint(Path("slow"), n_routed_experts=4))
read, speed = Reader.read, [SECONDS]
def slowly(self, name):
    time.sleep(speed[0])
    return read(self, name)
Reader.read = slowly
print("ready")"""
LOAD = 'm = dsv4nb.load("slow", name="Tiny-Flash", progress=PROGRESS)'
LEFT = "print(m.name if 'm' in globals() else 'no model', flush=True)"


@pytest.fixture
def opened(lab: Any, quiet: None, request: pytest.FixtureRequest) -> Callable[..., Any]:
    """Opens a notebook that has a slow checkpoint and runs its first cell; the other cells are given."""

    def open_(*cells: str, seconds: float) -> Any:
        lab.open(lab.write(request.node.name, PREPARE.replace("SECONDS", str(seconds)), *cells))
        start(lab, 0)
        lab.page.get_by_text("ready", exact=True).wait_for(timeout=60_000)
        return lab.page

    return open_


def start(lab: Any, index: int) -> None:
    """Run a cell when the one before it is over, and do not wait for it; an error ends what is sent before that."""
    lab.page.evaluate(
        """async () => {
          const { kernel } = window.jupyterapp.shell.currentWidget.sessionContext.session;
          while (kernel.status !== "idle") await new Promise((go) => setTimeout(go, 20));
          await kernel.requestKernelInfo();
        }"""
    )
    lab.start_cell(index)


def state(page: Any, name: str) -> None:
    page.locator(f".dsv4-load[data-state={name}]").wait_for(timeout=30_000)


def test_j19_a_load_is_shown_cancelled_and_done_again(
    opened: Callable[..., Any], lab: Any, shots: Path, axe: Callable[[str], None], picture: Callable[..., None]
) -> None:
    load = LOAD.replace("PROGRESS", "True")
    page = opened(load, LEFT, "speed[0] = 0\n" + load, LEFT, seconds=0.05)
    lab.theme(dark=False)
    start(lab, 1)
    state(page, "loading")
    panel = page.locator(".dsv4-load").first
    page.wait_for_function("document.querySelector('.dsv4-load .dsv4-bar').value > 0.05")
    page.get_by_text("rate", exact=True).wait_for()
    told = panel.inner_text()
    for part in ("Tiny-Flash", "reading weights", "read", "left", "so far", "file", "on cpu", "safetensors"):
        assert part in told, part
    before = float(panel.locator(".dsv4-bar").evaluate("it => it.value"))
    for dark in (False, True):
        lab.theme(dark=dark)
        axe(".dsv4-load")
        panel.screenshot(path=shots / f"load-going-{'dark' if dark else 'light'}.png")
        numbers = panel.locator(".dsv4-bar, .dsv4-share, .dsv4-known, .dsv4-path")
        picture(panel, "load-going", mask=[numbers])
    lab.theme(dark=False)
    assert panel.locator(".dsv4-bar").evaluate("it => it.value") > before, "the bar moves while the cell blocks"

    panel.get_by_role("button", name="Cancel").click()
    state(page, "cancelled")
    panel.get_by_role("alert").get_by_text("loading Tiny-Flash was cancelled at").wait_for()
    # where a kernel reads no messages while a cell runs, the page interrupts it
    page.get_by_text(re.compile("LoadCancelled: loading Tiny-Flash|KeyboardInterrupt")).first.wait_for()
    start(lab, 2)
    page.get_by_text("no model", exact=True).wait_for()
    panel.screenshot(path=shots / "load-cancelled.png")

    start(lab, 3)
    page.locator(".dsv4-load[data-state=loaded]").wait_for(timeout=30_000)
    card = page.locator(".dsv4-load").last
    labels = card.locator(".dsv4-card dt").all_inner_texts()
    assert labels[:4] == ["model", "from", "layers", "hidden"] and labels[-2:] == ["device", "loaded in"]
    start(lab, 4)
    page.get_by_text("Tiny-Flash", exact=True).last.wait_for()
    facts = card.locator(".dsv4-state, .dsv4-card > div:nth-child(2) dd, .dsv4-card > div:last-child dd")
    for dark in (False, True):
        lab.theme(dark=dark)
        axe(".dsv4-load[data-state=loaded]")
        card.screenshot(path=shots / f"load-card-{'dark' if dark else 'light'}.png")
        picture(card, "load-card", mask=[facts])
    lab.theme(dark=False)
    lab.command("application:toggle-left-area")
    for width in (600, 480):
        lab.size(width)
        card.screenshot(path=shots / f"load-{width}.png")
        for one in page.locator(".dsv4-load .dsv4-panel").all():
            assert one.evaluate(WIDER) == [], width
    lab.size(1200)
    lab.command("application:toggle-left-area")


def test_a_load_that_takes_long_shows_itself_and_an_interrupt_stops_it(opened: Callable[..., Any], lab: Any) -> None:
    page = opened(LOAD.replace("PROGRESS", "None"), LEFT, seconds=0.05)
    start(lab, 1)
    state(page, "loading")
    lab.command("notebook:interrupt-kernel")
    state(page, "cancelled")
    page.get_by_text("KeyboardInterrupt").first.wait_for()
    start(lab, 2)
    page.get_by_text("no model", exact=True).wait_for()


def test_by_keyboard(opened: Callable[..., Any], lab: Any) -> None:
    page = opened(LOAD.replace("PROGRESS", "True"), seconds=0.05)
    cells = page.locator(".jp-Cell").count()
    start(lab, 1)
    state(page, "loading")
    page.get_by_role("button", name="Cancel").focus()
    page.keyboard.press("b")
    page.keyboard.press("Enter")
    state(page, "cancelled")
    assert page.locator(".jp-Cell").count() == cells
    start(lab, 1)
    state(page, "loading")
    lab.restart()
    page.get_by_text("The kernel was restarted or closed, and nothing is loaded any more").wait_for()
    assert page.get_by_role("button", name="Cancel").count() == 0


def test_a_load_that_is_quick_shows_nothing_by_itself(opened: Callable[..., Any], lab: Any) -> None:
    page = opened(LOAD.replace("PROGRESS", "None"), LEFT, seconds=0)
    start(lab, 1)
    start(lab, 2)
    page.get_by_text("Tiny-Flash", exact=True).wait_for(timeout=60_000)
    assert page.locator(".dsv4-load").count() == 0
