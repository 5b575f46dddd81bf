"""J-12: whatever a model writes, nothing of it runs, is fetched or goes anywhere."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.lab

HERE = Path(__file__).parent
WIDGETS = HERE.parents[1] / "dsv4nb/widgets"
STATIC = WIDGETS / "static"
PAYLOADS = json.loads((HERE.parent / "data/untrusted.json").read_text())

# what may stand where a model's text is shown, and what it may carry
WATCH = """() => {
  const tags = ("P H3 H4 H5 H6 PRE CODE BLOCKQUOTE UL OL LI HR BR TABLE THEAD TBODY TR TH TD STRONG EM DEL A DIV SPAN"
    + " BUTTON math mrow mi mn mo ms mtext mspace msup msub msubsup mfrac mroot msqrt mtable mtr mtd mlabeledtr mover"
    + " munder munderover mpadded mphantom menclose mstyle").split(" ");
  const ours = /^(?:dsv4-[a-z-]+|is-done|hljs-[a-z][a-z_-]*|[a-z]+_+)$/;
  const plain = {
    role: /^group$/, "aria-label": /^(?:Code(?:, [\\w+#.-]{1,20})?|Table)$/, "aria-live": /^polite$/,
    tabindex: /^0$/, type: /^button$/,
    "data-lm-suppress-shortcuts": /^true$/, start: /^\\d+$/, align: /^(?:left|center|right)$/,
  };
  const link = { href: /^(?:https?:|mailto:)/, target: /^_blank$/, rel: /^noopener noreferrer nofollow$/ };
  window.wrong = (root) => {
    const wrong = [];
    for (const node of root.querySelectorAll("*")) {
      const isMaths = node.namespaceURI === "http://www.w3.org/1998/Math/MathML";
      if (!tags.includes(node.nodeName)) wrong.push(node.nodeName);
      for (const { name, value } of node.attributes) {
        const allowed = { ...plain, ...(node.nodeName === "A" ? link : {}) }[name];
        if (name === "class" ? value.split(" ").every((it) => ours.test(it)) : allowed?.test(value)) continue;
        const isHarmless = /^[a-z]+$/.test(name) && !/^(?:on|href|src|style|id|class)/.test(name);
        if (isMaths && isHarmless && !value.includes(":")) continue;
        if (node.className === "dsv4-tex" || node.className === "dsv4-tex dsv4-display") {
          if (name === "title") continue; // why it is no formula: text
        }
        wrong.push(`${node.nodeName}[${name}=${value.slice(0, 40)}]`);
      }
    }
    return wrong;
  };
  window.open = () => { window.hit = "window.open"; };
  window.alert = window.confirm = window.prompt = () => { window.hit = "dialog"; };
  const soon = (job) => { // the test paints as often as it can
    const { port1, port2 } = new MessageChannel();
    port1.onmessage = job;
    port2.postMessage(0);
    return 1;
  };
  window.requestAnimationFrame = soon;
  window.painted = () => new Promise((go) => soon(() => soon(go)));
}"""


@pytest.fixture
def page(blank: Any) -> Iterator[Any]:
    asked: list[str] = []

    def log(request: Any) -> None:
        if not request.url.startswith(("blob:", "about:")):
            asked.append(request.url)

    said: list[str] = []

    def closed(dialog: Any) -> None:
        said.append(dialog.message)
        dialog.dismiss()

    blank.set_default_timeout(5_000)
    blank.set_content("<!doctype html><title>chat</title>")
    blank.on("request", log)
    blank.on("dialog", closed)
    blank.evaluate(WATCH)
    yield blank
    blank.wait_for_timeout(300)
    blank.remove_listener("request", log)
    blank.remove_listener("dialog", closed)
    assert asked == [], "nothing is fetched"
    assert said == [], "nothing asks"
    assert blank.url == "about:blank" and len(blank.context.pages) == 1, "nothing goes anywhere"
    assert blank.evaluate(
        "[window.hit, document.title, document.querySelectorAll('base, meta, head link').length]"
    ) == [
        None,
        "chat",
        0,
    ], "nothing runs"


def test_the_list_is_long_and_says_nothing_twice() -> None:
    assert len(PAYLOADS) >= 204
    assert len({payload["text"] for payload in PAYLOADS}) == len(PAYLOADS)
    assert len({payload["technique"] for payload in PAYLOADS}) >= 20


def test_a_chat_shows_it_in_pieces_and_whole_and_nothing_happens(page: Any) -> None:
    files = [STATIC / "chat.js", STATIC / "chat.css", STATIC / "maths.js"]
    page.evaluate((HERE / "prose_page.js").read_text(), [file.read_text() for file in files])
    page.evaluate(WATCH)
    page.evaluate("show()")
    page.evaluate("turns_(1, [{ text: '$x$' }])")
    page.locator("math").first.wait_for(state="attached")
    wrong = page.evaluate(
        """async (payloads) => {
          const wrong = [];
          const look = (text, root) => { for (const it of wrong_(root)) wrong.push([text, it]); };
          const wrong_ = window.wrong;
          let run = 1;
          for (const { text } of payloads) {
            run += 1;
            begin_(run);
            const size = Math.max(1, Math.ceil(text.length / 12));
            for (let at = 0, k = 0; at < text.length; at += size, k += 2) {
              const piece = text.slice(at, at + size);
              say({ kind: "frame", run, start: k, tokens: [["r", piece], ["c", piece]] });
              await painted();
              document.querySelectorAll(".dsv4-prose").forEach((it) => look(text, it));
            }
            const said = { name: text, arguments: text, status: text, result: text, preview: text };
            const card = { ...said, id: "c", is_long: false, state: "failed" };
            turns_(run, [{ user: text, text, reasoning: text, error: text, footer: text, cards: [card] }]);
            await painted();
            document.querySelectorAll(".dsv4-prose").forEach((it) => look(text, it));
          }
          turns_(run + 1, payloads.map(({ text }) => ({ user: text, text, reasoning: text })));
          await painted();
          for (const turn of document.querySelectorAll(".dsv4-turn")) turn.scrollIntoView();
          document.querySelectorAll("details").forEach((it) => (it.open = true));
          for (const prose of document.querySelectorAll(".dsv4-prose")) {
            prose.scrollIntoView();
            await new Promise((go) => setTimeout(go, 5)); // what comes into sight is set
          }
          document.querySelectorAll(".dsv4-prose").forEach((it) => look("at the end", it));
          return wrong;
        }""",
        PAYLOADS,
    )
    assert wrong == []
    foreign = "script, iframe, object, embed, img, image, video, audio, form, style, link, meta, base"
    assert page.locator(".dsv4-log").locator(foreign).count() == 0
    assert page.locator(".dsv4-log .dsv4-block").count() > len(PAYLOADS), "all were shown"
    names = page.evaluate("[...document.querySelectorAll('.dsv4-log *')].flatMap((it) => it.getAttributeNames())")
    assert len(names) > 1000 and not [name for name in names if name.startswith("on") or name in ("style", "src")]


def test_what_is_shown_as_text_is_what_was_written(page: Any) -> None:
    page.evaluate(
        (HERE / "prose_page.js").read_text(), [(STATIC / name).read_text() for name in ("chat.js", "chat.css")]
    )
    page.evaluate("show()")
    texts = [
        it["text"] for it in PAYLOADS if it["technique"] in ("script element", "event handler", "embedding", "svg")
    ]
    texts = [text for text in texts if not set("&`\n\x00") & set(text)]
    page.evaluate("texts => turns_(1, texts.map((text) => ({ text })))", texts)
    page.evaluate("painted()")
    shown = page.locator(".dsv4-answer").all_text_contents()
    assert shown == texts and len(texts) > 60


def test_the_sanitiser_alone_lets_nothing_through(page: Any, tmp_path: Path) -> None:
    """As if the markdown renderer escaped nothing."""
    node, esbuild = shutil.which("node"), WIDGETS / "node_modules/.bin/esbuild"
    if node is None or not esbuild.exists():
        pytest.skip("esbuild is not installed: npm ci in dsv4nb/widgets")
    bundle = tmp_path / "clean.js"
    command = [str(esbuild), "js/prose-clean.js", "--bundle", "--format=esm", f"--outfile={bundle}"]
    subprocess.run(command, cwd=WIDGETS, check=True, capture_output=True, timeout=60)
    kept = page.evaluate(
        """async ([script, payloads]) => {
          const walls = await import(URL.createObjectURL(new Blob([script], { type: "text/javascript" })));
          const kept = [];
          for (const { text } of payloads) {
            for (const wall of [walls.cleanProse, walls.cleanCode, walls.cleanMaths]) {
              for (const around of ["", "<p>", "<table><tr><td>", "<math><mtext>", "<pre><code>"]) {
                const html = around + text;
                const at = document.body.appendChild(document.createElement("div"));
                at.append(wall(html));
                kept.push(...wrong(at).map((it) => [html, it]));
                at.innerHTML = at.innerHTML; // read once more, as a mutation would have it
                kept.push(...wrong(at).filter((it) => !it.startsWith("TBODY")).map((it) => [html, `again ${it}`]));
                at.remove();
              }
            }
          }
          return kept;
        }""",
        [bundle.read_text(), PAYLOADS],
    )
    assert kept == []
