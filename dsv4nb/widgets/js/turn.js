// One question and its answer on the page.

import { card } from "./card.js";
import { element, focusable, growing, say, toggle } from "./dom.js";
import { isThinking, isWaiting, mark, thought } from "./transcript.js";

export function turn() {
  const bubble = element("div", { class: "dsv4-bubble" });
  const summary = focusable("summary", { class: "dsv4-summary" });
  const reasoning = element("div", { class: "dsv4-reasoning" });
  const fold = element("details", { class: "dsv4-thought", hidden: true }, summary, reasoning);
  const answer = element("div", { class: "dsv4-answer", hidden: true });
  const calls = element("div", { class: "dsv4-calls", hidden: true });
  const incomplete = element("p", { class: "dsv4-mark", text: "An incomplete tool call", hidden: true });
  const dots = element("div", { class: "dsv4-dots", "aria-hidden": "true", hidden: true });
  dots.append(element("i"), element("i"), element("i"));
  const ending = element("p", { class: "dsv4-mark", hidden: true });
  const facts = element("p", { class: "dsv4-facts", hidden: true });
  const said = element("div", { class: "dsv4-user" }, element("span", { class: "dsv4-unseen", text: "You: " }), bubble);
  const el = element(
    "article",
    { class: "dsv4-turn" },
    said,
    element(
      "div",
      { class: "dsv4-reply" },
      element("span", { class: "dsv4-unseen", text: "Model: " }),
      fold,
      calls,
      answer,
      dots,
      incomplete,
      ending,
      facts,
    ),
  );
  const texts = { reasoning: growing(reasoning), text: growing(answer) };
  const cards = [];

  function paint(entry, write, isThinkingNow) {
    say(bubble, entry.user);
    toggle(said, entry.user !== ""); // a turn that only answers calls has no text of its own
    for (const [name, text] of Object.entries(texts)) text[write](entry[name]);
    toggle(fold, entry.reasoning !== "");
    toggle(answer, entry.text !== "");
    paintCards(entry.cards);
    say(summary, thought(entry, isThinkingNow));
    fold.classList.toggle("is-thinking", isThinkingNow);
  }

  function paintCards(shown) {
    while (cards.length > shown.length) cards.pop().el.remove();
    while (cards.length < shown.length) {
      const blank = { ...card(), shows: null };
      cards.push(blank);
      calls.append(blank.el);
    }
    shown.forEach((entry, i) => {
      if (cards[i].shows !== entry) cards[i].show(entry);
      cards[i].shows = entry;
    });
    toggle(calls, shown.length > 0);
  }

  return {
    el,
    /** Asked, nothing back yet. */
    waiting(text) {
      say(bubble, text);
      toggle(dots, true);
    },
    /** @param {import("./transcript.js").Live} live @param {string} facts_ "" leaves them as they are */
    running(live, facts_) {
      paint(live, "grow", isThinking(live));
      toggle(dots, isWaiting(live));
      if (facts_) {
        say(facts, facts_);
        toggle(facts, true);
      }
    },
    /** @param {import("./protocol.js").Entry} entry @param {boolean} isNews whether it ended before the reader's eyes */
    ended(entry, isNews) {
      paint(entry, "settle", false);
      toggle(dots, false);
      toggle(incomplete, entry.is_calling);
      if (entry.error && isNews) ending.setAttribute("role", "alert");
      ending.classList.toggle("is-error", entry.error !== "");
      toggle(ending, mark(entry) !== "");
      say(ending, mark(entry));
      say(facts, entry.footer);
      toggle(facts, facts.textContent !== "");
    },
  };
}
