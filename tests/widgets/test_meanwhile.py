"""Options that change while a reply streams: every panel goes on with the reply."""

from __future__ import annotations

import time
from typing import Any

import pytest

from dsv4nb.stream.frames import Pump
from dsv4nb.testing.fake_model import fake_model
from dsv4nb.widgets.acceptance import AcceptancePanel
from dsv4nb.widgets.cache import CachePanel
from dsv4nb.widgets.chat import ChatWidget
from dsv4nb.widgets.lens import TokenLens
from dsv4nb.widgets.sampler import SamplerPanel

WORDS = " ".join(f"w{i}" for i in range(150))


def test_j16_options_set_while_a_reply_streams_leave_it_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[dict[str, Any]] = []
    with fake_model(WORDS, delay_s=0.01, drafts=lambda before: [1] * 5) as m:
        chat = m.chat()
        pump = Pump()
        widget = ChatWidget(chat, pump=pump)
        monkeypatch.setattr(widget, "send", lambda message, *_: said.append(message))
        panels = [make(chat, pump=pump) for make in (AcceptancePanel, TokenLens, SamplerPanel)]
        panels.append(CachePanel(m, chat, pump=pump))
        ticket = chat.submit("go on")
        while len(ticket.text) < 10:
            assert not ticket.wait(0.005)
        chat.thinking = True
        chat.set(temperature=0.5)
        pump.drain()
        assert widget.thinking is True
        while widget.status == "queued":
            assert not ticket.wait(0.005), "the pump tells within a thirtieth of a second"
        assert widget.status == "running"
        reply = ticket.result()
        assert reply.text == WORDS and reply.config.temperature == 1.0
        until = time.monotonic() + 5
        while widget.status != "idle" and time.monotonic() < until:
            time.sleep(0.01)
        assert [turn["text"] for turn in widget.transcript["turns"]] == [WORDS] and widget.status == "idle"
        frames = [message for message in said if message["kind"] == "frame"]
        assert sum(len(frame["tokens"]) for frame in frames) >= 150
        assert len(frames) < 90, "pieces of a thirtieth of a second each, not a message a token"
        assert chat.options.temperature == 0.5
