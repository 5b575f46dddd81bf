from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from dsv4nb.errors import RequestError
from dsv4nb.model import Model
from dsv4nb.session.request import Options
from dsv4nb.testing.fake_model import fake_model
from dsv4nb.widgets.sampler import SamplerPanel
from dsv4nb.widgets.sampler_controls import PRESETS, controls, defaults, given


@pytest.fixture
def model() -> Iterator[Model]:
    made = fake_model("one two three", drafts=lambda before: [1] * 5)
    yield made
    made.close()


@pytest.fixture
def panel_of(open_panel: Callable[..., SamplerPanel]) -> Callable[..., SamplerPanel]:
    return partial(open_panel, SamplerPanel)


@pytest.fixture
def panel(model: Model, panel_of: Callable[..., SamplerPanel]) -> SamplerPanel:
    return panel_of(model.chat())


def tell(panel: SamplerPanel, kind: str, **fields: Any) -> list[dict[str, Any]]:
    """Send as the page would; return what it brought."""
    before = len(panel.comm.messages())
    panel.comm.from_page({"kind": kind, "id": f"c{before}", **fields})
    assert panel._pump.drain()
    return list(panel.comm.messages()[before:])


def put(panel: SamplerPanel, name: str, value: Any) -> str:
    """Set one control; return the refusal, "" when there is none."""
    *refused, ack = tell(panel, "set", changes={name: value})
    assert ack["kind"] == "ack" and ack["ok"] == (not refused)
    assert all(one["name"] == name and one["error"] == ack["error"] for one in refused)
    return str(ack["error"])


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 5
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_every_option_of_sampling_and_speculation_has_a_control(model: Model) -> None:
    # what shapes a request otherwise is no slider: the text around it, the form of the reply, what is reported
    elsewhere = {"system", "tools", "tool_choice", "response_format", "regex", "logit_bias", "logprobs"}
    elsewhere |= {"stop_token_ids", "trust_text", "max_prompt_tokens"}
    names = [control.name for control in controls(model.limits)]
    assert len(names) == len(set(names)) and set(names) == set(defaults(model.limits))
    assert set(Options.__slots__) == set(names) | elsewhere


def test_j22_values_go_both_ways(panel: SamplerPanel) -> None:
    chat = panel._source
    assert panel.state["changed"] == [] and panel.state["preset"] == "card" and panel.options == {}
    told: dict[str, Any] = {
        **{"temperature": 0.7, "top_p": 0.9, "top_k": 40, "min_p": 0.05, "sampler": "inverse_cdf"},
        **{"repetition_penalty": 1.1, "frequency_penalty": -0.5, "presence_penalty": 0.25, "penalty_last_n": 64},
        **{"penalty_scope": "generated", "max_new": 100, "thinking": True, "effort": "high"},
        **{"spec_depth": 3, "spec_proposal": "greedy"},
    }
    for name, value in told.items():
        assert put(panel, name, value) == ""
        assert getattr(chat.options, name) == value and panel.state["values"][name] == value
    assert put(panel, "seed", "18446744073709551615") == ""
    assert chat.options.seed == 2**64 - 1 and panel.state["values"]["seed"] == "18446744073709551615"
    assert put(panel, "spec_window", ["slot", 0.6, 2]) == ""
    assert chat.options.spec_window == ("slot", 0.6, 2) and panel.state["values"]["spec_window"] == ["slot", 0.6, 2]
    assert put(panel, "stop", ["\n\n", "END"]) == "" and chat.options.stop == ("\n\n", "END")
    assert set(panel.state["changed"]) == {*told, "seed", "spec_window", "stop"}

    chat.set(temperature=0.3, top_k=None, spec_window="slot", stop="x", seed=None)
    panel._pump.drain()
    values = panel.state["values"]
    assert (values["temperature"], values["top_k"], values["spec_window"]) == (0.3, 0, ["slot", 0.5, 0])
    assert (values["stop"], values["seed"]) == (["x"], None)
    chat.thinking = False  # type: ignore[attr-defined]
    panel._pump.drain()
    assert panel.state["values"]["thinking"] is False


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("top_p", 1.5, "top_p is 1.5; it must be in (0, 1]"),
        ("top_p", "much", "top_p is 'much'; it must be a number"),
        ("top_k", 2.5, "top_k is 2.5; it must be an integer of at least 0"),
        ("min_p", 1, "min_p is 1.0; it must be in [0, 1)"),
        ("seed", "abc", "seed is 'abc'; it must be an integer of at least 0"),
        ("seed", str(2**64), f"seed is {2**64}; it must be in [0, 2**64)"),
        ("max_new", -1, "max_new is -1; it must be an integer of at least 0"),
        ("spec_depth", 9, "spec_depth is 9; it must be 1 to 6 rows: the pending token and 5 drafts"),
        ("spec_window", ["slot", 1.0, 0], "spec_tau is 1.0; it must be a number in (0, 1)"),
        ("spec_window", ["slot", 0.5, 5], "the floor of spec_window is 5"),
        ("repetition_penalty", 0, "repetition_penalty is 0.0; it must be above 0"),
        ("system", "x", "the panel has no control 'system'"),
    ],
)
def test_j22_what_is_refused_is_refused_in_the_engines_words_and_changes_nothing(
    panel: SamplerPanel, name: str, value: Any, says: str
) -> None:
    before = panel._source.options, dict(panel.state)
    assert put(panel, name, value).startswith(says)
    assert (panel._source.options, panel.state) == before


def test_j22_choices_that_do_not_go_together_are_blocked_with_the_refusal(panel: SamplerPanel) -> None:
    assert panel.state["blocked"] == {}
    put(panel, "sampler", "inverse_cdf")
    said = panel.state["blocked"]["spec_mode"]["rejection"]
    assert said.startswith("spec_mode='rejection' draws three times a position")
    assert put(panel, "spec_mode", "rejection") == said, "and the same is said to a page that asks all the same"
    tell(panel, "reset", names=["sampler"])
    assert put(panel, "spec_mode", "rejection") == ""
    assert "inverse_cdf" in panel.state["blocked"]["sampler"] and "greedy" in panel.state["blocked"]["spec_proposal"]
    assert panel.state["notes"]["spec_mode"].startswith("Not speed only")
    assert put(panel, "spec", False).startswith("spec_mode has no effect with spec=False")
    tell(panel, "reset", names=["spec_mode"])
    assert put(panel, "spec", False) == ""
    assert panel.state["blocked"]["spec_depth"]["1"].startswith("spec_depth has no effect with spec=False")
    assert put(panel, "spec", True) == "" and panel.state["changed"] == [], "which is the default: nothing is asked for"


def test_j22_without_a_drafter_speculation_says_why(panel_of: Callable[..., SamplerPanel]) -> None:
    with fake_model("hi") as plain:
        panel = panel_of(plain.chat())
        assert panel.state["values"]["spec"] is False
        assert panel.state["blocked"]["spec"]["true"] == (
            "spec has nothing to act on: the checkpoint has no drafter; leave it out"
        )


@pytest.mark.parametrize("name", PRESETS)
def test_j22_presets(panel: SamplerPanel, name: str) -> None:
    panel._source.set(temperature=0.2, top_k=5, repetition_penalty=1.3, min_p=0.1, seed=4, thinking=True)
    (ack,) = tell(panel, "preset", name=name)
    assert ack["ok"] and panel.state["preset"] == name
    expected = {"card": {}, "code": {"top_p": 0.95}, "greedy": {"temperature": 0.0}}[name]
    assert panel.options == expected | {"seed": 4, "thinking": True}, "the seed and thinking are no part of it"
    assert ("temperature" in panel.state["notes"]) == (name == "greedy")


def test_a_preset_that_there_is_not_is_refused(panel: SamplerPanel) -> None:
    (ack,) = tell(panel, "preset", name="hot")
    assert ack["error"] == "there is no preset 'hot'; there are card, code, greedy"


def test_resets(panel: SamplerPanel) -> None:
    panel._source.set(temperature=0.2, stop=["x"], thinking=True, spec_window="auto", system="Be brief.")
    tell(panel, "reset", names=["stop"])
    assert panel.options == {"temperature": 0.2, "thinking": True, "spec_window": "auto"}
    tell(panel, "reset", names=[])
    assert panel.options == {} and panel.state["changed"] == []
    assert panel._source.options == Options(system="Be brief."), "what has no control stays"


def test_j22_the_seed_is_drawn_shown_and_kept(panel: SamplerPanel) -> None:
    chat: Any = panel._source
    first = chat.send("hi")
    until(lambda: panel.state["seed"] == str(first.config.seed))
    second = chat.send("again")
    assert second.config.seed != first.config.seed
    until(lambda: panel.state["seed"] == str(second.config.seed))
    tell(panel, "lock", value=True)
    assert chat.options.seed == second.config.seed == chat.send("more").config.seed
    tell(panel, "lock", value=False)
    assert chat.options.seed is None


def test_a_lock_before_the_first_reply_draws(panel: SamplerPanel) -> None:
    tell(panel, "lock", value=True)
    assert panel._source.options.seed is not None
    assert panel.state["values"]["seed"] == str(panel._source.options.seed)


def test_j16_a_running_reply_keeps_its_values_and_the_panel_says_so(panel_of: Callable[..., SamplerPanel]) -> None:
    with fake_model(" ".join(f"w{i}" for i in range(400)), delay_s=0.005) as slow:
        chat = slow.chat(temperature=0.5)
        panel = panel_of(chat)
        ticket = chat.submit("hi")
        until(lambda: panel.state["busy"])
        assert put(panel, "temperature", 0.9) == ""
        ticket.cancel()
        assert ticket.result().config.temperature == 0.5
        until(lambda: not panel.state["busy"])
        assert chat.send("again", max_new=1).config.temperature == 0.9
        late = panel_of(chat)
        assert late.state["values"]["temperature"] == 0.9


def test_a_panel_that_comes_while_a_reply_runs_says_so(panel_of: Callable[..., SamplerPanel]) -> None:
    with fake_model(" ".join(f"w{i}" for i in range(400)), delay_s=0.005) as slow:
        chat = slow.chat()
        ticket = chat.submit("hi")
        panel = panel_of(chat)
        until(lambda: panel.state["busy"])
        ticket.cancel()
        until(lambda: not panel.state["busy"] and panel.state["seed"] != "")


def test_two_panels_agree(model: Model, panel_of: Callable[..., SamplerPanel]) -> None:
    chat = model.chat()
    one, other = panel_of(chat), panel_of(chat)
    put(one, "temperature", 0.4)
    other._pump.drain()
    assert other.state == one.state


def test_j22_as_code(panel: SamplerPanel) -> None:
    assert panel.state["code"] == ["chat.set()", "m.generate(prompt)"]
    panel._source.set(temperature=0.7, spec_window=("slot", 0.6), stop="a\n", thinking=True, seed=7, top_p=1.0)
    panel._pump.drain()
    told = "temperature=0.7, seed=7, thinking=True, stop=['a\\n'], spec_window=('slot', 0.6)"
    assert panel.state["code"] == [f"chat.set({told})", f"m.generate(prompt, {told})"]
    options = eval(f"dict({told})")
    again: Any = panel._source
    again.set(**{name: None for name in ("temperature", "seed", "spec_window")}, stop=(), thinking=False)
    again.set(**options)
    panel._pump.drain()
    assert panel.state["code"][0] == f"chat.set({told})", "what is copied does what is shown"


def test_a_models_own_requests(model: Model, panel_of: Callable[..., SamplerPanel]) -> None:
    panel = panel_of(model)
    assert panel.state["code"] == ["m.generate(prompt)"]
    assert panel.state["blocked"]["effort"]["high"].startswith("effort is 'high' and thinking is off")
    assert put(panel, "temperature", 0.5) == "" and put(panel, "thinking", True) == ""
    assert put(panel, "effort", "high") == "" and put(panel, "top_p", 7).startswith("top_p is 7")
    assert panel.options == {"temperature": 0.5, "thinking": True, "effort": "high"}
    assert model.generate("hi", max_new=1, **panel.options).config.temperature == 0.5
    tell(panel, "reset", names=[])
    assert panel.options == {} and model.limits.sampler.temperature == 1.0


def test_a_slider_that_is_dragged_is_told_once_a_change(panel: SamplerPanel) -> None:
    before = len(panel.comm.published)
    for i in range(20):
        put(panel, "temperature", i / 20)
    assert len(panel.comm.published) - before == 40, "one trait and one answer each, the saved form later"


def test_a_repeated_command_has_no_second_effect(panel: SamplerPanel) -> None:
    command = {"kind": "set", "id": "same", "changes": {"temperature": 0.4}}
    panel.comm.from_page(command)
    panel._pump.drain()
    panel._source.set(temperature=0.8)
    panel.comm.from_page(command)
    panel._pump.drain()
    assert panel._source.options.temperature == 0.8


@pytest.mark.parametrize("content", [None, {"kind": "set", "id": "a"}, {"kind": "set", "id": "a", "changes": [1]}])
def test_what_is_none_of_ours_is_ignored(panel: SamplerPanel, content: object) -> None:
    before = len(panel.comm.published)
    panel.comm.from_page(content)
    panel._pump.drain()
    assert len(panel.comm.published) == before


def test_a_source_that_is_none_is_refused() -> None:
    with pytest.raises(RequestError, match="source is a int; it must be a chat or a model"):
        SamplerPanel(5)  # type: ignore[arg-type]


def test_j11_the_saved_form_is_a_table_of_the_values(panel: SamplerPanel) -> None:
    panel._source.set(temperature=0.25, stop=["<b>"], spec_window=("slot", 0.6, 1))
    bundle = panel.saved().bundle()
    assert re.search(r"Temperature +0\.25 +1\n", bundle["text/plain"])
    assert "by confidence, tau 0.6, at least 1" in bundle["text/plain"] and "drawn each time" in bundle["text/plain"]
    assert "chat.set(temperature=0.25, stop=['<b>']" in bundle["text/plain"]
    assert "<b>" not in bundle["text/html"] and "&lt;b&gt;" in bundle["text/html"]


def test_a_closed_panel_follows_no_more(model: Model, panel_of: Callable[..., SamplerPanel]) -> None:
    chat = model.chat()
    panel = panel_of(chat)
    panel.close()
    chat.set(temperature=0.1)
    assert chat._on_set == [] and chat._callbacks == []


def test_what_the_panel_shows_is_what_a_request_gets(model: Model) -> None:
    usual = defaults(model.limits)
    config = model.prepare("hi").config
    for name in ("temperature", "top_p", "top_k", "min_p", "sampler", "penalty_last_n", "penalty_scope"):
        assert usual[name] == getattr(config, name)
    assert given(Options(**{name: value for name, value in usual.items() if name != "seed"}), model.limits) == {}
