// One question and its answer on the page.

import { card } from "./card.js";
import { element, focusable, say, toggle } from "./dom.js";
import { editor } from "./editor.js";
import { prose } from "./prose.js";
import { toolbar } from "./toolbar.js";
import { isThinking, isWaiting, mark, thought } from "./transcript.js";
import { waterfall } from "./waterfall.js";

/**
 * @typedef {{ give: (kind: string, fields: object) => string, edit: (entry: object, text: string) => string,
 *             decide: (call: string, text: string | null) => void, code: (number: number) => void,
 *             rewound: () => void, times: (number: number, then: (runs: object[]) => void) => void, has: () => { idle: boolean, kernel: boolean } }} TurnActs what the chat does for its turns; `edit` returns why it does not, and sends
 *     the same again for ""
 * @param {TurnActs} acts
 */
export function turn(acts) {
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
  const change = editor({
    label: "Edit the message",
    save: "Send",
    done: (text) => acts.edit(shown, text),
    closed: () => toggle(bubble, true),
  });
  const said = element(
    "div",
    { class: "dsv4-user" },
    element("span", { class: "dsv4-unseen", text: "You: " }),
    bubble,
    change.el,
  );
  const times = element("div", { hidden: true });
  const tools = toolbar({
    give: acts.give,
    again: () => acts.edit(shown, ""),
    code: (number) => acts.code(number),
    rewound: () => acts.rewound(),
    edit() {
      toggle(bubble, false);
      change.open(shown.user);
    },
    times() {
      if (!times.hidden) showTimes([]);
      else acts.times(shown.number, showTimes);
    },
  });
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
      times,
      tools.el,
    ),
  );
  const texts = { reasoning: prose(reasoning), text: prose(answer) };
  const cards = [];
  let shown = null;
  let isLast = false;
  const thinking = { since: 0, until: 0 };

  /** How long the reader has watched it think; unknown to one who came late. */
  function thinkingSeconds(live, isThinkingNow) {
    if (live.isLate || live.reasoning === "") return 0;
    thinking.since ||= performance.now();
    if (isThinkingNow || thinking.until === 0) thinking.until = performance.now();
    return (thinking.until - thinking.since) / 1000;
  }

  function paint(entry, write, isThinkingNow) {
    say(bubble, entry.user);
    toggle(said, entry.user !== ""); // a turn that only answers calls has no text of its own
    for (const [name, text] of Object.entries(texts)) text[write](entry[name]);
    toggle(fold, entry.reasoning !== "");
    toggle(answer, entry.text !== "");
    paintCards(entry.cards);
    say(summary, thought(entry, isThinkingNow, write === "grow" ? thinkingSeconds(entry, isThinkingNow) : undefined));
    fold.classList.toggle("is-thinking", isThinkingNow);
  }

  function paintCards(shown) {
    while (cards.length > shown.length) cards.pop().el.remove();
    while (cards.length < shown.length) {
      const blank = { ...card(acts.decide), shows: null };
      cards.push(blank);
      calls.append(blank.el);
    }
    shown.forEach((entry, i) => {
      if (cards[i].shows !== entry) cards[i].show(entry);
      cards[i].shows = entry;
    });
    toggle(calls, shown.length > 0);
  }

  function showTimes(runs) {
    times.replaceChildren(...(runs.length ? [waterfall(runs)] : []));
    toggle(times, runs.length > 0);
    tools.timed(runs.length > 0);
  }

  function offer() {
    if (shown) tools.show(shown, isLast, acts.has());
  }

  // a turn that nobody is at need not know whether another one is running
  el.addEventListener("pointerenter", offer);
  el.addEventListener("focusin", offer);

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
      if (change.isOpen && entry.user !== shown?.user) {
        change.close();
        toggle(bubble, true);
      }
      if (entry.number !== shown?.number) showTimes([]);
      shown = entry;
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
    /** What can be done with the turn that is shown. */
    tools(isLast_) {
      isLast = isLast_;
      offer();
    },
    /** The kernel did not take what was decided about a call. @returns {boolean} whether its card tells so */
    refused(call, error) {
      return cards.find((one) => one.shows?.id === call)?.refused(error) ?? false;
    },
  };
}
