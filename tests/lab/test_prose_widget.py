"""A reply with everything in it, in a real JupyterLab: its formulas come from the kernel."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.lab

REPLY = (Path(__file__).parents[1] / "data/reply.md").read_text()

SHOW = """from dsv4nb.testing.fake_model import fake_model
m = fake_model(["I think of $x$.</think>" + {reply!r}], delay_s=0.0, name="toy")
chat = m.chat()
chat"""


def test_a_reply_in_a_real_notebook(
    lab: Any, quiet: None, axe: Callable[[str], None], picture: Callable[..., None]
) -> None:
    lab.open(lab.write("prose", SHOW.format(reply=REPLY)))
    lab.run_cell(0)
    page = lab.page
    page.locator(".dsv4-panel").first.wait_for()
    page.get_by_role("switch", name="Thinking").check()
    box = page.get_by_role("textbox", name="Message")
    box.fill("What are the roots?")
    box.press("Enter")
    page.locator(".dsv4-chat[data-phase=idle] .dsv4-answer hr").wait_for(state="attached")
    page.locator(".dsv4-answer math").first.wait_for(state="attached")
    assert re.match(r"Thought for \d+ tokens", page.locator(".dsv4-summary").first.text_content())
    page.add_style_tag(content=".dsv4-log { max-height: none !important; }")
    for dark in (False, True):
        lab.theme(dark=dark)
        axe(".dsv4-answer")
        picture(page.locator(".dsv4-answer"), "prose")
    lab.theme(dark=False)
