"""The magics in a real kernel: streamed outputs, and an interrupt that leaves the model usable."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.notebook

ROOT = Path(__file__).parents[2]

SET_UP = f"""
import importlib.util
spec = importlib.util.spec_from_file_location("hand", {str(Path(__file__).parent / "conftest.py")!r})
hand = importlib.util.module_from_spec(spec)
spec.loader.exec_module(hand)
m = hand.ScriptModel(*[("content", f"{{i}} ") for i in range(300)], delay_s=0.02)
"""


class Kernel:
    """A running kernel and what it said about one cell."""

    def __init__(self, manager: Any, client: Any) -> None:
        self.manager = manager
        self.client = client

    def start(self, source: str) -> str:
        return str(self.client.execute(source))

    def outputs(self, request: str, *, until: Any = None, timeout: float = 20) -> list[dict[str, Any]]:
        """What the cell has shown, up to its end or to the first message for which `until` holds."""
        told = []
        while True:
            message = self.client.get_iopub_msg(timeout=timeout)
            if message["parent_header"].get("msg_id") != request:
                continue
            told.append(message)
            is_idle = message["msg_type"] == "status" and message["content"]["execution_state"] == "idle"
            if is_idle or (until and until(message)):
                return told

    def run(self, source: str) -> list[dict[str, Any]]:
        told = self.outputs(self.start(source))
        assert not [message["content"] for message in told if message["msg_type"] == "error"]
        return told


@pytest.fixture(scope="module")
def kernel() -> Iterator[Kernel]:
    from jupyter_client.manager import start_new_kernel

    env = dict(os.environ, PYTHONPATH=os.pathsep.join([str(ROOT), str(ROOT / "kernels")]))
    manager, client = start_new_kernel(kernel_name="python3", env=env)
    try:
        kernel = Kernel(manager, client)
        kernel.run("%load_ext dsv4nb")
        kernel.run(SET_UP)
        yield kernel
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


def shown(told: list[dict[str, Any]]) -> list[str]:
    kinds = ("display_data", "update_display_data")
    return [message["content"]["data"]["text/plain"] for message in told if message["msg_type"] in kinds]


def test_an_interrupt_returns_at_once_and_keeps_what_there_was(kernel: Kernel) -> None:
    request = kernel.start("%%dsv4\ncount")
    kernel.outputs(request, until=lambda message: "9 " in str(message["content"].get("data", "")))
    start = time.monotonic()
    kernel.manager.interrupt_kernel()
    told = kernel.outputs(request)
    assert time.monotonic() - start < 1
    assert "[Stopped]" in shown(told)[-1] and shown(told)[-1].startswith("0 1 2 ")
    (error,) = [message["content"] for message in told if message["msg_type"] == "error"]
    assert error["traceback"] == ["Stopped. The text so far is in _dsv4."]
    (kept,) = [m for m in kernel.run("print(_dsv4.text[:6])") if m["msg_type"] == "stream"]
    assert kept["content"]["text"] == "0 1 2 \n"
    kernel.run("m.words = m.words[:5]")
    assert shown(kernel.run("%%dsv4\nagain"))[-1] == "0 1 2 3 4 "


def test_j04_an_interrupt_of_a_chat_keeps_the_turn_and_the_next_one_goes_on(kernel: Kernel) -> None:
    kernel.run("from dsv4nb.testing.fake_model import fake_model")
    kernel.run("f = fake_model([' '.join(map(str, range(300))), 'two words'], delay_s=0.02)")
    request = kernel.start("%%dsv4 --chat talk --model f\ncount")
    kernel.outputs(request, until=lambda message: "9 " in str(message["content"].get("data", "")))
    start = time.monotonic()
    kernel.manager.interrupt_kernel()
    told = kernel.outputs(request)
    assert time.monotonic() - start < 1
    (error,) = [message["content"] for message in told if message["msg_type"] == "error"]
    assert error["traceback"] == ["Stopped. The text so far is in _dsv4."]
    kept = kernel.run("print(talk.turns[-1].stop_reason, talk.turns[-1].text == _dsv4.text, talk.is_busy)")
    assert [m["content"]["text"] for m in kept if m["msg_type"] == "stream"] == ["cancelled True False\n"]
    assert shown(kernel.run("%%dsv4 --chat talk\nagain"))[-1] == "two words"


def test_in_a_kernel_rounds_and_chats_are_panels(kernel: Kernel) -> None:
    kernel.run("from dsv4nb.testing.fake_model import fake_model")
    kernel.run("g = fake_model([[300, 301, 302]], drafts=lambda said: [301])")
    kernel.run("%%dsv4 --chat c --model g\nhi")
    for line in ("%dsv4 rounds", "%dsv4 rounds c", "%dsv4 show c"):
        told = kernel.run(line)
        data = [m["content"]["data"] for m in told if m["msg_type"] == "display_data"]
        assert any("application/vnd.jupyter.widget-view+json" in one for one in data), line
        assert any("text/html" in one for one in data), line
