// How much of the room the next prompt takes: a bar and what is left, in words when the reader is there.

import { element, focusable, say, toggle } from "./dom.js";

export function meter() {
  const filled = element("span", { class: "dsv4-filled" });
  const left = element("span", { class: "dsv4-left" });
  const bar = element("span", { class: "dsv4-bar", "aria-hidden": "true" }, filled);
  const words = element("span", { class: "dsv4-words", "aria-hidden": "true" });
  const el = focusable(
    "span",
    { class: "dsv4-meter", role: "meter", tabindex: "0", "aria-label": "Room", "aria-valuemin": "0", hidden: true },
    bar,
    left,
  );
  return {
    el,
    words,
    /** @param {import("./protocol.js").Room | {}} room */
    show(room) {
      toggle(el, "used" in room);
      toggle(words, "used" in room);
      if (!("used" in room)) return;
      const share = Math.min(1, room.used / room.max_seq);
      filled.style.width = `${(100 * share).toFixed(1)}%`;
      el.classList.toggle("is-low", room.left < room.max_seq / 10);
      el.setAttribute("aria-valuemax", String(room.max_seq));
      el.setAttribute("aria-valuenow", String(Math.min(room.used, room.max_seq)));
      el.setAttribute("aria-valuetext", room.words);
      say(left, `${room.left.toLocaleString("en")} left`);
      say(words, room.words);
    },
  };
}
