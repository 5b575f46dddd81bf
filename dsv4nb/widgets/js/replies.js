// Which reply of a chat is shown: one of them, or always the latest.

import { element, focusable, toggle } from "./dom.js";

const FOLLOW = -1;
const MOST = 48;

/** @param {(n: number) => string} size how long a reply is, in words */
export function replies(size) {
  const el = focusable("select", { class: "dsv4-select", "aria-label": "Reply" });
  let painted = null;

  return {
    el,
    /** @param {{ turns: [number, string, number][], shown: number, follows: boolean }} state */
    show({ turns, shown, follows }) {
      toggle(el, turns.length > 0);
      if (painted === turns) return; // a choice stays until the kernel has answered
      painted = turns;
      const options = turns.map(([i, text, n]) => element("option", { value: String(i), text: `${i + 1}. ${shortened(text)} (${size(n)})` }));
      el.replaceChildren(element("option", { value: String(FOLLOW), text: "Follow the chat" }), ...options.reverse());
      el.value = String(follows ? FOLLOW : shown);
    },
    /** The choice was refused: the next `show` tells again what is shown. */
    undo() {
      painted = null;
    },
  };
}

function shortened(text) {
  const line = text.replace(/\s+/g, " ").trim();
  return line.length > MOST ? `${line.slice(0, MOST - 1)}…` : line;
}
