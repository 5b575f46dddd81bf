// Tokens as running text that can be walked through: blocks of spans, of which only those in sight cost anything.

import { element } from "./dom.js";
import { look, moved, running, sentence, spoken } from "./lens-tokens.js";

const BLOCK = 200;

/**
 * @param {{ listen: Function, onPoint: (index: number | null) => void, onFocus: (index: number) => void,
 *           onEnter: (index: number) => void, announce: (text: string) => void }} on
 */
export function grid({ listen, onPoint, onFocus, onEnter, announce }) {
  const el = element("div", { class: "dsv4-tokens-grid", role: "listbox", "aria-label": "Tokens" });
  /** @type {HTMLElement[]} */
  const spans = [];
  let tokens = [];
  let measure = "probability";
  let current = 0;
  let isPinned = false;

  function block(index) {
    const first = index * BLOCK;
    const node = element("div", { class: "dsv4-block", role: "group", "aria-label": `tokens from ${first} on` });
    el.append(node);
    return node;
  }

  function place(i) {
    let span = spans[i];
    if (span === undefined) {
      span = element("span", { role: "option", tabindex: "-1", "aria-selected": "false" });
      span.dataset.i = String(i);
      (el.children[Math.floor(i / BLOCK)] ?? block(Math.floor(i / BLOCK))).append(span);
      spans.push(span);
    }
    const text = running(tokens[i].text);
    if (span.textContent !== text) {
      span.textContent = text;
      if (text.trim() === "") span.setAttribute("aria-label", spoken(tokens[i].text)); // else the text is the name
      else span.removeAttribute("aria-label");
    }
    const kind = `dsv4-token ${look(tokens[i], measure)}`;
    if (span.className !== kind) span.className = kind;
  }

  /** One token can be reached by Tab; the attribute keeps JupyterLab's shortcuts away from its keys. */
  function rove(to) {
    const before = spans[current];
    before?.setAttribute("tabindex", "-1");
    before?.setAttribute("aria-selected", "false");
    current = to;
    const span = spans[to];
    span?.setAttribute("tabindex", "0");
    span?.setAttribute("data-lm-suppress-shortcuts", "true");
    span?.setAttribute("aria-selected", String(isPinned));
  }

  function focusOn(to) {
    isPinned = true;
    rove(to);
    spans[to].focus({ preventScroll: true });
    spans[to].scrollIntoView({ block: "nearest" });
    onFocus(to);
    announce(sentence(tokens[to], to));
  }

  /** The token one line below (1) or above (-1), closest to the current one. */
  function line(step) {
    const from = spans[current].getClientRects()[0];
    let best = null;
    let top = null;
    for (let i = current + step; i >= 0 && i < spans.length; i += step) {
      const box = spans[i].getClientRects()[0];
      if (box === undefined || Math.abs(box.top - from.top) < 2) continue;
      top ??= box.top;
      if (Math.abs(box.top - top) > 2) break;
      const distance = Math.abs(box.left - from.left);
      if (best === null || distance < best.distance) best = { i, distance };
    }
    return best?.i ?? (step > 0 ? spans.length - 1 : 0);
  }

  const under = (event) => {
    const span = event.target.closest?.("[data-i]");
    return span ? Number(span.dataset.i) : null;
  };
  listen(el, "pointerover", (event) => onPoint(under(event)));
  listen(el, "pointerleave", () => onPoint(null));
  listen(el, "click", (event) => {
    const i = under(event);
    if (i !== null) focusOn(i);
  });
  listen(el, "focusin", (event) => {
    const i = under(event);
    if (i !== null && (i !== current || !isPinned)) focusOn(i);
  });
  listen(el, "keydown", (event) => {
    if (event.altKey || event.ctrlKey || event.metaKey || spans.length === 0) return;
    if (event.key === "Enter" || event.key === " ") onEnter(current);
    else {
      const to = moved(current, event.key, spans.length, line);
      if (to === null) return;
      focusOn(to);
    }
    event.preventDefault();
    event.stopPropagation();
  });

  return {
    el,
    /** Show tokens; those before `from` are as they were. */
    show(next, from, by) {
      const isAnew = by !== measure;
      tokens = next;
      measure = by;
      while (spans.length > tokens.length) spans.pop().remove();
      while (el.children.length > Math.ceil(tokens.length / BLOCK)) el.lastChild.remove();
      for (let i = isAnew ? 0 : Math.min(from, spans.length); i < tokens.length; i += 1) place(i);
      if (tokens.length > 0) rove(Math.min(current, tokens.length - 1));
    },
    /** Another reply: nothing is chosen in it. */
    reset() {
      isPinned = false;
      if (spans.length) rove(0);
    },
    focusOn,
    /** The spans, for their colours. */
    get isEmpty() {
      return spans.length === 0;
    },
  };
}
