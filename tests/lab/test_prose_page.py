"""How a reply's text is shown: as markdown, while it comes and afterwards, however long it is."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.lab

HERE = Path(__file__).parent
STATIC = HERE.parents[1] / "dsv4nb/widgets/static"

REPLY = (HERE.parent / "data/reply.md").read_text()


def open_page(page: Any, *, maths: bool = True, theme: str = "light") -> None:
    page.set_content(f'<!doctype html><html theme="{theme}"><title>chat</title>')
    files = [STATIC / "chat.js", STATIC / "chat.css", *([STATIC / "maths.js"] if maths else [])]
    page.evaluate((HERE / "prose_page.js").read_text(), [file.read_text() for file in files])


@pytest.fixture
def page(blank: Any) -> Any:
    blank.set_viewport_size({"width": 1000, "height": 860})
    blank.set_default_timeout(5_000)
    open_page(blank)
    blank.evaluate("show()")
    return blank


def ended(page: Any, *texts: str) -> None:
    page.evaluate("texts => turns_(1, texts.map((text) => ({ text })))", list(texts))
    page.evaluate("painted()")


def set_formulas(page: Any) -> None:
    page.locator(".dsv4-answer math").first.wait_for(state="attached")


def count(page: Any, selector: str) -> int:
    return int(page.locator(f".dsv4-answer {selector}").count())


def test_markdown_is_shown_as_elements(page: Any) -> None:
    ended(page, REPLY)
    set_formulas(page)
    assert page.locator(".dsv4-answer h3").text_content() == "Roots"
    assert page.locator(".dsv4-answer math").count() == 2, "and no price"
    assert "between $5 and $6" in page.locator(".dsv4-answer").text_content()
    assert page.locator(".dsv4-answer a").evaluate(
        "it => [it.href, it.target, it.rel, it.dataset.lmSuppressShortcuts]"
    ) == [
        "https://docs.python.org/3/",
        "_blank",
        "noopener noreferrer nofollow",
        "true",
    ]
    assert page.locator(".dsv4-lang").all_text_contents() == ["python", "json"]
    assert count(page, ".hljs-keyword") > 2 and count(page, ".hljs-attr") == 2
    assert page.locator(".dsv4-answer ol > li > ul > li").all_text_contents() == ["nested bold", "☑ done", "☐ not done"]
    assert page.locator(".dsv4-answer td").all_text_contents()[:4] == ["naive", "nonever", "1.0", "a<b"]
    assert page.locator(".dsv4-answer blockquote code").text_content() == "code"
    assert count(page, "hr") == 1 and count(page, "b, img") == 0
    assert "a cat (https://x.invalid/cat.png) are text" in page.locator(".dsv4-answer").text_content()


def test_a_text_that_comes_in_pieces_is_shown_as_at_once(page: Any) -> None:
    texts = [REPLY, REPLY.replace("\n", "\r\n"), "- a\n\n- b\n\n2\n\n3. c\n\n```py\nx\n\ny\n```\n$$\nz\n$$ no\n\n$$w$$"]
    ended(page, *texts)
    set_formulas(page)
    whole = page.evaluate("[...document.querySelectorAll('.dsv4-answer')].map((it) => it.innerHTML)")
    for text, at_once in zip(texts, whole, strict=True):
        for size in (1, 7, 300):
            open_page(page)
            pieces = [text[i : i + size] for i in range(0, len(text), size)]
            page.evaluate(
                """async (pieces) => {
                  show();
                  begin_(1);
                  for (const [i, piece] of pieces.entries()) {
                    frame_(1, i, [piece]);
                    if (i % 25 === 0) await painted();
                  }
                }""",
                pieces,
            )
            ended(page, text)
            set_formulas(page)
            assert page.evaluate("answer().innerHTML") == at_once, size


def test_a_block_that_is_finished_is_not_touched_again(page: Any) -> None:
    page.evaluate("begin_(1)")
    touched = page.evaluate(
        """async (text) => {
          const touched = [];
          const watched = new Set();
          for (let at = 0; at < text.length; at += 9) {
            frame_(1, at / 9, [text.slice(at, at + 9)]);
            await new Promise(requestAnimationFrame);
            for (const block of document.querySelectorAll(".dsv4-answer .dsv4-block.is-done")) {
              if (watched.has(block)) continue;
              watched.add(block);
              const all = { subtree: true, childList: true, characterData: true, attributes: true };
              const watch = new MutationObserver((found) => touched.push(...found.map((it) => it.target.nodeName)));
              watch.observe(block, all);
            }
          }
          turns_(1, [{ text }]);
          await painted();
          return [watched.size, touched];
        }""",
        "$x$ is set.\n\n" + REPLY.split("$$")[2],
    )
    assert touched[0] >= 6
    assert touched[1] == []


def test_code_is_copied_by_keyboard(page: Any) -> None:
    ended(page, "```python\nx = 1\n\nif x:\n    print('<b>')\n```")
    button = page.get_by_role("button", name="Copy code")
    button.focus()
    page.keyboard.press("Enter")
    page.locator(".dsv4-copy").get_by_text("Copied").wait_for()
    assert page.evaluate("document.activeElement.className") == "dsv4-copy"
    page.locator(".dsv4-input").focus()
    page.keyboard.press("Control+V")
    assert page.locator(".dsv4-input").input_value() == "x = 1\n\nif x:\n    print('<b>')"
    button.wait_for()


def test_what_is_wide_scrolls_by_itself(page: Any) -> None:
    page.set_viewport_size({"width": 480, "height": 800})
    table = "".join("|" + cell * 12 + "\n" for cell in (" heading |", "---|", " some_value |"))
    ended(
        page,
        REPLY,
        table,
        "x" * 400,
        f"`{'y' * 400}`",
        "$" + "+".join(["a"] * 200) + "$\n\n$$" + "+".join(["b"] * 200) + "$$",
    )
    set_formulas(page)
    wide = page.evaluate(
        """() => [...document.querySelectorAll(".dsv4-panel, .dsv4-turn, .dsv4-block")]
          .filter((it) => it.scrollWidth > it.clientWidth + 1 && getComputedStyle(it).overflowX !== "auto")
          .map((it) => it.className + it.textContent.slice(0, 30))"""
    )
    assert wide == []
    assert page.locator(".dsv4-log").evaluate("it => it.scrollWidth <= it.clientWidth")
    for frame in (page.locator(".dsv4-answer pre").first, page.locator(".dsv4-answer .dsv4-wide").last):
        assert frame.evaluate("it => it.scrollWidth > it.clientWidth")
        frame.focus()
        page.keyboard.press("ArrowRight")
        page.wait_for_function("it => it.scrollLeft > 0", arg=frame.element_handle())


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_every_word_has_contrast(blank: Any, theme: str) -> None:
    open_page(blank, theme=theme)
    blank.evaluate("show()")
    listings = [
        "python\n@f\ndef g(x: int): # c\n    return f'{x}' + str(1) + r'\\n'",
        "diff\n- a\n+ b\n@@ 1 @@",
        "yaml\n# c\na: [1, true]\nb: &x 'y'",
        "sql\nSELECT count(*) FROM t WHERE a = 'b' -- c",
        "cpp\n#include <a>\ntemplate <class T> T f(T& x) { return x->y + 1.0f; } /* c */",
        'bash\nfor i in $(ls); do echo "$i"; done # c',
        "javascript\nconst a = /x/g; class B extends C {}",
    ]
    ended(blank, REPLY + "\n\n".join(f"```{listing}\n```" for listing in listings))
    set_formulas(blank)
    low = blank.evaluate(
        """() => {
          const paint = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
          const over = (colors) => {
            paint.clearRect(0, 0, 1, 1);
            for (const color of colors) { paint.fillStyle = color; paint.fillRect(0, 0, 1, 1); }
            return [...paint.getImageData(0, 0, 1, 1).data].slice(0, 3);
          };
          const light = (rgb) => {
            const linear = (v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
            const [r, g, b] = rgb.map((v) => linear(v / 255));
            return 0.2126 * r + 0.7152 * g + 0.0722 * b;
          };
          const low = [];
          for (const node of document.querySelectorAll(".dsv4-answer *")) {
            if (![...node.childNodes].some((it) => it.nodeType === 3 && it.data.trim())) continue;
            const behind = [];
            for (let it = node; it; it = it.parentElement) behind.unshift(getComputedStyle(it).backgroundColor);
            const [a, b] = [over(behind), over([...behind, getComputedStyle(node).color])].map(light);
            const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
            if (ratio < 4.5) low.push(`${node.className || node.nodeName} ${ratio.toFixed(2)}`);
          }
          return low;
        }"""
    )
    assert low == []


def test_what_sets_formulas_is_asked_for_once_and_only_when_there_is_one(page: Any) -> None:
    asked = "sent.filter((message) => message.kind === 'maths').length"
    ended(page, "It costs $5 or $6.", "`$x$`")
    assert page.evaluate(asked) == 0
    ended(page, "It costs $5 or $6.", "`$x$`", "$x$ and \\(y\\)", "\\[z\\]")
    set_formulas(page)
    page.evaluate("painted()")
    assert page.locator("math").count() == 3 and page.evaluate(asked) == 1
    bad = "$\\frac{1}$ and $\\undefined$"
    ended(page, bad)
    sources = page.locator(".dsv4-answer code.dsv4-tex")
    assert sources.all_text_contents() == ["\\frac{1}", "\\undefined"], "what cannot be set is shown as it was written"
    assert "Undefined control sequence" in sources.last.get_attribute("title")


def test_without_a_kernel_a_formula_is_its_source(blank: Any) -> None:
    open_page(blank, maths=False)
    blank.evaluate("show()")
    ended(blank, "Here $x^2$ is.")
    assert blank.locator(".dsv4-answer").text_content() == "Here x^2 is."
    assert blank.locator(".dsv4-answer code.dsv4-tex").text_content() == "x^2"


def test_the_fold_counts_tokens_and_seconds(page: Any) -> None:
    summary = page.locator(".dsv4-summary").first
    page.evaluate("begin_(1); frame_(1, 0, ['hm '], 'r')")
    page.wait_for_timeout(300)
    page.evaluate("frame_(1, 1, ['so ', 'it is'], 'r')")
    page.evaluate("painted()")
    live = re.fullmatch(r"Thinking… 3 tokens, (\d\.\d) s", summary.text_content())
    assert live and 0.2 <= float(live[1]) <= 5
    page.evaluate("frame_(1, 3, ['4.'])")
    page.evaluate("painted()")
    then = summary.text_content()
    page.wait_for_timeout(300)
    page.evaluate("frame_(1, 4, [' So.'])")
    page.evaluate("painted()")
    assert summary.text_content() == then and then.startswith("Thought for 3 tokens, ")
    page.evaluate("turns_(1, [{ text: '4. So.', reasoning: '**hm** so it is', n_reasoning: 3, reasoning_s: 2.14 }])")
    page.evaluate("painted()")
    assert summary.text_content() == "Thought for 3 tokens, 2.1 s"
    assert page.locator(".dsv4-reasoning strong").text_content() == "hm"
    page.evaluate("turns_(2, [{ text: '4.' }, { text: '5.', reasoning: '**well**', n_reasoning: 1 }])")
    page.evaluate("painted()")
    reasoning = page.locator(".dsv4-reasoning").last
    assert reasoning.inner_html() == "**well**", "nobody looks"
    page.locator(".dsv4-thought .dsv4-summary").last.click()
    reasoning.locator("strong").wait_for()


def test_thousands_of_turns_are_set_as_they_come_into_sight(page: Any) -> None:
    seen = page.evaluate(
        """async (reply) => {
          const turn = (_, i) => ({ user: `question ${i}`, text: `Answer ${i}\\n\\n${reply}` });
          const turns = Array.from({ length: 2000 }, turn);
          const log = document.querySelector(".dsv4-log");
          const left = () => log.scrollHeight - log.scrollTop - log.clientHeight;
          const began = performance.now();
          turns_(1, turns);
          await new Promise(requestAnimationFrame);
          const isSet = [...document.querySelectorAll(".dsv4-answer")].at(-1).querySelector("h3") !== null;
          await painted();
          const first = performance.now() - began;
          const before = [document.querySelectorAll(".dsv4-block").length, left()];
          for (let n = -1; n !== (n = document.querySelectorAll(".dsv4-block").length); ) {
            await new Promise((go) => setTimeout(go, 200)); // what is near is being set
          }
          const changed = [];
          const all = { subtree: true, childList: true, characterData: true, attributes: true };
          const watch = new MutationObserver((found) => changed.push(...found.map((it) => it.target)));
          for (const it of document.querySelectorAll(".dsv4-turn")) watch.observe(it, all);
          turns_(2, [...turns, { text: "one more" }]);
          begin_(3);
          const frames = [];
          for (let i = 0; i < 60; i += 1) {
            const from = performance.now();
            frame_(3, i, ["word "]);
            await new Promise(requestAnimationFrame);
            await new Promise((go) => setTimeout(go));
            frames.push(performance.now() - from);
          }
          const after = left();
          watch.disconnect();
          const touched = new Set(changed.map((it) => it.closest(".dsv4-turn"))).size;
          const rewritten = changed.filter((it) => it.closest(".dsv4-prose, .dsv4-bubble")).length;
          log.scrollTop = 0;
          const topmost = document.querySelector(".dsv4-answer");
          const isPlain = topmost.querySelector("h3") === null;
          for (let i = 0; i < 100 && !topmost.querySelector("h3"); i += 1) await painted();
          const top = isPlain && topmost.querySelector("h3") !== null;
          frames.sort((a, b) => a - b);
          return { first, isSet, before, touched, rewritten, frame: frames[30], after, top };
        }""",
        REPLY,
    )
    print({name: value for name, value in seen.items() if name in ("first", "frame")})
    n_blocks, left = seen["before"]
    assert 0 < n_blocks < 500, "of 28,000 blocks"
    assert left < 2 and seen["after"] < 2, "the end stays in sight while sizes become known"
    assert seen["isSet"], "what is seen first is set before anything is painted"
    assert seen["rewritten"] == 0, "what has not changed is not touched"
    assert seen["touched"] <= 3, "only the last turns offer something else than before"
    assert seen["top"], "a turn is set when it comes into sight"
    assert seen["frame"] < 50
    assert seen["first"] < 4000


@pytest.mark.parametrize("kind", ["prose", "code", "list"])
def test_a_reply_of_100_000_characters_stays_smooth(page: Any, kind: str) -> None:
    text = {
        "prose": REPLY * 100,
        "code": "```python\n" + "def f(x):\n    return x + 1  # comment\n\n" * 3000,
        "list": "".join(f"{i}. item number {i} with **bold**\n" for i in range(1, 3500)),
    }[kind][:100_000]
    seen = page.evaluate(
        """async (text) => {
          begin_(1);
          await painted();
          const frames = [];
          for (let at = 0, k = 0; at < text.length; at += 250) {
            const piece = (_, i) => text.slice(at + 10 * i, at + 10 * i + 10);
            const pieces = Array.from({ length: 25 }, piece).filter(Boolean);
            const from = performance.now();
            frame_(1, k, pieces);
            k += pieces.length;
            await new Promise(requestAnimationFrame);
            await new Promise((go) => setTimeout(go));
            frames.push(performance.now() - from);
          }
          const from = performance.now();
          turns_(1, [{ text }]);
          await painted();
          frames.sort((a, b) => a - b);
          const log = document.querySelector(".dsv4-log");
          const left = log.scrollHeight - log.scrollTop - log.clientHeight;
          return { p50: frames[frames.length >> 1], p95: frames[Math.floor(0.95 * frames.length)], left,
                   end: performance.now() - from };
        }""",
        text,
    )
    print(kind, seen)
    assert seen["p50"] < 34, "thirty frames a second"
    assert seen["p95"] < 100, "what a click may wait"
    assert seen["end"] < 500 and seen["left"] < 2
