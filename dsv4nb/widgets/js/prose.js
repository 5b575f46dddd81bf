// A text that grows, as markdown. Blocks that are finished are never touched again; of one that still grows, what
// stays is kept, so that a selection in it survives. A long conversation is set as it comes into sight.

import { element, focusable } from "./dom.js";
import { cleanProse } from "./prose-clean.js";
import { listing } from "./prose-code.js";
import { block, languageOf, tokensOf } from "./prose-markdown.js";
import { setMaths } from "./prose-maths.js";
import { patch } from "./prose-patch.js";
import { setSoon } from "./prose-sight.js";

const OPEN = 2; // blocks at the end that more text may change: it can join the last to the one before it
const SLOW_MS = 8;
const SHARE = 4; // a slow block waits this many times as long as it took

/** @param {Element} parent empty */
export function prose(parent) {
  const shown = []; // { raw, el, code } of the blocks; `code` is the listing, null for other blocks
  let nDone = 0; // of these are finished, and `done` is their text
  let done = "";
  let last = "";
  let due = 0;
  let timer = 0;
  let forget = () => {};
  parent.classList.add("dsv4-prose");

  function paint(text, isOver) {
    clearTimeout(timer);
    forget();
    const began = performance.now();
    if (shown.length === 0) parent.replaceChildren();
    if (!text.startsWith(done)) restart();
    const parts = partsOf(text.slice(done.length));
    parts.forEach((part, i) => place(nDone + i, part));
    while (shown.length > nDone + parts.length) shown.pop().el.remove();
    const finished = isOver ? parts : parts.slice(0, -OPEN);
    for (const { raw, token } of finished) {
      shown[nDone].code?.show(token.text, languageOf(token), true);
      shown[nDone].el.classList.add("is-done");
      nDone += 1;
      done += raw;
    }
    const took = performance.now() - began;
    due = took > SLOW_MS ? began + took * (1 + SHARE) : 0;
  }

  function place(i, { raw, token }) {
    if (shown[i]?.raw === raw) return;
    if (!shown[i]) {
      shown[i] = { raw: "", el: element("div", { class: "dsv4-block" }), code: null };
      parent.append(shown[i].el);
    }
    const { el, code } = shown[i];
    shown[i].raw = raw;
    if (token.type !== "code") {
      patch(el, furnished(cleanProse(block(token))));
      shown[i].code = null;
      return;
    }
    if (!code) el.replaceChildren((shown[i].code = listing()).el);
    shown[i].code.show(token.text, languageOf(token), false);
  }

  function restart() {
    shown.length = nDone = 0;
    done = "";
    parent.replaceChildren();
  }

  return {
    /** Show a text that has become longer. */
    grow(text) {
      if (text === last) return;
      last = text;
      clearTimeout(timer);
      const wait = due - performance.now();
      if (wait > 0) timer = setTimeout(() => paint(lines(text), false), wait);
      else paint(lines(text), false);
    },
    /** Show a text that is complete. */
    settle(text) {
      if (text === last && shown.length === nDone) return;
      last = text;
      if (shown.length > 0) {
        paint(lines(text), true);
        return;
      }
      forget();
      parent.textContent = text;
      forget = setSoon(parent, text.length, () => paint(lines(text), true));
    },
  };
}

/** The blocks of a text; the space behind one is counted to it, so that joined they are the text. */
function partsOf(text) {
  const parts = [];
  for (const token of tokensOf(text)) {
    if (token.type !== "space") parts.push({ raw: token.raw, token });
    else if (parts.length > 0) parts.at(-1).raw += token.raw;
    else parts.push({ raw: token.raw, token });
  }
  return parts;
}

/** One kind of line end; half of a pair may be yet to come. */
function lines(text) {
  return text.includes("\r") ? text.replace(/\r$/, "").replace(/\r\n?/g, "\n") : text;
}

/** Make of sanitised markup what is shown: code with a head, tables that scroll, formulas. */
function furnished(fragment) {
  for (const pre of fragment.querySelectorAll("pre")) {
    const code = listing();
    code.show(pre.textContent, pre.firstElementChild?.className.replace("language-", "") ?? "", true);
    pre.replaceWith(code.el);
  }
  for (const table of fragment.querySelectorAll("table")) {
    const frame = focusable("div", { class: "dsv4-wide", role: "group", "aria-label": "Table", tabindex: "0" });
    table.replaceWith(frame);
    frame.append(table);
  }
  fragment.querySelectorAll("code.dsv4-tex").forEach(setMaths);
  return fragment;
}
