"""The token lens in a real JupyterLab, on a recording of the bundled model: tokens under the pointer and the keyboard,
an alternative that is continued on a fork, probabilities computed later, a live reply, both themes, a narrow page."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import nbformat
import pytest

from dsv4nb.testing.recording import Recording

RECORDING = Path(__file__).parents[1] / "data/recording.json"
_STORY, _SUM, _CAPITAL, _AGAIN, _CONTINUED = Recording.open(RECORDING).replies
N_STORY, N_AGAIN, N_CONTINUED = len(_STORY.ids), len(_AGAIN.ids), len(_CONTINUED.ids)
CONTINUED_AT, ALTERNATIVE = len(_CONTINUED.given) - 1, _CONTINUED.given[-1]

pytestmark = pytest.mark.lab

SHOW = f"""import math
from dsv4nb.testing import replay_model
from dsv4nb.widgets.lens import TokenLens
m = replay_model({str(RECORDING)!r}, speed=math.inf)
chat = m.chat(logprobs=5)
lens = TokenLens(chat)
lens"""
STORY = 'story = chat.send("Tell me a story about a dragon and a clock.")'
AGAIN = "chat.regenerate()"
BARE = 'bare = m.chat(); bare.send("Tell me a story about a dragon and a clock."); TokenLens(bare)'
SLOW = f"""from dsv4nb.testing import replay_model
from dsv4nb.widgets.lens import TokenLens
m = replay_model({str(RECORDING)!r}, rate=12)
chat = m.chat(logprobs=5)
TokenLens(chat)"""
ASK = 'ticket = chat.submit("Tell me a story about a dragon and a clock.")'
LONG = """from dsv4nb.testing.fake_model import fake_model
from dsv4nb.widgets.lens import TokenLens
m = fake_model(" ".join(f"w{i}" for i in range(3000)), max_seq=8192)
chat = m.chat()
TokenLens(chat)"""


@pytest.fixture
def opened(lab: Any, quiet: None, request: pytest.FixtureRequest) -> Callable[..., Any]:
    """Opens a notebook whose first cell shows the lens of a chat and whose other cells are given."""

    def open_(*cells: str, first: str = SHOW) -> Any:
        lab.open(lab.write(request.node.name, first, *cells))
        lab.run_cell(0)
        lab.page.locator(".dsv4-lens .dsv4-panel").first.wait_for(timeout=60_000)
        lab.page.get_by_text("No reply yet").wait_for()
        return lab.page

    return open_


def ended(page: Any, n: int) -> None:
    """Wait until a reply of `n` tokens is shown and over."""
    page.wait_for_function(
        """n => {
          const lens = document.querySelector(".dsv4-lens");
          return lens.dataset.live === "false" && Number(lens.dataset.tokens) === n;
        }""",
        arg=n,
        timeout=30_000,
    )


def test_a_persons_path(opened: Callable[..., Any], lab: Any, shots: Path) -> None:
    page = opened(STORY, AGAIN, BARE, "(len(chat.forks), lens.chat is chat, [t.n_given for t in chat.turns])")
    lab.run_cell(1)
    ended(page, N_STORY)
    page.locator(".dsv4-summary").get_by_text("perplexity").wait_for()
    token = page.locator(".dsv4-tokens-grid :is(.dsv4-level-4, .dsv4-level-5, .dsv4-level-6)").first
    token.hover()
    detail = page.locator(".dsv4-detail")
    for name in ("probability", "logprob", "rank", "entropy"):
        detail.get_by_text(name, exact=True).wait_for()
    assert detail.locator(".dsv4-alternative").count() >= 5
    before = page.locator(".dsv4-tokens-grid .dsv4-level-0").count()
    page.get_by_role("combobox", name="Colour by").select_option("speculation")
    page.locator(".dsv4-keys").get_by_text("an accepted draft").wait_for()
    assert page.locator(".dsv4-tokens-grid .dsv4-how-accepted").count() > 20
    page.get_by_role("combobox", name="Colour by").select_option("probability")
    page.wait_for_function("n => document.querySelectorAll('.dsv4-tokens-grid .dsv4-level-0').length === n", arg=before)

    lab.run_cell(2)  # another answer, which was continued from one of its tokens when it was recorded
    ended(page, N_AGAIN)
    page.locator(f".dsv4-tokens-grid [data-i='{CONTINUED_AT}']").click()
    page.locator(f".dsv4-alternatives button[data-id='{ALTERNATIVE}']").click()
    page.get_by_text("A fork: the chat it was made of is as it was. In Python it is chat.forks[0].").wait_for()
    ended(page, N_CONTINUED)
    page.screenshot(path=shots / "lens-fork.png")
    page.get_by_role("combobox", name="Colour by").select_option("speculation")
    page.locator(".dsv4-keys").get_by_text(f"given, not chosen ({CONTINUED_AT + 1})").wait_for()
    page.get_by_role("combobox", name="Colour by").select_option("probability")
    lab.run_cell(4)
    page.locator(".jp-OutputArea-output pre").get_by_text("(1, False, [0])").wait_for()
    page.get_by_role("button", name="Back to the original").click()
    ended(page, N_AGAIN)
    # an alternative that was not recorded is refused, in the model's own words
    page.locator(".dsv4-tokens-grid [data-i='3']").click()
    page.locator(".dsv4-alternatives button:not(.dsv4-chosen)").first.click()
    page.get_by_role("alert").get_by_text("this recording has no reply to").wait_for()


def test_probabilities_are_computed_when_they_are_asked_for_and_the_page_survives(
    opened: Callable[..., Any], lab: Any, shots: Path
) -> None:
    page = opened(STORY, BARE)
    lab.run_cell(1)
    ended(page, N_STORY)
    assert not page.get_by_role("button", name="Compute probabilities").is_visible()
    lab.run_cell(2)
    second = page.locator(".dsv4-lens").nth(1)
    compute = second.get_by_role("button", name="Compute probabilities")
    compute.wait_for(timeout=30_000)
    compute.click()
    second.locator(".dsv4-summary").get_by_text("perplexity").wait_for(timeout=30_000)
    compute.wait_for(state="hidden")
    lab.command("docmanager:save")
    path = lab.root / page.evaluate("window.jupyterapp.shell.currentWidget.context.path")
    lab.open(path.name, reset=False)
    page.locator(".dsv4-lens").nth(1).locator(".dsv4-summary").get_by_text("perplexity").wait_for(timeout=30_000)
    saved = nbformat.read(path, as_version=4).cells[2].outputs[-1].data
    assert "underline wavy" in saved["text/html"] and "least likely tokens" in saved["text/plain"]
    path.with_name("another.ipynb").write_bytes(path.read_bytes())  # which another kernel opens: the lens is gone
    lab.open("another.ipynb")
    page.locator(".dsv4-tokens-saved").last.get_by_text("perplexity").wait_for()
    page.screenshot(path=shots / "lens-saved.png")
    lab.problems.clear()  # the widget manager's, of a model that is not there


def test_tokens_come_as_they_are_made_and_the_keyboard_is_enough(opened: Callable[..., Any], lab: Any) -> None:
    page = opened(ASK, first=SLOW)
    page.evaluate(
        """() => {
          const lens = document.querySelector(".dsv4-lens");
          window.counts = [];
          const count = () => window.counts.push(Number(lens.dataset.tokens));
          new MutationObserver(count).observe(lens, { attributes: true });
        }"""
    )
    lab.run_cell(1)
    ended(page, N_STORY)
    seen = [count for count in page.evaluate("window.counts") if count]
    assert len(set(seen)) > 10 and seen == sorted(seen), "the tokens came as they were made"
    cells = page.locator(".jp-Notebook .jp-Cell").count()
    page.locator(".dsv4-summary button").last.focus()
    page.keyboard.press("Tab")
    page.keyboard.press("b")
    heard = page.locator(".dsv4-lens [role=status]")
    for key in ("Home", "ArrowRight", "ArrowRight"):
        page.keyboard.press(key)
    assert heard.inner_text().startswith("Token 2, ") and "probability" in heard.inner_text()
    page.keyboard.press("ArrowDown")
    page.wait_for_function("Number(document.activeElement.dataset.i) > 5")
    page.keyboard.press("ArrowUp")
    page.wait_for_function("Number(document.activeElement.dataset.i) < 6")
    page.keyboard.press("End")
    assert heard.inner_text().startswith(f"Token {N_STORY - 1}, ")
    page.keyboard.press("Home")
    page.keyboard.press("Enter")
    page.wait_for_function("document.activeElement.classList.contains('dsv4-alternative')")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Escape")
    page.wait_for_function("document.activeElement.dataset.i === '0'")
    assert page.locator(".jp-Notebook .jp-Cell").count() == cells
    unmarked = page.evaluate(
        """() => [...document.querySelectorAll(".dsv4-lens :is(button, input, select, summary, [tabindex='0'])")]
          .filter((node) => node.dataset.lmSuppressShortcuts !== "true").map((node) => node.className)"""
    )
    assert unmarked == []


def test_light_dark_narrow_and_large(
    opened: Callable[..., Any], lab: Any, shots: Path, axe: Callable[[str], None], picture: Callable[..., None]
) -> None:
    page = opened(STORY)
    lab.run_cell(1)
    ended(page, N_STORY)
    lab.size(1200, 1300)
    page.locator(".dsv4-summary button").first.click()
    page.locator(".dsv4-twin summary").click()
    page.locator(".dsv4-table").wait_for()
    for dark in (False, True):
        lab.theme(dark=dark)
        page.wait_for_timeout(900)
        axe(".dsv4-lens")
        page.screenshot(path=shots / f"lens-{'dark' if dark else 'light'}.png")
        if dark is False:
            page.locator(".dsv4-twin summary").click()
        picture(page.locator(".dsv4-lens .dsv4-panel"), "lens")
    page.get_by_role("combobox", name="Colour by").select_option("speculation")
    page.screenshot(path=shots / "lens-speculation.png")
    axe(".dsv4-lens")
    lab.theme(dark=False)
    page.locator(".dsv4-twin summary").click()
    lab.command("application:toggle-left-area")
    for width, name in ((480, "narrow"), (600, "large")):  # 600 is 1200 pixels at 200 %
        lab.size(width, 1600)
        page.wait_for_timeout(700)
        page.screenshot(path=shots / f"lens-{name}.png")
        overflow = page.evaluate(
            """() => {
              const inside = (node) => node.closest(".dsv4-wide, .dsv4-unseen");
              const edge = document.querySelector(".dsv4-lens .dsv4-panel").getBoundingClientRect().right;
              return [...document.querySelectorAll(".dsv4-lens .dsv4-panel *")]
                .filter((node) => !inside(node) && node.getBoundingClientRect().right > edge + 1)
                .map((node) => node.className);
            }"""
        )
        assert overflow == []
    lab.size(1200, 860)
    lab.command("application:toggle-left-area")


def test_a_long_reply_stays_quick(opened: Callable[..., Any], lab: Any) -> None:
    page = opened('chat.send("hi", logprobs=3)', first=LONG)
    lab.run_cell(1)
    ended(page, 3000)
    assert page.locator(".dsv4-block").count() == 15
    took = page.evaluate(
        """async () => {
          const select = document.querySelector(".dsv4-lens [aria-label='Colour by']");
          const began = performance.now();
          select.value = "entropy";
          select.dispatchEvent(new Event("change"));
          await new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)));
          return performance.now() - began;
        }"""
    )
    print(f"3,000 tokens are coloured anew in {took:.0f} ms")
    assert took < 500
