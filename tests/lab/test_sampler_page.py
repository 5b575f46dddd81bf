"""The sampler panel in a real JupyterLab: sliders and fields, refusals beside their control, presets, the seed, two
views, a running reply, the keyboard, both themes, narrow pages."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.lab

expect = pytest.importorskip("playwright.sync_api", reason="playwright is not installed").expect

SHOW = """import dsv4nb
from dsv4nb.testing.fake_model import fake_model
m = fake_model(" ".join(f"w{i}" for i in range(2000)), delay_s=0.01, drafts=lambda before: [1] * 5)
chat = m.chat()
panel = dsv4nb.SamplerPanel(chat)
panel"""

# what reaches beyond the panel's right edge
WIDER = """panel => [...panel.querySelectorAll("*:not(.dsv4-unseen)")]
  .filter((it) => it.getBoundingClientRect().right > panel.getBoundingClientRect().right + 1)
  .map((it) => it.outerHTML.slice(0, 200))"""


@pytest.fixture
def opened(lab: Any, quiet: None, request: pytest.FixtureRequest) -> Callable[..., Any]:
    """Opens a notebook whose first cell shows the panel and whose other cells are given."""

    def open_(*cells: str, first: str = SHOW) -> Any:
        lab.open(lab.write(request.node.name, first, *cells))
        lab.run_cell(0)
        lab.page.locator(".dsv4-sampler .dsv4-panel").first.wait_for(timeout=60_000)
        return lab.page

    return open_


def output(page: Any, index: int) -> str:
    """Wait until the cell has an output, and return it."""
    found = page.locator(".jp-CodeCell").nth(index).locator(".jp-OutputArea-output").last
    found.wait_for()
    return str(found.inner_text()).strip()


def changed(page: Any, *names: str) -> None:
    """Wait until these controls are set to something else than the default."""
    page.wait_for_function(
        "names => document.querySelector('.dsv4-sampler').dataset.changed === names", arg=" ".join(sorted(names))
    )


def row(page: Any, name: str) -> Any:
    return page.locator(f".dsv4-row[data-name={name}]").first


def test_a_persons_path(
    opened: Callable[..., Any], lab: Any, shots: Path, axe: Callable[[str], None], picture: Callable[..., None]
) -> None:
    page = opened("panel", "chat.options.temperature, chat.options.seed, panel.options", "chat.set(top_k=40)")
    lab.theme(dark=False)
    panel = page.locator(".dsv4-sampler").first

    # a refusal stands beside the control, in the engine's words, and nothing is applied
    entry = row(page, "top_p").locator(".dsv4-entry")
    entry.fill("1.5")
    entry.press("Enter")
    row(page, "top_p").get_by_role("alert").get_by_text("Not applied: top_p is 1.5; it must be in (0, 1]").wait_for()
    row(page, "top_p").get_by_role("button", name="Take the value of Top-p back").click()
    expect(entry).to_have_value("1")  # a frame later
    changed(page)

    # a slider, by mouse and in two views
    lab.run_cell(1)
    page.locator(".dsv4-sampler").nth(1).wait_for()
    slider = row(page, "temperature").get_by_role("slider")
    slider.evaluate("it => { it.value = '14'; it.dispatchEvent(new Event('input')); }")
    changed(page, "temperature")
    other = page.locator(".dsv4-sampler").nth(1)
    page.wait_for_function(
        "document.querySelectorAll('.dsv4-row[data-name=temperature] .dsv4-entry')[1].value === '0.7'"
    )
    assert other.locator("code").first.inner_text() == "chat.set(temperature=0.7)"

    # from Python
    lab.run_cell(3)
    changed(page, "temperature", "top_k")
    expect(row(page, "top_k").locator(".dsv4-entry")).to_have_value("40")

    # the seed: drawn, told, kept
    page.get_by_text("drawn for each message").first.wait_for()
    page.get_by_role("switch", name="Lock").first.click()
    changed(page, "seed", "temperature", "top_k")
    seed = row(page, "seed").locator(".dsv4-entry").input_value()
    lab.run_cell(2)
    assert output(page, 2) == f"(0.7, {seed}, {{'temperature': 0.7, 'top_k': 40, 'seed': {seed}}})"
    page.get_by_role("switch", name="Lock").first.click()
    changed(page, "temperature", "top_k")

    # what does not go together cannot be chosen, and the row says why
    row(page, "sampler").locator("select").select_option("inverse_cdf")
    note = row(page, "spec_mode").locator(".dsv4-note")
    note.get_by_text("spec_mode='rejection' draws three times a position").wait_for()
    assert row(page, "spec_mode").locator("option[value=rejection]").is_disabled()
    row(page, "spec_window").locator("select").select_option("slot")
    changed(page, "sampler", "spec_window", "temperature", "top_k")
    lab.size(1200, 1200)
    for dark in (False, True):
        lab.theme(dark=dark)
        axe(".dsv4-sampler")
        picture(panel, "sampler")
    lab.theme(dark=False)
    lab.size(1200)

    page.get_by_role("button", name="Greedy").first.click()
    page.get_by_text("Greedy: the likeliest token each time").first.wait_for()
    page.get_by_role("button", name="Reset all").first.click()
    changed(page)
    assert page.get_by_role("button", name="Model card").first.get_attribute("aria-pressed") == "true"


def test_j16_while_a_reply_runs(opened: Callable[..., Any], lab: Any) -> None:
    page = opened('ticket = chat.submit("hi")', "ticket.cancel(); ticket.result().config.temperature")
    lab.run_cell(1)
    page.get_by_text("A reply is running and keeps the values it began with").wait_for()
    entry = row(page, "temperature").locator(".dsv4-entry")
    entry.fill("0.2")
    entry.press("Enter")
    changed(page, "temperature")
    lab.run_cell(2)
    assert output(page, 2) == "1.0"
    page.get_by_text("Changes apply to the next message.").wait_for()
    page.get_by_role("button", name="Keep it").wait_for()


def test_j10_a_drag_is_a_few_messages_and_ends_where_it_ends(opened: Callable[..., Any], lab: Any) -> None:
    page = opened("chat.options.top_p")
    page.evaluate(
        """() => {
          window.told = { send: [], recv: [] };
          const { kernel } = window.jupyterapp.shell.currentWidget.sessionContext.session;
          kernel.anyMessage.connect((_, { msg, direction }) => {
            if (msg.header.msg_type === "comm_msg") window.told[direction].push(performance.now());
          });
        }"""
    )
    box = row(page, "top_p").get_by_role("slider").bounding_box()
    y = box["y"] + box["height"] / 2
    page.mouse.move(box["x"] + box["width"] - 8, y)
    page.mouse.down()
    start = page.evaluate("performance.now()")
    for i in range(120):
        page.mouse.move(box["x"] + box["width"] - 8 - i * (box["width"] - 16) / 240, y)
        page.wait_for_timeout(10)
    seconds = (page.evaluate("performance.now()") - start) / 1000
    page.mouse.up()
    sent, heard = page.evaluate("[window.told.send.length, window.told.recv.length]")
    assert 3 < sent <= 30 * seconds and heard <= 30 * seconds, (sent, heard, seconds)
    at = row(page, "top_p").locator(".dsv4-entry").input_value()
    page.get_by_role("group", name="As code").get_by_text(f"chat.set(top_p={at})", exact=True).wait_for()
    lab.run_cell(1)
    assert output(page, 1) == at and 0.4 < float(at) < 0.6


def test_keyboard_alone_and_narrow(opened: Callable[..., Any], lab: Any, shots: Path) -> None:
    page = opened("chat.options.temperature, chat.options.max_new")
    cells = page.locator(".jp-Cell").count()
    page.get_by_role("button", name="Model card").focus()
    seen = []
    for _ in range(60):
        page.keyboard.press("Tab")
        name = page.evaluate("document.activeElement.closest('.dsv4-row')?.dataset.name ?? ''")
        if name and name not in seen:
            seen.append(name)
    assert seen == [
        *("temperature", "top_p", "top_k", "min_p", "seed", "sampler", "repetition_penalty", "frequency_penalty"),
        *("presence_penalty", "penalty_last_n", "penalty_scope", "max_new", "thinking", "effort", "stop"),
        *("spec", "spec_window", "spec_depth", "spec_proposal", "spec_mode"),
    ]
    row(page, "temperature").get_by_role("slider").focus()
    for key in ("ArrowLeft", "ArrowLeft", "b", "m"):  # letters that would change cells
        page.keyboard.press(key)
    changed(page, "temperature")
    assert row(page, "temperature").get_by_role("slider").get_attribute("aria-valuetext") == "0.9"
    row(page, "max_new").locator(".dsv4-entry").focus()
    page.keyboard.press("ArrowDown")
    changed(page, "max_new", "temperature")
    lab.run_cell(1)
    assert output(page, 1) == "(0.9, 4096)"
    assert page.locator(".jp-Cell").count() == cells

    lab.command("application:toggle-left-area")
    for width in (900, 600, 480):  # 600 is what a zoom of 200 % leaves of 1200
        lab.size(width)
        panel = page.locator(".dsv4-sampler .dsv4-panel")
        panel.screenshot(path=shots / f"sampler-{width}.png")
        assert panel.evaluate(WIDER) == [], width
    lab.size(1200)
    lab.command("application:toggle-left-area")

    lab.restart()
    page.get_by_text("The kernel was restarted or closed. What was set stays to be read").wait_for()
    expect(row(page, "temperature").locator(".dsv4-entry")).to_have_value("0.9")
    assert row(page, "temperature").get_by_role("slider").is_disabled()
    assert page.get_by_role("button", name="Greedy").is_disabled()
