// One tool call on the page: what was called with what, and what came of it. All of it is text.

import { element, focusable, say, toggle } from "./dom.js";

export function card() {
  const name = element("strong", { class: "dsv4-card-name" });
  const status = element("span", { class: "dsv4-card-status" });
  const given = fold();
  const result = fold();
  const el = element(
    "div",
    { class: "dsv4-card", role: "group" },
    element("div", { class: "dsv4-card-head" }, name, status),
    given.el,
    result.el,
  );
  let isNew = true;

  return {
    el,
    /** @param {import("./protocol.js").Card} shown */
    show(shown) {
      el.dataset.state = shown.state;
      el.setAttribute("aria-label", `Tool call ${shown.name}`);
      say(name, shown.name);
      say(status, shown.status);
      status.title = shown.status;
      given.show("Arguments", "", shown.arguments);
      result.show("Result", shown.preview, shown.result);
      if (isNew) given.el.open = !shown.is_long; // from then on the reader decides
      isNew = false;
    },
  };
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
