"""Six tasks that a person can do from the page alone: stop a reply, find why a prefix was not reused, see which draft
was rejected and why, go on from a token on a fork, play a seed again, read a saved notebook without a kernel."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

TOY = Path(__file__).parents[2] / "dsv4nb/toy/model"

pytestmark = [
    pytest.mark.lab,
    pytest.mark.skipif(not (TOY / "config.json").exists(), reason="the bundled model is not in dsv4nb/toy/model"),
]

CELLS = (
    """import dsv4nb, math
m = dsv4nb.load("toy", progress=False)
# hot, and without an end: whatever the seed, some draft is rejected
chat = m.chat(temperature=1.5, logprobs=5, max_new=120, logit_bias={m.eos: -math.inf})
chat""",
    "dsv4nb.SamplerPanel(chat)",
    "dsv4nb.AcceptancePanel(chat)",
    "dsv4nb.CachePanel(m, chat)",
    "dsv4nb.TokenLens(chat)",
)


def answer(page: Any) -> str:
    return str(page.locator(".dsv4-chat .dsv4-answer").last.text_content())


def test_six_tasks_from_the_page_alone(lab: Any, quiet: None, shots: Path) -> None:
    page = lab.page
    lab.size(1200, 2600)  # all panels in sight
    lab.open(lab.write("six", *CELLS))
    for i, name in enumerate(("chat", "sampler", "acceptance", "cache", "lens")):
        lab.run_cell(i)
        page.locator(f".dsv4-{name} .dsv4-panel").wait_for(timeout=120_000)
    chat, sampler, acceptance, cache, lens = (
        page.locator(f".dsv4-{name}") for name in ("chat", "sampler", "acceptance", "cache", "lens")
    )
    message = chat.get_by_role("textbox", name="Message", exact=True)

    # stop a reply
    message.fill("Count from 1 to 100.")
    message.press("Enter")
    page.wait_for_function("document.querySelector('.dsv4-chat .dsv4-answer')?.textContent.length > 4")
    chat.get_by_role("button", name="Stop", exact=True).click()
    chat.locator(".dsv4-mark").get_by_text("Stopped", exact=True).wait_for()
    lab.idle(1)
    assert "100" not in answer(page)

    # play a seed again
    chat.get_by_role("button", name="New chat").click()
    lab.idle(0)
    message.fill("Tell me a story about a fox.")
    message.press("Enter")
    lab.idle(1)
    first = answer(page)
    assert len(first) > 20
    sampler.get_by_role("button", name="Keep it").click()
    sampler.get_by_role("switch", name="Lock").and_(page.locator(":checked")).wait_for()
    chat.locator(".dsv4-turn").last.hover()
    chat.get_by_role("button", name="Regenerate").last.click()
    chat.get_by_text("2 / 2").wait_for()
    lab.idle(1)
    assert answer(page) == first

    # see which draft was rejected, and why
    page.wait_for_function("document.querySelector('.dsv4-acceptance').dataset.live === 'false'")
    heard = acceptance.locator("[role=status]")
    acceptance.locator(".dsv4-scroller").focus()
    page.keyboard.press("Home")
    for i in range(int(acceptance.get_attribute("data-rounds") or 0)):
        page.keyboard.press("Enter")
        acceptance.locator(".dsv4-round-title").get_by_text(f"Round {i}", exact=True).wait_for()
        rejected = acceptance.locator(".dsv4-round tbody tr").filter(has_text="rejected")
        if rejected.count():
            break
        page.keyboard.press("Escape")
        page.wait_for_function("document.activeElement.className === 'dsv4-scroller'")
        page.keyboard.press("ArrowRight")
    assert heard.inner_text().startswith("Round ")
    _, drafted, chosen, *_ = rejected.first.locator("td").all_inner_texts()
    assert drafted != chosen, "the model chose another token"

    # find why a prefix was not reused
    sampler.get_by_role("button", name="Greedy").click()
    page.wait_for_function(
        "[...document.querySelectorAll('.dsv4-sampler button')]"
        ".some((it) => it.textContent === 'Greedy' && it.ariaPressed === 'true')"
    )
    chat.get_by_role("button", name="New chat").click()
    lab.idle(0)
    message.fill("What is the capital of France?")
    message.press("Enter")
    lab.idle(1)
    chat.locator(".dsv4-turn").last.hover()
    chat.get_by_role("button", name="Edit", exact=True).last.click()
    edited = chat.get_by_role("textbox", name="Edit the message")
    edited.fill("What is the capital of Spain?")
    edited.press("Enter")
    chat.get_by_text("2 / 2").wait_for()
    lab.idle(1)
    cache.get_by_role("tab", name="Decisions").click()
    newest = cache.locator(".dsv4-decision").first
    newest.get_by_text("cached is ‘·F’, the prompt has ‘·S’").wait_for()

    # go on from a token, on a fork
    page.wait_for_function("document.querySelector('.dsv4-lens').dataset.live === 'false'")
    lens.locator("[data-i='0']").click()
    lens.locator(".dsv4-alternatives button:not(.dsv4-chosen)").first.click()
    lens.get_by_text("A fork: the chat it was made of is as it was.").wait_for()
    lens.get_by_role("button", name="Back to the original").wait_for()
    assert answer(page).startswith("The capital of Spain is Madrid")
    page.screenshot(path=shots / "six.png")

    # read a saved notebook without its kernel
    lab.command("docmanager:save")
    kept = answer(page)
    path = lab.root / "six.ipynb"
    (lab.root / "kept.ipynb").write_bytes(path.read_bytes())
    lab.open("kept.ipynb")
    page.locator(".dsv4-saved").get_by_text(kept.split(".")[0]).first.wait_for()
    for saved in ("dsv4-rounds-saved", "dsv4-tokens-saved"):
        assert page.locator(f".{saved}").first.is_visible()
    lab.size(1200)
    lab.problems.clear()  # the widget manager's, of models that are not there
