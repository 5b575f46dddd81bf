"""The tour as a newcomer sees it: every cell runs, and the chat at its end answers and stops."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
TOY = ROOT / "dsv4nb/toy/model"

pytestmark = [
    pytest.mark.lab,
    pytest.mark.skipif(not (TOY / "config.json").exists(), reason="the bundled model is not in dsv4nb/toy/model"),
    pytest.mark.skipif(find_spec("dsv4nb.model") is None, reason="there is no dsv4nb.model"),
]

PIECES = """() => {
  window.pieces = [];
  new MutationObserver(() => {
    const text = [...document.querySelectorAll(".dsv4-answer")].at(-1)?.textContent ?? "";
    if (text && text !== window.pieces.at(-1)) window.pieces.push(text);
  }).observe(document.querySelector(".dsv4-log"), { subtree: true, childList: true, characterData: true });
}"""


def test_the_tour_runs_and_its_chat_answers_and_stops(lab: Any) -> None:
    shutil.copy(ROOT / "notebooks/01_tour.ipynb", lab.root)
    lab.open("01_tour.ipynb")
    lab.run_all()
    page = lab.page
    page.locator(".dsv4-panel").wait_for(timeout=180_000)
    assert page.locator('.jp-RenderedText[data-mime-type="application/vnd.jupyter.stderr"]').count() == 0
    turns = page.locator(".dsv4-turn").count()
    page.evaluate(PIECES)

    box = page.get_by_role("textbox", name="Message")
    box.fill("What is the capital of France?")
    box.press("Enter")
    page.wait_for_function(
        """n => document.querySelectorAll(".dsv4-turn").length === n
          && document.querySelector(".dsv4-chat").dataset.phase === "idle"
          && document.querySelector(".dsv4-chat").dataset.status === "idle" """,
        arg=turns + 1,
        timeout=60_000,
    )
    assert "Paris" in page.locator(".dsv4-answer").last.text_content()
    pieces = [piece for piece in page.evaluate("window.pieces") if len(piece) > 0]
    assert len(pieces) > 1, "the answer came in one piece"

    box.fill("Count from 1 to 100.")
    box.press("Enter")
    page.wait_for_function(
        "n => document.querySelectorAll('.dsv4-answer').length === n"
        " && [...document.querySelectorAll('.dsv4-answer')].at(-1).textContent.includes('9')",
        arg=turns + 2,
        timeout=60_000,
    )
    start = time.monotonic()
    page.get_by_role("button", name="Stop", exact=True).click()
    page.locator(".dsv4-mark").get_by_text("Stopped", exact=True).wait_for(timeout=5_000)
    assert time.monotonic() - start < 2
    assert "50." not in page.locator(".dsv4-answer").last.text_content()
    assert lab.problems == [] and lab.strangers == []


CHAT = '''import dsv4nb

def get_weather(city: str) -> dict:
    """Get the current weather in a city."""
    return {"city": city, "degrees": 21, "sky": "sunny"}

m = dsv4nb.load("toy", progress=False)
chat = m.chat(tools=[get_weather], temperature=0)
chat'''


def test_the_chat_of_the_readme(lab: Any, axe: Callable[[str], None], picture: Callable[..., None]) -> None:
    """What a reply took changes from run to run; it is a small part of the picture."""
    lab.open(lab.write("readme", CHAT))
    lab.size(1200, 1100)
    lab.command("notebook:run-cell")
    page = lab.page
    page.locator(".dsv4-chat .dsv4-panel").wait_for(timeout=120_000)
    page.get_by_role("switch", name="Thinking").check()
    for n, text in enumerate(("What is 47 + 38?", "What is the weather in Paris?"), 1):
        box = page.get_by_role("textbox", name="Message", exact=True)
        box.fill(text)
        box.press("Enter")
        page.wait_for_function(
            """n => document.querySelectorAll(".dsv4-turn").length === n
              && document.querySelector(".dsv4-chat").dataset.phase === "idle"
              && document.querySelector(".dsv4-chat").dataset.status === "idle" """,
            arg=n,
            timeout=60_000,
        )
    assert "85" in page.locator(".dsv4-answer").first.text_content()
    assert "sunny" in page.locator(".dsv4-answer").last.text_content()
    page.locator(".dsv4-chat .dsv4-thought summary").first.click()
    for dark in (False, True):
        lab.theme(dark=dark)
        axe(".dsv4-chat")
        picture(page.locator(".dsv4-chat .dsv4-panel"), "chat")
    lab.theme(dark=False)
    lab.size(1200)
