"""The chat in a real JupyterLab: streamed, stopped, reloaded, seen twice, used by keyboard, in light and dark."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import nbformat
import pytest

pytestmark = pytest.mark.lab

PARIS = "The capital of France is Paris."
COUNT = ", ".join(str(i) for i in range(1, 101)) + "."
SUM = "I add the ones: 7 + 8 = 15, carry 1. I add the tens: 4 + 3 + 1 = 8. So the sum is 85.</think>47 + 38 = 85."

SHOW = """from dsv4nb.testing.fake_model import fake_model
m = fake_model({script!r}, delay_s=0.03, name="toy")
chat = m.chat()
chat"""

TOY = Path(__file__).parents[2] / "dsv4nb/toy/model"

# the function waits for a file, so that the page can be looked at while it runs
TOOLS = """import dsv4nb, time
from pathlib import Path

def get_weather(city: str):
    \"\"\"Look up the weather.

    Args:
        city: The city.
    \"\"\"
    while not Path("go").exists():
        time.sleep(0.02)
    if city == "Rome":
        raise LookupError("no <b>station</b> there")
    return {"temperature": 21, "sky": "sunny"}

chat = dsv4nb.load("toy").chat(tools=[get_weather], temperature=0)
chat"""

PIECES = """() => {
  window.pieces = [];
  new MutationObserver(() => {
    const answers = [...document.querySelectorAll(".dsv4-answer")];
    const text = answers.at(-1)?.textContent ?? "";
    if (text && text !== window.pieces.at(-1)) window.pieces.push(text);
  }).observe(document.querySelector(".dsv4-log"), { subtree: true, childList: true, characterData: true });
}"""


@pytest.fixture
def open_chat(lab: Any, quiet: None, request: pytest.FixtureRequest) -> Callable[..., Any]:
    """Opens a notebook with a chat in its first cell, whose model gives the replies of a script in order."""

    def open_(*script: str) -> Any:
        lab.open(lab.write(request.node.name, SHOW.format(script=script), "answer = 6 * 7", "chat"))
        lab.run_cell(0)
        lab.page.locator(".dsv4-panel").first.wait_for()
        return lab.page

    return open_


def stopped(page: Any) -> Any:
    return page.locator(".dsv4-mark").get_by_text("Stopped", exact=True)


def answer(page: Any, nth: int = 0) -> str:
    return str(page.locator(".dsv4-panel").nth(nth).locator(".dsv4-answer").last.text_content())


def test_an_answer_arrives_in_pieces(open_chat: Callable[..., Any], lab: Any) -> None:
    page = open_chat(COUNT)
    page.evaluate(PIECES)
    lab.ask("Count from 1 to 100.")
    lab.idle(1)
    pieces = page.evaluate("window.pieces")
    assert len(pieces) > 10
    assert all(after.startswith(before) for before, after in pairwise(pieces))
    assert answer(page) == COUNT
    assert page.locator(".dsv4-facts").text_content().startswith("100 tokens · ")
    assert page.get_by_role("status").filter(has_text="Done.").count() == 1


def test_stop_keeps_the_text_and_the_next_message_works(open_chat: Callable[..., Any], lab: Any) -> None:
    page = open_chat(COUNT, PARIS)
    lab.ask("Count from 1 to 100.")
    page.wait_for_function("document.querySelector('.dsv4-answer')?.textContent.includes('9, ')")
    start = time.monotonic()
    page.get_by_role("button", name="Stop", exact=True).click()
    stopped(page).wait_for()
    assert time.monotonic() - start < 1.5
    lab.idle(1)
    kept = answer(page)
    assert "9, " in kept and "100" not in kept
    page.wait_for_timeout(300)
    assert answer(page) == kept
    page.get_by_role("button", name="Send", exact=True).wait_for()
    lab.ask("What is the capital of France?")
    lab.idle(2)
    assert answer(page) == PARIS


def test_stop_works_before_the_first_token(open_chat: Callable[..., Any], lab: Any) -> None:
    page = open_chat(COUNT)
    lab.ask("Count from 1 to 100.")
    page.get_by_role("textbox", name="Message").press("Escape")
    stopped(page).wait_for()
    lab.idle(1)


@pytest.mark.skipif("DSV4NB_DEAF" in os.environ, reason="ipykernel 6 reads no message while a cell runs")
def test_stop_works_while_a_cell_blocks_the_kernel(open_chat: Callable[..., Any], lab: Any) -> None:
    page = open_chat(COUNT)
    lab.ask("Count from 1 to 100.")
    lab.page.evaluate(
        """() => {
          const panel = window.jupyterapp.shell.currentWidget;
          panel.sessionContext.session.kernel.requestExecute({ code: "import time; time.sleep(2)" });
        }"""
    )
    page.wait_for_function("document.querySelector('.dsv4-answer')?.textContent.includes('9, ')")
    page.get_by_role("button", name="Stop", exact=True).click()
    stopped(page).wait_for(timeout=1500)


def test_the_reasoning_is_folded_and_counted(open_chat: Callable[..., Any], lab: Any) -> None:
    page = open_chat(SUM)
    page.get_by_role("switch", name="Thinking").check()
    lab.ask("What is 47 + 38?")
    page.locator(".dsv4-summary").get_by_text("Thinking…").wait_for()
    lab.idle(1)
    summary = page.locator(".dsv4-summary")
    assert summary.text_content().startswith("Thought for ")
    assert not page.locator(".dsv4-reasoning").is_visible()
    summary.focus()
    page.keyboard.press("Enter")
    assert page.locator(".dsv4-reasoning").is_visible()
    assert page.locator(".dsv4-answer").is_visible()


def test_a_reload_in_the_middle_of_an_answer_loses_and_doubles_nothing(open_chat: Callable[..., Any], lab: Any) -> None:
    page = open_chat(COUNT, PARIS)
    name = page.evaluate("window.jupyterapp.shell.currentWidget.context.path")
    lab.ask("Count from 1 to 100.")
    page.wait_for_function("document.querySelector('.dsv4-answer')?.textContent.includes('5, ')")
    lab.command("docmanager:save")
    lab.open(name, reset=False)
    page.locator(".dsv4-panel").first.wait_for(timeout=30_000)
    page.wait_for_function("document.querySelector('.dsv4-answer')?.textContent.length > 20")
    lab.idle(1)
    assert answer(page) == COUNT
    lab.ask("What is the capital of France?")
    lab.idle(2)
    assert answer(page) == PARIS


def test_two_views_show_one_chat(open_chat: Callable[..., Any], lab: Any) -> None:
    page = open_chat(COUNT, PARIS)
    lab.ask("Count from 1 to 100.")
    page.wait_for_function("document.querySelector('.dsv4-answer')?.textContent.includes('5, ')")
    lab.run_cell(2)
    page.locator(".dsv4-panel").nth(1).wait_for()
    page.wait_for_function("document.querySelectorAll('.dsv4-answer').length === 2")
    lab.idle(1)
    whole = COUNT
    assert [answer(page, 0), answer(page, 1)] == [whole, whole]
    lab.ask("What is the capital of France?", nth=1)
    page.wait_for_function("document.querySelectorAll('.dsv4-turn').length === 4")
    lab.idle(2)
    assert [answer(page, 0), answer(page, 1)] == [PARIS] * 2
    page.wait_for_timeout(200)
    assert page.locator(".dsv4-turn").count() == 4, "one question, one turn a view"


def test_the_keyboard_is_enough_and_the_notebook_does_not_listen(open_chat: Callable[..., Any], lab: Any) -> None:
    page = open_chat(PARIS)
    cells = page.locator(".jp-Notebook .jp-Cell").count()
    page.get_by_role("switch", name="Thinking").focus()
    reached = []
    for _ in range(4):
        page.keyboard.press("b")
        page.keyboard.press("Tab")
        reached.append(page.evaluate("document.activeElement.className"))
    assert reached == ["dsv4-example"] * 3 + ["dsv4-input"]
    box = page.get_by_role("textbox", name="Message")
    page.keyboard.type("What is the capital")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("of France?")
    assert box.input_value() == "What is the capital\nof France?"
    page.keyboard.press("Enter")
    lab.idle(1)
    assert page.locator(".dsv4-bubble").text_content() == "What is the capital\nof France?"
    assert page.locator(".jp-Notebook .jp-Cell").count() == cells
    unmarked = page.evaluate(
        """() => [...document.querySelectorAll(".dsv4-chat :is(button, input, textarea, summary, [tabindex])")]
          .filter((node) => node.dataset.lmSuppressShortcuts !== "true").map((node) => node.className)"""
    )
    assert unmarked == []


def test_what_was_typed_is_not_lost_when_a_send_is_refused(open_chat: Callable[..., Any], lab: Any) -> None:
    page = open_chat(PARIS)
    lab.ask("What? " * 5000)
    page.get_by_role("alert").filter(has_text="Not sent").wait_for()
    assert page.get_by_role("textbox", name="Message").input_value() == "What? " * 5000
    assert page.locator(".dsv4-turn").count() == 0
    lab.ask("What is the capital of France?")
    lab.idle(1)
    assert not page.get_by_role("alert").filter(has_text="Not sent").is_visible()


def test_what_was_typed_is_not_lost_when_the_kernel_is_gone(open_chat: Callable[..., Any], lab: Any) -> None:
    page = open_chat(PARIS)
    lab.ask("What is the capital of France?")
    lab.idle(1)
    lab.restart()
    page.wait_for_timeout(500)
    lab.ask("Are you there?")
    page.get_by_role("alert").filter(has_text="run the cell again").wait_for(timeout=8_000)
    assert page.get_by_role("textbox", name="Message").input_value() == "Are you there?"
    assert answer(page) == PARIS


def test_a_new_chat_is_empty(open_chat: Callable[..., Any], lab: Any) -> None:
    page = open_chat(PARIS)
    page.get_by_role("button", name="What is the capital of France?").click()
    lab.idle(1)
    page.get_by_role("button", name="New chat").click()
    lab.idle(0)
    assert page.get_by_role("button", name="What is the capital of France?").is_visible()


def test_the_saved_file_holds_the_conversation_and_the_page_shows_it_once(
    open_chat: Callable[..., Any], lab: Any
) -> None:
    page = open_chat(PARIS)
    lab.ask("What is the capital of France?")
    lab.idle(1)
    assert page.locator(".dsv4-saved").count() == 1 and not page.locator(".dsv4-saved").is_visible()
    lab.command("docmanager:save")
    path = lab.root / page.evaluate("window.jupyterapp.shell.currentWidget.context.path")
    outputs = nbformat.read(path, as_version=4).cells[0].outputs
    text = json.dumps(outputs)
    assert PARIS in text
    assert "You: What is the capital of France?" in outputs[-1].data["text/plain"]


@pytest.mark.skipif(not (TOY / "config.json").exists(), reason="the bundled model is not in dsv4nb/toy/model")
def test_a_tool_is_called_in_the_open_and_a_rewind_is_seen(lab: Any, quiet: None, shots: Path) -> None:
    lab.open(lab.write("tools", TOOLS, "chat.rewind(1)"))
    lab.run_cell(0)
    page = lab.page
    page.locator(".dsv4-panel").first.wait_for()
    lab.ask("What is the weather in Paris?")
    card = page.get_by_role("group", name="Tool call get_weather")
    card.get_by_text("running…").wait_for()
    page.get_by_role("status").filter(has_text="Calling a tool…").wait_for()
    assert card.locator(".dsv4-code").first.text_content() == '{"city": "Paris"}'
    (lab.root / "go").touch()
    lab.idle(1)
    assert card.locator(".dsv4-card-status").text_content() == "answered"
    result = card.locator(".dsv4-summary").last
    assert result.text_content() == 'Result{"temperature": 21, "sky": "sunny"}'
    assert not card.locator(".dsv4-code").last.is_visible()
    result.focus()
    page.keyboard.press("Enter")
    assert card.locator(".dsv4-code").last.is_visible()
    assert "21" in answer(page)
    assert " tok/s · speculated, τ " in page.locator(".dsv4-facts").text_content()
    lab.ask("What is the weather in Rome?")
    lab.idle(2)
    failed = page.locator(".dsv4-card").last
    assert failed.locator(".dsv4-card-status").text_content() == "failed: LookupError: no <b>station</b> there"
    assert failed.locator("b").count() == 0
    assert "DSML" not in page.locator(".dsv4-panel").text_content()
    failed.scroll_into_view_if_needed()
    for dark in (False, True):
        lab.theme(dark=dark)
        page.screenshot(path=shots / f"tools-{'dark' if dark else 'light'}.png")
    lab.theme(dark=False)
    lab.run_cell(1)
    lab.idle(1)
    assert page.locator(".dsv4-bubble").text_content() == "What is the weather in Paris?"
    lab.command("docmanager:save")
    outputs = nbformat.read(lab.root / "tools.ipynb", as_version=4).cells[0].outputs
    assert '[Call] get_weather({"city": "Paris"}) → {"temperature": 21' in outputs[-1].data["text/plain"]
    assert "get_weather</strong> · answered" in outputs[-1].data["text/html"]
    assert "DSML" not in json.dumps(outputs)


def test_light_dark_and_narrow(open_chat: Callable[..., Any], lab: Any, shots: Path) -> None:
    page = open_chat(SUM)
    page.get_by_role("switch", name="Thinking").check()
    lab.ask("What is 47 + 38?")
    lab.idle(1)
    seen = {}
    for dark in (False, True):
        lab.theme(dark=dark)
        seen[dark] = page.evaluate(
            """() => {
              const style = (name) => getComputedStyle(document.querySelector(name));
              return [style(".dsv4-answer").color, style(".dsv4-panel").backgroundColor];
            }"""
        )
        page.screenshot(path=shots / f"{'dark' if dark else 'light'}.png")
    assert seen[True] != seen[False]
    lab.theme(dark=False)
    lab.command("application:toggle-left-area")
    page.set_viewport_size({"width": 480, "height": 800})
    page.wait_for_timeout(500)
    page.screenshot(path=shots / "narrow.png")
    overflow = page.evaluate(
        """() => [...document.querySelectorAll(".dsv4-panel *")].filter((node) => {
          const panel = document.querySelector(".dsv4-panel").getBoundingClientRect();
          const box = node.getBoundingClientRect();
          return box.width > 1 && box.right > panel.right + 1;
        }).map((node) => node.className)"""
    )
    page.set_viewport_size({"width": 1200, "height": 860})
    lab.command("application:toggle-left-area")
    assert overflow == []
