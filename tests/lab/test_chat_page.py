"""The chat's page in a browser without Jupyter, its kernel played by the test."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.lab

STATIC = Path(__file__).parents[2] / "dsv4nb/widgets/static"

SET_UP = """async ([script, style]) => {
  document.body.innerHTML = "";
  document.head.innerHTML = "";
  document.head.append(Object.assign(document.createElement("style"), { textContent: style }));
  const { default: chat } = await import(URL.createObjectURL(new Blob([script], { type: "text/javascript" })));
  const traits = { title: "toy", status: "idle", run: 0, thinking: false, examples: ["Hello?"],
    transcript: { ended: 0, turns: [] } };
  const heard = new Map();
  const of = (name) => heard.get(name) ?? heard.set(name, new Set()).get(name);
  const model = {
    get: (name) => traits[name], send: (message) => sent.push(message),
    on: (name, handler) => of(name).add(handler), off: (name, handler) => of(name).delete(handler),
  };
  const sent = (window.sent = []);
  window.say = (message) => of("msg:custom").forEach((handler) => handler(message));
  window.put = (name, value) => { traits[name] = value; of(`change:${name}`).forEach((handler) => handler()); };
  window.listeners = () => [...heard.values()].reduce((n, handlers) => n + handlers.size, 0);
  window.show = () => {
    const el = document.body.appendChild(document.createElement("div"));
    closers.push(chat.render({ model, el }));
  };
  const closers = (window.closers = []);
  window.frames_ = (run, start, texts) => say({ kind: "frame", run, start, tokens: texts.map((t) => ["c", t]) });
  window.settled = () => new Promise((go) => requestAnimationFrame(() => requestAnimationFrame(go)));
}"""

# pixels between what is in sight and the end
LEFT = """(() => {
  const log = document.querySelector(".dsv4-log");
  return log.scrollHeight - log.scrollTop - log.clientHeight;
})()"""
HOSTILE = "<script>window.hit = 1</script><img src=x onerror='window.hit = 1'>[a](javascript:alert(1))"


@pytest.fixture
def page(blank: Any) -> Any:
    blank.goto("about:blank")
    blank.evaluate(SET_UP, [(STATIC / "chat.js").read_text(), (STATIC / "chat.css").read_text()])
    return blank


def answers(page: Any) -> list[str]:
    page.evaluate("settled()")
    return [str(text) for text in page.locator(".dsv4-answer").all_text_contents()]


def sent(page: Any, kind: str) -> list[dict[str, Any]]:
    return [message for message in page.evaluate("window.sent") if message["kind"] == kind]


def test_two_views_agree_though_pieces_are_lost_and_repeated(page: Any) -> None:
    page.evaluate("show(); say({ kind: 'begin', run: 1, user: 'q', command: '' }); frames_(1, 0, ['a', 'b'])")
    page.evaluate("show(); frames_(1, 2, ['c']); frames_(1, 2, ['c']); frames_(1, 0, ['a'])")
    asked = len(sent(page, "resync"))  # in the same moment: half a second later a view may ask again
    page.wait_for_function("document.querySelector('.dsv4-answer').textContent !== 'ab'")
    assert answers(page) == ["abc"], "the late view does not show the middle of a text"
    assert asked == 2, "each view asked when it came, and not again at once"
    page.evaluate(
        "say({ kind: 'snapshot', run: 1, user: 'q', command: '', next: 3, reasoning: '', text: 'abc',"
        " n_reasoning: 0, cards: [], is_calling: false })"
    )
    page.evaluate("frames_(1, 3, ['d'])")
    assert answers(page) == ["abcd", "abcd"]


def test_what_render_attaches_its_end_detaches(page: Any) -> None:
    page.evaluate("show(); show()")
    both = page.evaluate("listeners()")
    page.evaluate("closers[0]()")
    assert page.evaluate("listeners()") == both / 2
    page.evaluate("document.querySelector('.dsv4-example').click()")
    assert sent(page, "send") == [], "a view that has ended sends nothing"
    page.evaluate("closers[1]()")
    assert page.evaluate("listeners()") == 0


def test_a_double_click_is_one_question_and_no_stop(page: Any) -> None:
    page.evaluate("show()")
    page.locator(".dsv4-input").fill("hello")
    page.locator(".dsv4-send").dblclick()
    assert [message["text"] for message in sent(page, "send")] == ["hello"]
    assert sent(page, "stop") == []


def test_stop_before_the_kernel_answered_names_the_question(page: Any) -> None:
    page.evaluate("show()")
    page.locator(".dsv4-input").fill("hello")
    page.keyboard.press("Enter")
    page.locator(".dsv4-send").get_by_text("Stop").wait_for()
    page.keyboard.press("Escape")
    (question,), (stop,) = sent(page, "send"), sent(page, "stop")
    assert (stop["command"], stop["run"]) == (question["id"], 0)
    page.evaluate(
        "id => say({ kind: 'ack', id, ok: false, error: 'stopped before it was sent', trace: '' })", question["id"]
    )
    page.evaluate("settled()")
    assert page.locator(".dsv4-input").input_value() == "hello"
    assert page.locator(".dsv4-status").text_content() == "Not sent."
    assert not page.locator(".dsv4-alert").is_visible()


def test_a_silent_kernel_is_told_and_stop_takes_the_message_back(page: Any) -> None:
    page.evaluate("show()")
    page.locator(".dsv4-input").fill("hello")
    page.keyboard.press("Enter")
    page.wait_for_timeout(5_500)
    first, again = sent(page, "send")
    assert first == again, "repeated once, with its id"
    assert "has not answered" in page.locator(".dsv4-alert").text_content()
    page.keyboard.press("Escape")
    page.wait_for_timeout(100)
    assert page.locator(".dsv4-input").input_value() == "hello"
    assert page.locator(".dsv4-turn").count() == 0


def test_what_a_model_writes_is_text(page: Any) -> None:
    page.evaluate("show(); say({ kind: 'begin', run: 1, user: 'q', command: '' })")
    page.evaluate(
        "text => say({ kind: 'frame', run: 1, start: 0, tokens: [['r', text], ['c', text], ['t', text]] })", HOSTILE
    )
    page.evaluate(
        """text => say({ kind: 'call', run: 1, index: 0, card: { name: text, arguments: text, is_long: false,
          state: 'failed', status: text, result: text, preview: text } })""",
        HOSTILE,
    )
    page.wait_for_timeout(200)
    assert page.evaluate("window.hit") is None
    assert answers(page) == [HOSTILE]
    card = page.locator(".dsv4-card")
    assert card.locator(".dsv4-card-name").text_content() == HOSTILE
    assert card.locator(".dsv4-card-status").text_content() == HOSTILE
    assert card.locator(".dsv4-code").all_text_contents() == [HOSTILE] * 2
    assert page.locator(".dsv4-log").text_content().count(HOSTILE) == 7, "not what a call is written in"
    assert page.locator(".dsv4-log :is(script, img, a)").count() == 0


def test_a_card_changes_in_place_and_stays_as_it_was_folded(page: Any) -> None:
    card = (
        "{ name: 'f', arguments: '{\"a\": 1}', is_long: true, state: 'STATE', status: 'STATE',"
        " result: 'RESULT', preview: 'RESULT' }"
    )
    say = f"say({{ kind: 'call', run: 1, index: 0, card: {card} }})"
    page.evaluate("show(); say({ kind: 'begin', run: 1, user: 'q', command: '' })")
    page.evaluate(say.replace("STATE", "running").replace("RESULT", ""))
    page.evaluate("settled()")
    folds = page.locator(".dsv4-fold")
    assert [fold.get_attribute("open") for fold in folds.all()] == [None, None], "long arguments are folded"
    assert not folds.last.is_visible(), "no result yet"
    folds.first.locator("summary").click()
    page.evaluate(say.replace("STATE", "answered").replace("RESULT", "21"))
    page.evaluate("settled()")
    assert [fold.get_attribute("open") for fold in folds.all()] == ["", None]
    assert folds.last.locator("summary").text_content() == "Result21"
    assert page.locator(".dsv4-card").count() == 1
    turn = (
        "{ user: 'q', reasoning: '', text: '', cards: [], is_calling: true, stop_reason: 'cancelled', n_tokens: 1,"
        " n_reasoning: 0, seconds: 0, footer: '1 token · 4 cached', error: '' }"
    )
    page.evaluate(f"put('transcript', {{ ended: 1, turns: [{turn}] }})")
    page.evaluate("settled()")
    assert page.locator(".dsv4-card").count() == 0
    marks = page.locator(".dsv4-mark:visible").all_text_contents()
    assert marks == ["An incomplete tool call", "Stopped"]
    assert page.locator(".dsv4-facts").text_content() == "1 token · 4 cached"


def test_an_error_stands_in_its_turn_as_an_alert(page: Any) -> None:
    turn = (
        "{ user: 'q', reasoning: '', text: 'half', cards: [], is_calling: false, stop_reason: null, n_tokens: 1,"
        " n_reasoning: 0, seconds: 0, footer: '1 token', error: 'out of memory' }"
    )
    page.evaluate("show(); say({ kind: 'begin', run: 1, user: 'q', command: '' }); frames_(1, 0, ['half'])")
    page.evaluate(f"put('transcript', {{ ended: 1, turns: [{turn}] }})")
    assert answers(page) == ["half"]
    assert page.locator(".dsv4-turn [role=alert]").text_content() == "Failed: out of memory"
    assert page.locator(".dsv4-status").text_content() == "Failed."


def test_the_text_grows_in_place(page: Any) -> None:
    """A selection in the answer survives the next piece."""
    page.evaluate("show(); say({ kind: 'begin', run: 1, user: 'q', command: '' }); frames_(1, 0, ['hello '])")
    answers(page)
    page.evaluate("window.node = document.querySelector('.dsv4-answer p').firstChild")
    page.evaluate("getSelection().setBaseAndExtent(node, 0, node, 5)")
    page.evaluate("frames_(1, 1, ['world'])")
    assert answers(page) == ["hello world"]
    assert page.evaluate("getSelection().toString()") == "hello"
    assert page.evaluate("document.querySelector('.dsv4-answer p').firstChild === node")


def test_the_end_is_followed_only_by_a_reader_who_is_there(page: Any) -> None:
    page.evaluate("show(); say({ kind: 'begin', run: 1, user: 'q', command: '' })")
    page.evaluate("frames_(1, 0, Array.from({ length: 200 }, (_, i) => `line ${i}\\n`))")
    answers(page)
    assert page.evaluate(LEFT) < 2
    page.evaluate("document.querySelector('.dsv4-log').scrollTop = 100")
    page.wait_for_timeout(100)
    page.evaluate("frames_(1, 200, ['more\\n'])")
    answers(page)
    assert page.evaluate("document.querySelector('.dsv4-log').scrollTop") == 100


def test_the_end_is_followed_though_the_text_shrinks_above_it(page: Any) -> None:
    page.evaluate("show(); say({ kind: 'begin', run: 1, user: 'q', command: '' })")
    page.evaluate("frames_(1, 0, Array.from({ length: 200 }, (_, i) => `line ${i}\\n`))")
    answers(page)
    # a hidden block is found smaller, which pulls the reader up, and another grows before the page tells of it
    page.evaluate(
        """async () => {
          const log = document.querySelector(".dsv4-log");
          const block = document.createElement("div");
          block.style.height = "900px";
          log.prepend(block);
          log.scrollTop = log.scrollHeight;
          await settled();
          block.style.height = "0px";
          log.scrollTop -= 1; // where the end is by now, but for a pixel
          log.lastElementChild.style.paddingBottom = "400px";
          await settled();
        }"""
    )
    page.evaluate("frames_(1, 200, ['more\\n'])")
    answers(page)
    assert page.evaluate(LEFT) < 2


def test_an_unfinished_word_of_an_input_method_is_not_sent(page: Any) -> None:
    page.evaluate("show()")
    page.locator(".dsv4-input").fill("こん")
    page.evaluate(
        """() => document.querySelector(".dsv4-input").dispatchEvent(
          new KeyboardEvent("keydown", { key: "Enter", isComposing: true, bubbles: true }))"""
    )
    assert sent(page, "send") == []


def test_a_press_on_stop_counts_though_the_text_moves_the_button_away(page: Any) -> None:
    page.evaluate("show(); put('status', 'running'); say({ kind: 'begin', run: 1, user: 'q', command: '' })")
    page.evaluate("frames_(1, 0, ['a']); settled()")
    button = page.get_by_role("button", name="Stop", exact=True)
    for is_released_there in (False, True):
        box = button.bounding_box()
        page.mouse.move(box["x"] + 9, box["y"] + 9)
        page.mouse.down()
        page.evaluate("n => frames_(1, n, ['\\n\\nb'.repeat(3)])", 2 if is_released_there else 1)
        moved = "y => document.querySelector('.dsv4-send').getBoundingClientRect().top > y"
        page.wait_for_function(moved, arg=box["y"] + 40)
        if not is_released_there:
            page.mouse.move(box["x"] + 9, box["y"] - 90)
        page.mouse.up()
        assert len(sent(page, "stop")) == is_released_there, "released elsewhere, a press is taken back"
    button.click()
    assert len(sent(page, "stop")) == 2, "one for each press"


def test_a_fault_is_told_with_where_it_comes_from(page: Any) -> None:
    page.evaluate("show()")
    page.locator(".dsv4-input").fill("hello")
    page.keyboard.press("Enter")
    (question,) = sent(page, "send")
    said = {
        "kind": "ack",
        "id": question["id"],
        "ok": False,
        "error": "KeyError: 'x'",
        "trace": f"Traceback\n{HOSTILE}",
    }
    page.evaluate("said => say(said)", said)
    alert = page.get_by_role("alert")
    assert alert.inner_text().startswith("Not sent: KeyError: 'x'")
    trace = alert.locator("pre")
    assert not trace.is_visible()
    alert.get_by_text("Show traceback").press("Enter")
    assert trace.text_content() == said["trace"], "as text"
    page.locator(".dsv4-input").fill("again")
    page.keyboard.press("Enter")
    page.evaluate("settled()")
    assert not alert.is_visible()


def test_replies_are_announced_sentence_by_sentence_when_asked(page: Any) -> None:
    page.evaluate("show()")
    switch = page.get_by_role("button", name="Announce replies")
    assert switch.bounding_box()["width"] < 4, "seen by who comes to it with the keyboard"
    switch.focus()
    page.keyboard.press("Shift+Tab")
    page.keyboard.press("Tab")
    assert switch.bounding_box()["width"] > 50
    page.keyboard.press("Enter")
    assert switch.get_attribute("aria-pressed") == "true"
    page.evaluate(
        """() => {
          window.said = [];
          const region = document.querySelector(".dsv4-unseen[aria-live=polite]");
          new MutationObserver(() => said.push(region.textContent)).observe(region, { childList: true, subtree: true });
        }"""
    )
    page.evaluate(
        "say({ kind: 'begin', run: 1, user: 'q', command: '' }); frames_(1, 0, ['It is **Par', 'is**. A', 'nd'])"
    )
    page.wait_for_function("said.length > 0")
    page.evaluate("frames_(1, 3, [' more']); settled()")
    assert page.evaluate("said") == ["It is Paris."], "a sentence that goes on is waited for"
    page.evaluate(
        """() => {
          const turn = { user: "q", reasoning: "", text: "It is **Paris**. And more", cards: [], is_calling: false,
            stop_reason: "end", n_tokens: 4, n_reasoning: null, reasoning_s: null, seconds: 1, is_timed: false,
            footer: "", error: "", number: 0, siblings: [0] };
          put("transcript", { ended: 1, turns: [turn] });
        }"""
    )
    page.wait_for_function("said.length > 1")
    assert page.evaluate("said") == ["It is Paris.", "And more"]
