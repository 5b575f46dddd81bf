// A line that is no error, with what follows from it.

import { element, focusable, say, toggle } from "./dom.js";

/** @param {() => void} ended what is done when the reader is done with it */
export function notice(ended) {
  const text = element("span", { class: "dsv4-notice-text" });
  const act = focusable("button", { type: "button", class: "dsv4-quiet" });
  const end = focusable("button", { type: "button", class: "dsv4-icon dsv4-drop", "aria-label": "Dismiss", text: "×" });
  const el = element("div", { class: "dsv4-notice", role: "status", hidden: true }, text, act, end);
  let follows = () => {};

  /** @param {string} what "" says nothing @param {string} action what the button offers, "" for none */
  function show(what, action = "", then = () => {}) {
    say(text, what);
    say(act, action);
    toggle(act, action !== "");
    toggle(el, what !== "");
    follows = then;
  }

  act.addEventListener("click", () => {
    follows();
    show("");
    ended();
  });
  end.addEventListener("click", () => {
    show("");
    ended();
  });
  return { el, show };
}
