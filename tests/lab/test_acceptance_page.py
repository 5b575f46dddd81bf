"""The acceptance panel in a real JupyterLab, on the bundled model: a live reply, a draft under the pointer, another
tau, a round to go back to, a reload, the keyboard, both themes, a narrow page, and what a fast stream costs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import nbformat
import pytest

RECORDING = Path(__file__).parents[1] / "data/recording.json"
TOY = Path(__file__).parents[2] / "dsv4nb/toy/model"

pytestmark = [
    pytest.mark.lab,
    pytest.mark.skipif(not (TOY / "config.json").exists(), reason="the bundled model is not in dsv4nb/toy/model"),
]

LOAD = """import dsv4nb
from dsv4nb.rounds import Costs
from dsv4nb.widgets.acceptance import AcceptancePanel
m = dsv4nb.load("toy")
told = m.measure_spec()
chat = m.chat(temperature=1.2, seed=7)
panel = AcceptancePanel(chat, costs=Costs(draft=told.draft_ms, verify=told.verify_ms), title="Speculation of the toy")
panel"""
ASK = 'ticket = chat.submit("Tell me a story about a fox.", max_new=150)'
SLOW = """from dsv4nb.testing.fake_model import fake_model
from dsv4nb.widgets.acceptance import AcceptancePanel
m = fake_model(" ".join(f"w{i}" for i in range(1000)), delay_s=0.05, drafts=lambda before: [1] * 5)
chat = m.chat(temperature=0)
AcceptancePanel(chat)"""
FLOOD = """import threading, time
from dataclasses import replace
from dsv4nb.rounds import Rounds
kinds = chat.turns[0].rounds[:-1]

class Flood:
    state, events, finished = "running", [], False
    def poll(self, start):
        is_over = self.finished
        return self.events[start:], is_over

def play():
    start = time.monotonic()
    for i in range(500):
        flood.events.append(replace(kinds[i % len(kinds)], round=i, stop=None))
        time.sleep(max(0, start + i / 60 - time.monotonic()))
    flood.finished = True
    pump.call(lambda: spent.append(time.process_time()))  # the kernel's own news is told by then

flood, spent = Flood(), []
fast = AcceptancePanel(flood, title="fast")
pump = fast._pump
fast"""
RECORDED = f"""import math, dsv4nb
from dsv4nb.testing import replay_model
m = replay_model({str(RECORDING)!r}, speed=math.inf)
g = m.generate("Tell me a story about a dragon and a clock.")
from dataclasses import replace
ms = {{"draft": 5.0, "verify": 9.0, "commit": 0.1, "total": 14.1}}  # what it took just now is in no picture
dsv4nb.AcceptancePanel(dsv4nb.Rounds(replace(one, ms=ms) for one in g.rounds))"""
GO = "pump.call(lambda: spent.append(time.process_time())); threading.Thread(target=play, daemon=True).start()"
SHARE = "print('share', (spent[1] - spent[0]) / (500 / 60))"


@pytest.fixture
def opened(lab: Any, quiet: None, request: pytest.FixtureRequest) -> Callable[..., Any]:
    """Opens a notebook whose first cell shows the panel of a chat and whose other cells are given."""

    def open_(*cells: str, first: str = LOAD) -> Any:
        lab.open(lab.write(request.node.name, first, *cells))
        lab.run_cell(0)
        lab.page.locator(".dsv4-acceptance .dsv4-panel").first.wait_for(timeout=120_000)
        lab.page.get_by_text("No reply yet").wait_for()
        return lab.page

    return open_


def ended(page: Any, at_least: int = 1, nth: int = 0) -> int:
    """Wait until the reply is over; return its rounds."""
    page.wait_for_function(
        """([n, nth]) => {
          const panel = document.querySelectorAll(".dsv4-acceptance")[nth];
          return panel.dataset.live === "false" && Number(panel.dataset.rounds) >= n;
        }""",
        arg=[at_least, nth],
        timeout=60_000,
    )
    return rounds(page, nth)


def rounds(page: Any, nth: int = 0) -> int:
    return int(page.locator(".dsv4-acceptance").nth(nth).get_attribute("data-rounds"))


def point_at(page: Any, column: int, slot: int) -> None:
    """Move the pointer to a slot; the strip is scrolled to its beginning."""
    page.locator(".dsv4-scroller").scroll_into_view_if_needed()
    page.evaluate("document.querySelector('.dsv4-scroller').scrollLeft = 0")
    page.wait_for_timeout(150)
    box = page.locator(".dsv4-scroller").bounding_box()
    page.mouse.move(box["x"] + column * 26 + 13, box["y"] + 4 + slot * 19 + 7)


def test_a_persons_path(opened: Callable[..., Any], lab: Any, shots: Path) -> None:
    page = opened(ASK, "len(chat.turns), len(chat.turns[-1].rounds), len(chat.branches)")
    page.evaluate(
        """() => {
          const panel = document.querySelector(".dsv4-acceptance");
          window.counts = [];
          const count = () => window.counts.push(Number(panel.dataset.rounds));
          new MutationObserver(count).observe(panel, { attributes: true });
        }"""
    )
    lab.run_cell(1)
    n = ended(page, 10)
    seen = [count for count in page.evaluate("window.counts") if count]
    assert len(set(seen)) > 3 and seen == sorted(seen), "the rounds came as they were played"
    assert page.locator(".dsv4-totals dt").all_text_contents()[:4] == [
        *("draft acceptance rate", "mean acceptance length", "verify rate", "tokens/round"),
    ]

    point_at(page, 1, 0)
    tip = page.locator(".dsv4-tip")
    tip.wait_for()
    told = tip.inner_text()
    assert "Round 1, draft 1 of 5: " in told
    for name in ("drafted", "chosen", "p (model)", "q (drafter)", "margin", "confidence", "survival"):
        assert name in told

    slider = page.get_by_role("slider", name="tau")
    slider.wait_for()
    page.locator(".dsv4-charts .dsv4-facts").get_by_text("rows verified").wait_for()
    before = page.locator(".dsv4-charts .dsv4-facts").inner_text()
    assert "ms/token" in before
    slider.focus()
    for _ in range(8):
        page.keyboard.press("ArrowRight")
    page.wait_for_timeout(200)
    assert page.locator(".dsv4-tau-out").inner_text() == "0.90"
    assert page.locator(".dsv4-charts .dsv4-facts").inner_text() != before
    assert page.get_by_text("Changes the speed, never the text.").is_visible()

    point_at(page, 3, 0)
    page.mouse.down()
    page.mouse.up()
    page.locator(".dsv4-round-title").get_by_text("Round 3").wait_for()
    assert "Once upon a time" in page.locator(".dsv4-text").inner_text()
    page.get_by_role("button", name="Rewind the chat here").click()
    page.wait_for_function("document.querySelector('.dsv4-acceptance').dataset.rounds === '3'")
    page.locator(".dsv4-round").wait_for(state="hidden", timeout=5000)
    lab.run_cell(2)
    page.locator(".jp-OutputArea-output pre").get_by_text("(1, 3, 2)").wait_for()

    lab.command("docmanager:save")
    lab.open(page.evaluate("window.jupyterapp.shell.currentWidget.context.path"), reset=False)
    page.wait_for_function("document.querySelector('.dsv4-acceptance')?.dataset.rounds === '3'", timeout=30_000)
    assert n > 3
    assert page.locator(".dsv4-rounds-saved").count() == 1 and not page.locator(".dsv4-rounds-saved").is_visible()
    path = lab.root / page.evaluate("window.jupyterapp.shell.currentWidget.context.path")
    outputs = nbformat.read(path, as_version=4).cells[0].outputs
    assert "<svg" in outputs[-1].data["text/html"] and "draft acceptance rate" in outputs[-1].data["text/plain"]

    path.with_name("another.ipynb").write_bytes(path.read_bytes())  # which another kernel opens: the panel is gone
    lab.open("another.ipynb")
    saved = page.locator(".dsv4-rounds-saved")
    saved.get_by_text("mean acceptance length").wait_for()
    assert saved.locator("svg[role=img]").is_visible()
    page.screenshot(path=shots / "acceptance-saved.png")
    lab.problems.clear()  # the widget manager's, of a model that is not there


def test_rewind_while_the_reply_runs_is_refused_in_the_chats_words(opened: Callable[..., Any], lab: Any) -> None:
    page = opened('ticket = chat.submit("hi")', "chat.stop()", first=SLOW)
    lab.run_cell(1)
    page.wait_for_function("Number(document.querySelector('.dsv4-acceptance').dataset.rounds) > 3")
    page.locator(".dsv4-scroller").click(position={"x": 30, "y": 20})
    page.get_by_role("button", name="Rewind the chat here").click()
    page.get_by_role("alert").get_by_text("the chat is busy; wait for the turn to end").wait_for()
    lab.run_cell(2)
    ended(page, 4)


def test_the_keyboard_is_enough_and_the_notebook_does_not_listen(opened: Callable[..., Any], lab: Any) -> None:
    page = opened(ASK)
    lab.run_cell(1)
    n = ended(page, 10)
    cells = page.locator(".jp-Notebook .jp-Cell").count()
    page.get_by_role("combobox", name="Reply").focus()
    page.keyboard.press("Tab")
    page.keyboard.press("b")
    heard = page.locator(".dsv4-acceptance [role=status]")
    page.wait_for_function("document.querySelector('.dsv4-acceptance [role=status]').textContent.startsWith('Round')")
    for key in ("Home", "ArrowRight", "ArrowUp", "ArrowDown", "ArrowDown"):
        page.keyboard.press(key)
    assert heard.inner_text().startswith("Round 1, draft 2 of 5: ")
    assert page.locator(".dsv4-tip").is_visible()
    page.keyboard.press("End")
    assert heard.inner_text().startswith(f"Round {n - 1}")
    page.keyboard.press("Home")
    page.keyboard.press("Enter")
    page.wait_for_function("document.activeElement.className === 'dsv4-round-title'")
    assert page.locator(".dsv4-round-title").inner_text() == "Round 0"
    page.keyboard.press("Escape")
    page.wait_for_function("document.activeElement.className === 'dsv4-scroller'")
    page.locator(".dsv4-round").wait_for(state="hidden", timeout=5000)
    assert page.locator(".jp-Notebook .jp-Cell").count() == cells
    unmarked = page.evaluate(
        """() => [...document.querySelectorAll(".dsv4-acceptance :is(button, input, select, summary, [tabindex='0'])")]
          .filter((node) => node.dataset.lmSuppressShortcuts !== "true").map((node) => node.className)"""
    )
    assert unmarked == []


def test_light_dark_narrow_and_large(opened: Callable[..., Any], lab: Any, shots: Path) -> None:
    page = opened(ASK)
    lab.run_cell(1)
    ended(page, 10)
    page.set_viewport_size({"width": 1200, "height": 1900})
    point_at(page, 5, 0)
    page.mouse.down()
    page.mouse.up()
    seen = {}
    for dark in (False, True):
        lab.theme(dark=dark)
        page.wait_for_timeout(900)
        point_at(page, 12, 1)
        page.locator(".dsv4-tip").wait_for()
        page.screenshot(path=shots / f"acceptance-{'dark' if dark else 'light'}.png")
        seen[dark] = page.evaluate(
            """() => {
              const canvas = document.querySelector(".dsv4-whole canvas");
              const all = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
              const colours = new Set();
              for (let i = 0; i < all.length; i += 4) if (all[i + 3] === 255) colours.add(all.slice(i, i + 3).join());
              return [getComputedStyle(document.querySelector(".dsv4-acceptance .dsv4-panel")).backgroundColor,
                colours.has("14,124,112"), colours.has("53,184,166")];
            }"""
        )
    assert seen[False][1:] == [True, False] and seen[True][1:] == [False, True], "the columns follow the theme"
    assert seen[False][0] != seen[True][0]
    lab.theme(dark=False)
    lab.command("application:toggle-left-area")
    for width, name in ((480, "narrow"), (600, "large")):  # 600 is 1200 pixels at 200 %
        page.set_viewport_size({"width": width, "height": 2300})
        page.wait_for_timeout(700)
        page.screenshot(path=shots / f"acceptance-{name}.png")
        overflow = page.evaluate(
            """() => {
              const inside = (node) => node.closest(".dsv4-wide, .dsv4-whole, .dsv4-tip, .dsv4-unseen, .dsv4-table");
              const edge = document.querySelector(".dsv4-acceptance .dsv4-panel").getBoundingClientRect().right;
              return [...document.querySelectorAll(".dsv4-acceptance .dsv4-panel *")]
                .filter((node) => !inside(node) && node.getBoundingClientRect().right > edge + 1)
                .map((node) => node.className);
            }"""
        )
        assert overflow == []
    page.set_viewport_size({"width": 1200, "height": 860})
    lab.command("application:toggle-left-area")


def test_pictures_of_a_recording_and_axe(
    lab: Any, quiet: None, axe: Callable[[str], None], picture: Callable[..., None]
) -> None:
    lab.open(lab.write("recorded", RECORDED))
    lab.size(1400)
    lab.run_cell(0)
    page = lab.page
    page.locator(".dsv4-acceptance .dsv4-totals dt").first.wait_for(timeout=60_000)
    page.get_by_role("slider", name="tau").wait_for()
    page.locator(".dsv4-scroller").focus()
    for key in ("Home", "ArrowRight", "ArrowRight", "ArrowRight", "Enter"):
        page.keyboard.press(key)
    page.locator(".dsv4-round-title").get_by_text("Round 3").wait_for()
    for dark in (False, True):
        lab.theme(dark=dark)
        page.locator(".dsv4-tip").wait_for(state="hidden")
        axe(".dsv4-acceptance")
        picture(page.locator(".dsv4-acceptance .dsv4-panel"), "acceptance")
    lab.theme(dark=False)
    lab.size(1200)


def test_j20_500_rounds_at_60_a_second(opened: Callable[..., Any], lab: Any) -> None:
    """Nothing is dropped; under 5 % of a core in Python, the whole kernel counted, and under 30 % in the page."""
    page = opened(ASK, FLOOD, GO, SHARE)
    lab.run_cell(1)
    ended(page, 10)
    lab.run_cell(2)
    page.locator(".dsv4-acceptance").nth(1).wait_for()
    page.evaluate(
        """() => {
          window.gaps = [];
          let last = performance.now();
          const tick = (now) => { window.gaps.push(now - last); last = now; requestAnimationFrame(tick); };
          requestAnimationFrame(tick);
        }"""
    )
    client = page.context.new_cdp_session(page)
    client.send("Performance.enable")

    def busy() -> tuple[float, float]:
        told = {one["name"]: one["value"] for one in client.send("Performance.getMetrics")["metrics"]}
        return told["Timestamp"], told["TaskDuration"]

    (start, before) = busy()
    lab.run_cell(3)
    page.wait_for_function("Number(document.querySelectorAll('.dsv4-acceptance')[1].dataset.rounds) > 300")
    (stop, after) = busy()
    assert ended(page, 500, nth=1) == 500
    lab.run_cell(4)
    output = page.locator(".jp-OutputArea-output pre").get_by_text("share ")
    output.wait_for()
    share = float(output.inner_text().split()[1])
    page_share = (after - before) / (stop - start)
    gaps = sorted(page.evaluate("window.gaps"))
    frames = f"frames: median {gaps[len(gaps) // 2]:.0f} ms, 99 % within {gaps[int(0.99 * len(gaps))]:.0f} ms"
    print(f"python {share:.3f} of a core, page {page_share:.3f}, {frames}")
    assert share < 0.05
    assert page_share < 0.30
