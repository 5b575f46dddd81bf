"""What happens to a chat's page while a reply runs: clicks, stops, interrupts, restarts, saves, closed tabs."""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nbformat
import pytest

pytestmark = pytest.mark.lab

PARIS = "The capital of France is Paris."
N = 1600  # four seconds at 400 tokens a second
COUNT = " ".join(str(i) for i in range(1, N + 1))

CHAT = """from dsv4nb.testing.fake_model import fake_model
m = fake_model({script!r}, delay_s=0.0025, name="toy")
notes = "a text"
chat = m.chat(temperature=0)
chat"""

# (to the page's own answer, to the kernel's) in milliseconds, for a click that asks the kernel something
CLICK = """async () => {
  const button = document.querySelector(".dsv4-attach");
  const shown = () => new Promise((go) => requestAnimationFrame(() => setTimeout(go)));
  const start = performance.now();
  const answered = new Promise((go) => new MutationObserver((_, seen) => {
    if (!document.querySelector(".dsv4-name")) return;
    seen.disconnect();
    go(performance.now() - start);
  }).observe(document.querySelector(".dsv4-tray"), { subtree: true, childList: true }));
  button.click();
  await shown();
  const page = performance.now() - start;
  const kernel = await answered;
  button.click();
  return [page, kernel];
}"""

STOP = """async () => {
  const chat = document.querySelector(".dsv4-chat");
  const start = performance.now();
  document.querySelector(".dsv4-send.is-stop").click();
  while (chat.dataset.phase !== "idle") await new Promise((go) => requestAnimationFrame(go));
  return performance.now() - start;
}"""

KERNEL = "window.jupyterapp.shell.currentWidget.sessionContext.session.kernel"


@pytest.fixture
def open_chat(lab: Any, quiet: None, request: pytest.FixtureRequest) -> Callable[..., Any]:
    """Opens a notebook with a chat in its first cell; its model gives the replies of a script in order."""

    def open_(*script: str) -> Any:
        lab.open(lab.write(request.node.name, CHAT.format(script=script), "chat.send('Count.')"))
        lab.run_cell(0)
        lab.page.locator(".dsv4-panel").first.wait_for()
        return lab.page

    return open_


def streaming(page: Any) -> None:
    page.wait_for_function("document.querySelector('.dsv4-turn:last-child .dsv4-answer')?.textContent.includes(' 9 ')")


def answer(page: Any) -> str:
    return str(page.locator(".dsv4-answer").last.text_content())


def saved(lab: Any) -> Any:
    path = lab.page.evaluate("window.jupyterapp.shell.currentWidget.context.path")
    return nbformat.read(Path(lab.root) / path, as_version=4).cells[0].outputs


def test_a_click_is_answered_at_once_while_a_reply_streams(open_chat: Callable[..., Any], lab: Any) -> None:
    page = open_chat(COUNT)
    lab.ask("Count.", nth=-1)
    streaming(page)
    times = [page.evaluate(CLICK) for _ in range(9)]
    assert page.locator(".dsv4-chat").get_attribute("data-phase") == "answering", "it did not stream all the time"
    assert max(page_ms for page_ms, _ in times) < 100, times
    assert statistics.median(kernel_ms for _, kernel_ms in times) < 100, times


def test_stop_ends_a_decode_within_300_ms_of_the_click(open_chat: Callable[..., Any], lab: Any) -> None:
    page = open_chat(COUNT)
    times = []
    for i in range(3):
        lab.ask("Count.", nth=-1)
        streaming(page)
        times.append(page.evaluate(STOP))
        lab.idle(i + 1, nth=-1)
    assert max(times) < 300, times
    assert page.locator(".dsv4-mark").get_by_text("Stopped", exact=True).count() == 3


def test_c19_an_interrupt_of_the_kernel_is_for_cells_and_the_reply_goes_on(
    open_chat: Callable[..., Any], lab: Any
) -> None:
    page = open_chat(COUNT, PARIS)
    lab.ask("Count.", nth=-1)
    streaming(page)
    page.evaluate(f"{KERNEL}.interrupt()")
    lab.idle(1, nth=-1)
    assert answer(page) == COUNT
    lab.ask("Capital?", nth=-1)
    lab.idle(2, nth=-1)
    assert answer(page) == PARIS


def test_c19_an_interrupt_of_a_blocking_cell_stops_the_reply_and_the_page_says_so(
    open_chat: Callable[..., Any], lab: Any
) -> None:
    page = open_chat(COUNT, PARIS)
    lab.start_cell(1)
    streaming(page)
    page.evaluate(f"{KERNEL}.interrupt()")
    page.locator(".dsv4-mark").get_by_text("Stopped", exact=True).wait_for()
    page.locator(".jp-OutputArea").get_by_text("KeyboardInterrupt").first.wait_for()
    lab.idle(1, nth=-1)
    assert answer(page).startswith("1 2 3 ") and str(N) not in answer(page)
    lab.ask("Capital?", nth=-1)
    lab.idle(2, nth=-1)
    assert answer(page) == PARIS


def test_c20_a_restart_in_the_middle_is_told_and_leaves_no_dead_button(open_chat: Callable[..., Any], lab: Any) -> None:
    page = open_chat(PARIS, COUNT)
    lab.ask("Capital?", nth=-1)
    lab.idle(1, nth=-1)
    lab.ask("Count.", nth=-1)
    streaming(page)
    lab.restart()
    page.get_by_role("alert").filter(has_text="The kernel was restarted or is gone.").wait_for()
    page.locator(".dsv4-mark").get_by_text("Not finished: the kernel is gone").wait_for()
    assert page.locator(".dsv4-answer").first.text_content() == PARIS
    assert answer(page).startswith("1 2 3 ")
    assert page.get_by_role("button", name="Stop", exact=True).count() == 0
    enabled = page.evaluate(
        """() => [...document.querySelectorAll(".dsv4-chat :is(button, input)")].filter((node) => node.offsetParent
          && !node.disabled && node.getAttribute("aria-disabled") !== "true").map((node) => node.textContent)"""
    )
    assert set(enabled) == {"Copy"}, "what is left works without a kernel"
    lab.ask("Are you there?", nth=-1)
    assert page.get_by_role("textbox", name="Message", exact=True).input_value() == "Are you there?"
    assert page.locator(".dsv4-turn").count() == 2
    page.wait_for_function(f"{KERNEL}.status === 'idle'")
    lab.run_cell(0)
    page.wait_for_function("document.querySelectorAll('.dsv4-turn').length === 0")
    lab.ask("Capital?", nth=-1)
    lab.idle(1, nth=-1)
    assert answer(page) == PARIS


@pytest.mark.skipif("DSV4NB_APP" in os.environ, reason="Notebook 7 opens it in another window")
def test_j15_a_closed_tab_opens_again_where_the_reply_is(open_chat: Callable[..., Any], lab: Any) -> None:
    page = open_chat(COUNT, PARIS)
    name = page.evaluate("window.jupyterapp.shell.currentWidget.context.path")
    lab.ask("Count.", nth=-1)
    streaming(page)
    lab.command("docmanager:save")
    page.evaluate("window.jupyterapp.shell.currentWidget.close()")
    page.wait_for_function("document.querySelectorAll('.dsv4-panel').length === 0")
    lab.command("docmanager:open", path=name)
    page.locator(".dsv4-panel").first.wait_for()
    lab.idle(1, nth=-1)
    assert answer(page) == COUNT
    lab.ask("Capital?", nth=-1)
    lab.idle(2, nth=-1)
    assert page.locator(".dsv4-answer").all_text_contents() == [COUNT, PARIS]


def test_j15_a_notebook_saved_while_a_reply_runs_says_so_and_the_next_save_has_all(
    open_chat: Callable[..., Any], lab: Any
) -> None:
    page = open_chat(PARIS, COUNT)
    lab.ask("Capital?", nth=-1)
    lab.idle(1, nth=-1)
    lab.ask("Count.", nth=-1)
    streaming(page)
    lab.command("docmanager:save")
    early = saved(lab)[-1].data["text/plain"]
    assert PARIS in early and "You: Count.\n\nModel: \n\n[Not finished when this was saved]" in early
    lab.idle(2, nth=-1)
    lab.command("docmanager:save")
    late = saved(lab)
    assert "Not finished" not in json.dumps(late) and COUNT in late[-1].data["text/plain"]
    assert late[-1].data["text/plain"].count("You: ") == 2
