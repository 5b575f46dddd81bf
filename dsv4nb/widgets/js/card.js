// One tool call on the page: what is called with what, whether it may be, and what came of it. All of it is text.

import { editor } from "./editor.js";
import { element, focusable, say, toggle } from "./dom.js";

/**
 * @param {(call: string, text: string | null) => void} decide runs a call that waits, with other arguments if there is a
 *     text; null declines it
 */
export function card(decide) {
  const name = element("strong", { class: "dsv4-card-name" });
  const status = element("span", { class: "dsv4-card-status" });
  const given = fold();
  const result = fold();
  const button = (text, act) => {
    const node = focusable("button", { type: "button", class: "dsv4-quiet", text });
    node.addEventListener("click", act);
    return node;
  };
  const approve = button("Approve", () => decide(shown.id, ""));
  const edit = button("Edit arguments", () => {
    toggle(answers, false);
    change.open(shown.arguments || "{}");
  });
  const deny = button("Deny", () => decide(shown.id, null));
  approve.classList.add("is-first");
  const answers = element("div", { class: "dsv4-row", hidden: true }, approve, edit, deny);
  const change = editor({
    label: "Arguments as JSON",
    save: "Run with these",
    done(text) {
      const why = whyNot(text);
      if (!why) decide(shown.id, text);
      return why;
    },
    closed() {
      toggle(answers, shown.state === "waiting");
      if (shown.state === "waiting") edit.focus();
    },
  });
  const el = element(
    "div",
    { class: "dsv4-card", role: "group" },
    element("div", { class: "dsv4-card-head" }, name, status),
    given.el,
    answers,
    change.el,
    result.el,
  );
  let shown = null;

  return {
    el,
    /** @param {import("./protocol.js").Card} next */
    show(next) {
      const isNew = shown === null;
      shown = next;
      const isWaiting = next.state === "waiting";
      el.dataset.state = next.state;
      el.setAttribute("aria-label", `Tool call ${next.name}`);
      say(name, next.name);
      say(status, next.status);
      status.title = next.status;
      given.show("Arguments", "", next.arguments);
      result.show("Result", next.preview, next.result);
      if (!isWaiting) change.close();
      toggle(answers, isWaiting && !change.isOpen);
      if (isNew) given.el.open = !next.is_long; // from then on the reader decides
    },
    /** The kernel did not take the decision. @returns {boolean} whether it is told here */
    refused(error) {
      if (change.isOpen) change.refuse(error);
      return change.isOpen;
    },
  };
}

/** Why a text is no arguments, "" when it is. */
export function whyNot(text) {
  try {
    const value = JSON.parse(text);
    const isObject = typeof value === "object" && value !== null && !Array.isArray(value);
    return isObject ? "" : 'The arguments must be a JSON object, such as {"city": "Paris"}.';
  } catch (error) {
    return `This is no JSON: ${error.message}`;
  }
}

/** A text that can be folded; what it begins with stands beside its title until it is unfolded. */
function fold() {
  const title = element("span");
  const preview = element("span", { class: "dsv4-preview" });
  const text = focusable("pre", { class: "dsv4-code", role: "group", tabindex: "0" }); // a long one scrolls
  const el = element(
    "details",
    { class: "dsv4-fold", hidden: true },
    focusable("summary", { class: "dsv4-summary" }, title, preview),
    text,
  );
  return {
    el,
    show(name, beginning, content) {
      say(title, name);
      say(preview, beginning);
      say(text, content);
      text.setAttribute("aria-label", name);
      toggle(el, content !== "");
    },
  };
}
