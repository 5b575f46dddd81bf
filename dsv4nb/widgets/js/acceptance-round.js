// One round opened: the text that it found, what it drafted, what became of that, and the way back to it.

import { element, focusable, say, toggle } from "./dom.js";
import { list, table } from "./acceptance-strip.js";
import { textBefore } from "./rounds.js";
import { chance, number, roundFacts, visible, WORDS } from "./rounds-words.js";

const HEAD = ["draft", "drafted", "chosen", "status", "p", "q", "margin", "confidence", "survival"];

/** @param {{ listen: Function, onGo: (round: number) => void, onClose: () => void, onRewind: (round: number) => void }} on */
export function opened({ listen, onGo, onClose, onRewind }) {
  const title = element("h4", { class: "dsv4-round-title", tabindex: "-1" });
  const button = (text, label) => focusable("button", { type: "button", class: "dsv4-quiet", text, "aria-label": label });
  const before = button("‹", "Previous round"), after = button("›", "Next round"), close = button("✕", "Close the round");
  const text = focusable("div", { class: "dsv4-text", tabindex: "0", role: "group", "aria-label": "The text up to this round" });
  const facts = element("div", { class: "dsv4-round-facts" });
  const drafts = focusable("div", { class: "dsv4-wide", tabindex: "0", role: "group", "aria-label": "Drafts of this round" });
  const rewind = focusable("button", { type: "button", class: "dsv4-primary", text: "Rewind the chat here" });
  const hint = element("span", { text: "The reply then ends before this round. As it is now, it stays in chat.branches." });
  const actions = element("div", { class: "dsv4-actions" }, rewind, hint);
  const el = element(
    "section",
    { class: "dsv4-round", "aria-label": "An open round", hidden: true },
    element("div", { class: "dsv4-round-head" }, title, before, after, close),
    text, actions, facts, drafts,
  );
  let shown = -1;

  listen(before, "click", () => onGo(shown - 1));
  listen(after, "click", () => onGo(shown + 1));
  listen(close, "click", onClose);
  listen(rewind, "click", () => onRewind(shown));
  listen(el, "keydown", (event) => {
    if (event.key !== "Escape") return;
    event.preventDefault();
    event.stopPropagation();
    onClose();
  });

  function story(rounds, index) {
    const round = rounds[index];
    const { reasoning, content, isCut } = textBefore(rounds, index);
    const parts = [element("span", { class: "dsv4-before", text: `${isCut ? "…" : ""}${reasoning}${content}` })];
    round.drafts.slice(0, round.accepts).forEach((draft, k) => {
      const isPast = k >= round.emitted;
      parts.push(chip(draft.text, isPast ? "past_stop" : "accepted", isPast ? "past the stop" : "accepted draft"));
    });
    const refused = round.drafts[round.accepts];
    if (refused?.status === "rejected") parts.push(chip(refused.text, "rejected", "rejected draft"));
    if (round.next !== null && round.emitted > round.accepts) parts.push(chip(round.next, "own", "the model's own token"));
    return parts;
  }

  function chip(token, kind, label) {
    const tag = kind === "rejected" ? "del" : "ins";
    return element(tag, { class: `dsv4-chip dsv4-chip-${kind}`, title: label, text: visible(token) });
  }

  return {
    el,
    /** @param {import("./rounds.js").State} state @param {number} index -1 closes */
    show(state, index) {
      shown = index;
      toggle(el, index >= 0);
      if (index < 0) return;
      const round = state.rounds[index];
      el.setAttribute("aria-label", `Round ${round.round}`);
      say(title, `Round ${round.round}`);
      before.disabled = index === 0;
      after.disabled = index === state.rounds.length - 1;
      text.replaceChildren(...story(state.rounds, index));
      text.scrollTop = text.scrollHeight;
      toggle(actions, state.rewinds);
      facts.replaceChildren(list(roundFacts(round)));
      const rows = round.drafts.map((draft, k) => [
        String(k + 1), visible(draft.text), draft.chosen === null ? "–" : visible(draft.chosen), WORDS[draft.status],
        chance(draft.p), chance(draft.q), number(draft.margin), chance(draft.conf), chance(draft.survival),
      ]);
      toggle(drafts, rows.length > 0);
      drafts.replaceChildren(table([HEAD, ...rows], `Drafts of round ${round.round}`));
      [...drafts.querySelectorAll("tbody tr")].forEach((row, k) => (row.dataset.status = round.drafts[k].status));
    },
    focus() {
      title.focus();
    },
  };
}
