// One question and its answer on the page.

import { element, focusable, growing, say, toggle } from "./dom.js";
import { mark, pace, thought } from "./transcript.js";

export function turn() {
  const bubble = element("div", { class: "dsv4-bubble" });
  const summary = focusable("summary", { class: "dsv4-summary" });
  const reasoning = element("div", { class: "dsv4-reasoning" });
  const fold = element("details", { class: "dsv4-thought", hidden: true }, summary, reasoning);
  const answer = element("div", { class: "dsv4-answer", hidden: true });
  const tool = element("pre", { class: "dsv4-tool", "aria-label": "Tool call", hidden: true });
  const dots = element("div", { class: "dsv4-dots", "aria-hidden": "true", hidden: true });
  dots.append(element("i"), element("i"), element("i"));
  const ending = element("p", { class: "dsv4-mark", hidden: true });
  const facts = element("p", { class: "dsv4-facts", hidden: true });
  const el = element(
    "article",
    { class: "dsv4-turn" },
    element("div", { class: "dsv4-user" }, element("span", { class: "dsv4-unseen", text: "You: " }), bubble),
    element(
      "div",
      { class: "dsv4-reply" },
      element("span", { class: "dsv4-unseen", text: "Model: " }),
      fold,
      answer,
      tool,
      dots,
      ending,
      facts,
    ),
  );
  const texts = { reasoning: growing(reasoning), text: growing(answer), tool: growing(tool) };

  function paint(entry, write, isThinking) {
    say(bubble, entry.user);
    for (const [name, text] of Object.entries(texts)) text[write](entry[name]);
    toggle(fold, entry.reasoning !== "");
    toggle(answer, entry.text !== "");
    toggle(tool, entry.tool !== "");
    say(summary, thought(entry, isThinking));
    fold.classList.toggle("is-thinking", isThinking);
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
      const isThinking = live.text === "" && live.tool === "";
      paint(live, "grow", isThinking);
      toggle(dots, live.text === "" && live.tool === "" && live.reasoning === "");
      if (facts_) {
        say(facts, facts_);
        toggle(facts, true);
      }
    },
    /** @param {import("./protocol.js").Entry} entry @param {boolean} isNews whether it ended before the reader's eyes */
    ended(entry, isNews) {
      paint(entry, "settle", false);
      toggle(dots, false);
      if (entry.error && isNews) ending.setAttribute("role", "alert");
      ending.classList.toggle("is-error", entry.error !== "");
      toggle(ending, mark(entry) !== "");
      say(ending, mark(entry));
      say(facts, pace(entry.n_tokens, entry.seconds));
      toggle(facts, facts.textContent !== "");
    },
  };
}
