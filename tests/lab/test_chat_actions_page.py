"""Everything a person does with a chat beside sending and stopping, in a real JupyterLab."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nbformat
import pytest

pytestmark = pytest.mark.lab

PARIS = "The capital of France is Paris."
ROME = "The capital of Italy is Rome."
LATER = "It is older than that."
COUNT = " ".join(str(i) for i in range(1, 1201))  # three seconds at 400 tokens a second

CHAT = """from dsv4nb.testing.fake_model import fake_model
m = fake_model({script!r}, name="toy", **{options!r})
chat = m.chat(seed=7)
notes = "Rome was not built in a day."
table = {{"city": ["Rome", "Oslo"], "rain": [3, 9]}}

def get_weather(city: str) -> str:
    \"\"\"Look up the weather.\"\"\"
    return f"Sunny in {{city}}."

chat"""

TOOLS = '''from dsv4nb.testing.fake_model import fake_model

def get_weather(city: str) -> str:
    """Look up the weather."""
    return f"Sunny in {city}."

def call(*cities):
    calls = "".join(f'<｜DSML｜invoke name="get_weather">\\n<｜DSML｜parameter name="city" string="true">{city}'
                    "</｜DSML｜parameter>\\n</｜DSML｜invoke>\\n" for city in cities)
    return f"\\n\\n<｜DSML｜tool_calls>\\n{calls}</｜DSML｜tool_calls>"

m = fake_model([call("Paris", "Oslo"), "Sunny in both.", call("Rome"), "Never said."], name="toy")
chat = m.chat(tools=[get_weather], approve="ask")
chat'''


@pytest.fixture
def open_chat(lab: Any, quiet: None, request: pytest.FixtureRequest) -> Callable[..., Any]:
    """Opens a notebook with a chat in its first cell; its model gives the replies of a script in order."""

    def open_(*script: str, cells: tuple[str, ...] = (), **options: Any) -> Any:
        return show(lab, request.node.name.split("[")[0], CHAT.format(script=script, options=options), *cells)

    return open_


def show(lab: Any, name: str, *cells: str) -> Any:
    lab.open(lab.write(name, *cells))
    lab.run_cell(0)
    lab.page.locator(".dsv4-panel").first.wait_for()
    return lab.page


def python(lab: Any, code: str) -> str:
    """Run code in the kernel and return what it prints."""
    return str(
        lab.page.evaluate(
            """async (code) => {
              const kernel = window.jupyterapp.shell.currentWidget.sessionContext.session.kernel;
              let text = "";
              const future = kernel.requestExecute({ code, silent: false, store_history: false });
              future.onIOPub = (message) => { text += message.content.text ?? message.content.evalue ?? ""; };
              await future.done;
              return text;
            }""",
            code,
        )
    )


def said(page: Any) -> list[str]:
    return [str(text) for text in page.locator(".dsv4-answer").all_text_contents()]


def tool(page: Any, turn: int, name: str) -> Any:
    article = page.locator(".dsv4-turn").nth(turn)
    article.hover()
    return article.get_by_role("button", name=name, exact=True)


def test_a_person_branches_a_conversation_and_goes_back(open_chat: Callable[..., Any], lab: Any) -> None:
    page = open_chat(PARIS, ROME, LATER, "Third.", "Fourth.")
    lab.ask("Which capital?")
    lab.idle(1)
    tool(page, 0, "Regenerate").click()
    page.wait_for_function("document.querySelector('.dsv4-place')?.textContent === '2 / 2'")
    lab.idle(1)
    assert said(page) == [ROME]
    lab.ask("And older?")
    lab.idle(2)
    assert tool(page, 0, "Regenerate").count() == 0, "an earlier turn is edited, not answered again"
    page.get_by_role("button", name="Branch before, this is 2 of 2").click()
    lab.idle(1)
    assert said(page) == [PARIS]
    page.get_by_role("button", name="Branch after, this is 1 of 2").click()
    lab.idle(2)
    assert said(page) == [ROME, LATER], "the branch is where it was left"

    tool(page, 0, "Edit").click()
    box = page.get_by_role("textbox", name="Edit the message")
    assert box.input_value() == "Which capital?"
    box.press("Escape")
    assert page.locator(".dsv4-bubble").first.is_visible()
    tool(page, 0, "Edit").click()
    box.fill("Which")
    box.press("Shift+Enter")
    page.keyboard.type("one?")
    page.keyboard.press("Enter")
    lab.idle(1)
    assert page.locator(".dsv4-bubble").text_content() == "Which\none?"
    assert (said(page), page.locator(".dsv4-place").text_content()) == (["Third."], "3 / 3")

    page.get_by_role("button", name="Branch before, this is 3 of 3").click()
    lab.idle(2)
    tool(page, 0, "Rewind").click()
    lab.idle(1)
    notice = page.get_by_role("status").filter(has_text="Went back.")
    notice.get_by_role("button", name="Undo").click()
    lab.idle(2)
    assert said(page) == [ROME, LATER]

    tool(page, 0, "Fork").click()
    page.get_by_role("status").filter(has_text="Show it in a cell: chat.forks[0]").wait_for()
    assert python(lab, "print([t.text for t in chat.forks[0].turns], len(chat.turns))") == f"{[ROME]} 2\n"


def test_calls_wait_for_a_person_and_both_views_agree(lab: Any, quiet: None) -> None:
    page = show(lab, "waits", TOOLS, "chat")
    lab.run_cell(1)
    page.locator(".dsv4-panel").nth(1).wait_for()
    box = page.get_by_role("textbox", name="Message", exact=True).first
    box.fill("Weather?")
    box.press("Enter")
    page.get_by_role("status").filter(has_text="A call waits for your approval.").first.wait_for()
    view, other = page.locator(".dsv4-panel").nth(0), page.locator(".dsv4-panel").nth(1)
    assert view.get_by_role("button", name="Approve", exact=True).count() == 2
    assert other.get_by_role("button", name="Approve", exact=True).count() == 2
    view.get_by_role("button", name="Edit arguments").nth(1).click()
    arguments = view.get_by_role("textbox", name="Arguments as JSON")
    assert arguments.input_value() == '{"city": "Oslo"}'
    arguments.fill('{"city": ')
    arguments.press("Enter")
    view.get_by_role("alert").filter(has_text="This is no JSON").wait_for()
    arguments.fill('["Bergen"]')
    arguments.press("Enter")
    view.get_by_role("alert").filter(has_text="must be a JSON object").wait_for()
    arguments.fill('{"city": "Bergen"}')
    arguments.press("Enter")
    page.wait_for_function("document.querySelectorAll('.dsv4-card[data-state=waiting]').length === 2")
    other.get_by_role("button", name="Deny", exact=True).click()  # the first call, which is now the only one that waits
    page.wait_for_function("document.querySelectorAll('.dsv4-answer:not([hidden])').length === 2")
    page.wait_for_function(
        """told => told === [...document.querySelectorAll(".dsv4-card-status")].map((it) => it.textContent).join()""",
        arg=",".join(["not run: the user declined this call", "answered"] * 2),
    )
    assert python(lab, "print([m['content'] for m in chat.messages if m['role'] == 'tool'])").strip() == str(
        ["Not run: the user declined this call.", "Sunny in Bergen."]
    )
    box.fill("And Rome?")
    box.press("Enter")
    view.get_by_role("button", name="Approve", exact=True).wait_for()
    box.press("Escape")
    page.wait_for_function("document.querySelectorAll('.dsv4-mark:not([hidden])').length === 2")
    assert page.locator(".dsv4-card-status").nth(2).text_content() == "not run: the user stopped here"
    assert view.get_by_role("button", name="Approve", exact=True).count() == 0


def test_variables_and_functions_are_brought_along(open_chat: Callable[..., Any], lab: Any) -> None:
    page = open_chat(PARIS, ROME)
    page.get_by_role("button", name="Attach").click()
    names = page.locator(".dsv4-name")
    names.first.wait_for()
    assert names.all_text_contents() == [
        "notesstr, 28 characters",
        "tabledict, 2 keys",
        "get_weather()tool · function(city: str) -> str",
    ]
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    chip = page.locator(".dsv4-chip")
    chip.filter(has_text="table").wait_for()
    assert " tokens" in chip.text_content()
    for name in ("notes", "get_weather"):
        page.get_by_role("button", name="Attach").click()
        names.filter(has_text=name).click()
        chip.filter(has_text=name).wait_for()
    page.get_by_role("button", name="Remove notes").click()
    page.wait_for_function("document.querySelectorAll('.dsv4-chip').length === 2")
    words = page.get_by_role("meter").get_attribute("aria-valuetext")
    assert " of 4,096 positions used; a reply can have " in words
    lab.ask("Where does it rain?")
    lab.idle(1)
    sent = '`table` (dict, 2 keys):\n```json\n{"city": ["Rome", "Oslo"], "rain": [3, 9]}\n```\n\nWhere does it rain?'
    assert page.locator(".dsv4-bubble").text_content() == sent
    assert python(lab, "print(chat.messages[0]['content'])").strip() == sent
    assert [text.startswith("get_weather()") for text in chip.all_text_contents()] == [True], "a tool stays"
    assert "get_weather" in python(lab, "print(chat.turns[0].options.tools)")


def test_facts_timing_exports_and_code(open_chat: Callable[..., Any], lab: Any) -> None:
    page = open_chat(PARIS, ROME, cells=("",))
    lab.ask("Which capital?")
    lab.idle(1)
    footer = page.locator(".dsv4-facts").text_content()
    assert "6 tokens · " in footer and " · sampled, seed 7 · first token " in footer
    tool(page, 0, "Timing").click()
    page.locator(".dsv4-waterfall").wait_for()
    rows = page.locator(".dsv4-waterfall tbody th").all_text_contents()
    assert [row.split(" ")[0] for row in rows] == ["Prepare", "Queue", "Prefill", "First", "Decode"]
    tool(page, 0, "Timing").click()
    assert page.locator(".dsv4-waterfall").count() == 0
    page.get_by_role("button", name="Export").click()
    found = {}
    for name in ("Notebook cells", "JSONL", "Markdown"):
        with page.expect_download() as download:
            page.get_by_role("button", name=name).click()
        found[download.value.suggested_filename] = Path(download.value.path()).read_text("utf-8")
    nbformat.validate(nbformat.reads(found["chat.ipynb"], as_version=4))
    assert json.loads(found["chat.jsonl"])["messages"][-1]["content"] == PARIS
    assert found["chat.md"] == f"# Chat with toy\n\n## You\n\nWhich capital?\n\n## Model\n\n{PARIS}\n"
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    tool(page, 0, "Code").click()
    page.get_by_role("status").filter(has_text="Copied: Python").wait_for()
    code = page.evaluate("navigator.clipboard.readText()")
    assert code == "chat = m.chat(\n    seed=7,\n)\nchat.send('Which capital?', seed=7)\n" or "seed=7" in code
    tool(page, 0, "Copy").click()
    page.get_by_role("button", name="Copied").wait_for()
    assert page.evaluate("navigator.clipboard.readText()") == PARIS


def test_the_keyboard_reaches_everything(open_chat: Callable[..., Any], lab: Any) -> None:
    page = open_chat(PARIS, ROME, LATER)
    lab.ask("Which capital?")
    lab.idle(1)
    lab.ask("And Italy's?")
    lab.idle(2)
    page.get_by_role("button", name="New chat").focus()
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "dsv4-log"
    reached = []
    for _ in range(2):
        page.keyboard.press("Tab")
        reached.append(page.evaluate("document.activeElement.textContent"))
        page.keyboard.press("End")
        reached.append(page.evaluate("document.activeElement.textContent"))
        page.wait_for_function("getComputedStyle(document.activeElement.parentElement).opacity === '1'")
        page.keyboard.press("Home")
    assert reached == ["Copy", "Timing"] * 2, "one stop a turn, and arrows inside"
    for _ in range(2):
        page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    page.wait_for_function("document.querySelector('.dsv4-turn:last-child .dsv4-place')?.textContent === '2 / 2'")
    lab.idle(2)
    assert said(page) == [PARIS, LATER]
    assert page.evaluate("document.activeElement.className") == "dsv4-input", "Escape would stop it from there"
    page.keyboard.press("Tab")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "dsv4-meter", "Send is no stop while nothing is written"
    assert page.locator(".dsv4-words").is_visible() and not page.locator(".dsv4-keys").is_visible()
    unmarked = page.evaluate(
        """() => [...document.querySelectorAll(".dsv4-chat :is(button, input, textarea, summary, [tabindex])")]
          .filter((node) => node.dataset.lmSuppressShortcuts !== "true").map((node) => node.className)"""
    )
    assert unmarked == []


OVERFLOW = """() => [...document.querySelectorAll(".dsv4-panel *")].filter((node) => {
  const panel = document.querySelector(".dsv4-panel").getBoundingClientRect();
  const box = node.getBoundingClientRect();
  return box.width > 1 && box.right > panel.right + 1 && !node.closest(".dsv4-unseen");
}).map((node) => node.className)"""


def test_it_looks_right_in_light_and_dark_and_narrow(
    lab: Any, quiet: None, axe: Callable[[str], None], picture: Callable[..., None], shots: Path
) -> None:
    page = show(lab, "looks", TOOLS)
    box = page.get_by_role("textbox", name="Message", exact=True)
    box.fill("Weather?")
    box.press("Enter")
    for n in (2, 1):
        page.wait_for_function("n => document.querySelectorAll('[data-state=waiting]').length === n", arg=n)
        page.get_by_role("button", name="Approve", exact=True).first.click()
    lab.idle(1)
    python(lab, "notes = 'Rome was not built in a day.'; chat.attach('notes')")
    box.fill("And Rome?")
    box.press("Enter")
    page.get_by_role("button", name="Edit arguments").click()
    page.get_by_role("textbox", name="Arguments as JSON").fill("{")
    page.get_by_role("button", name="Run with these").click()
    python(lab, "chat.attach({'rain': [3, 9]}, name='rain')")
    page.locator(".dsv4-chip").wait_for()
    page.get_by_role("button", name="Attach").click()
    page.locator(".dsv4-name").first.wait_for()
    page.get_by_role("button", name="Export").click()
    page.add_style_tag(content=".dsv4-log { max-height: none !important; }")
    # whether a turn that waits has told its pace depends on when its first frame was painted
    page.add_style_tag(content=".dsv4-turn:last-child .dsv4-facts { display: none; }")
    for dark in (False, True):
        lab.theme(dark=dark)
        page.locator(".dsv4-turn").first.hover()
        page.screenshot(path=shots / f"actions-{'dark' if dark else 'light'}.png")
        picture(page.locator(".dsv4-panel"), "chat-actions", mask=[page.locator(".dsv4-facts")])
        axe(".dsv4-chat")
    lab.theme(dark=False)
    lab.command("application:toggle-left-area")
    try:
        for width in (600, 480):
            lab.size(width)
            page.get_by_role("meter").hover()
            assert page.locator(".dsv4-words").is_visible()
            page.screenshot(path=shots / f"actions-{width}.png")
            assert page.evaluate(OVERFLOW) == []
    finally:
        lab.size(1200)
        lab.command("application:toggle-left-area")
    page.get_by_role("textbox", name="Arguments as JSON").press("Escape")
    page.get_by_role("button", name="Deny", exact=True).click()
    lab.idle(2)
    page.get_by_role("button", name=re.compile("^Timing")).last.click()
    axe(".dsv4-chat")
