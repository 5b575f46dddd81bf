// What can be done with a turn: quiet until the reader is there, one stop of the Tab key, arrows inside.

import { copied } from "./files.js";
import { element, focusable, say, toggle } from "./dom.js";

const SAID_MS = 2000;

/**
 * @typedef {{ isIdle: () => boolean, give: (kind: string, fields: object) => string, edit: () => void,
 *             again: () => void, code: (number: number) => void, rewound: () => void, times: () => void }} Acts
 *     what the chat does for a turn; `times` shows or hides them
 * @param {Acts} acts
 */
export function toolbar(acts) {
  let shown = null;
  const button = (text, title, needs, act) => {
    const node = focusable("button", { type: "button", class: "dsv4-tool", text, title, tabindex: "-1" });
    node.dataset.needs = needs;
    node.addEventListener("click", () => {
      if (node.getAttribute("aria-disabled") !== "true") act(node);
    });
    return node;
  };
  const before = button("‹", "", "idle", () => step(-1));
  const place = element("span", { class: "dsv4-place" });
  const after = button("›", "", "idle", () => step(1));
  const branches = element("span", { class: "dsv4-branches", role: "group" }, before, place, after);
  const copy = button("Copy", "Copy the answer", "", async () => {
    say(copy, (await copied(shown.text)) ? "Copied" : "Cannot copy");
    setTimeout(() => say(copy, "Copy"), SAID_MS);
  });
  const edit = button("Edit", "Edit the message and send it again, as a branch", "idle", acts.edit);
  const again = button("Regenerate", "Answer again, as a branch", "idle", acts.again);
  const fork = button("Fork", "A new chat that begins with the turns up to here", "idle", () => {
    acts.give("fork", { turn: shown.number });
  });
  const rewind = button("Rewind", "Go back to here; what followed is kept as a branch", "idle", () => {
    acts.give("rewind", { turn: shown.number });
    acts.rewound();
  });
  const code = button("Code", "Copy Python that asks this again, with its seed", "kernel", () => acts.code(shown.number));
  const times = button("Timing", "Where the time went", "kernel", acts.times);
  times.setAttribute("aria-expanded", "false");
  const tools = element("span", { class: "dsv4-tools" }, copy, edit, again, fork, rewind, code, times);
  const el = element("div", { class: "dsv4-toolbar", role: "toolbar", "aria-label": "Turn", hidden: true }, branches, tools);
  const all = [before, after, copy, edit, again, fork, rewind, code, times];

  function step(by) {
    const at = shown.siblings.indexOf(shown.number) + by;
    if (at >= 0 && at < shown.siblings.length) acts.give("switch", { turn: shown.siblings[at] });
  }

  function reachable() {
    return all.filter((node) => !node.hidden && !node.parentElement.hidden);
  }

  function stopAt(node) {
    for (const one of all) one.tabIndex = one === node ? 0 : -1;
  }

  el.addEventListener("focusin", (event) => stopAt(event.target));
  el.addEventListener("keydown", (event) => {
    const nodes = reachable();
    const at = nodes.indexOf(event.target);
    const to = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: nodes.length - 1 }[event.key];
    if (to === undefined || at < 0) return;
    event.preventDefault();
    event.stopPropagation();
    nodes[(to + nodes.length) % nodes.length].focus();
  });

  return {
    el,
    /**
     * @param {import("./protocol.js").Entry} entry @param {boolean} isLast
     * @param {{ idle: boolean, kernel: boolean }} has whether nothing runs, and whether there is a kernel
     */
    show(entry, isLast, has) {
      shown = entry;
      const n = entry.siblings?.length ?? 0;
      const at = n ? entry.siblings.indexOf(entry.number) : 0;
      toggle(branches, n > 1);
      say(place, `${at + 1} / ${n}`);
      branches.setAttribute("aria-label", `Branch ${at + 1} of ${n}`);
      before.setAttribute("aria-label", `Branch before, this is ${at + 1} of ${n}`);
      after.setAttribute("aria-label", `Branch after, this is ${at + 1} of ${n}`);
      const isKept = Boolean(entry.number);
      toggle(copy, entry.text !== "");
      toggle(edit, isKept && entry.user !== "");
      toggle(again, isKept && isLast && entry.user !== "");
      toggle(fork, isKept);
      toggle(rewind, isKept && !isLast);
      toggle(code, isKept && entry.user !== "");
      toggle(times, isKept && Boolean(entry.is_timed));
      for (const node of all) {
        const isEnd = (node === before && at === 0) || (node === after && at === n - 1);
        node.setAttribute("aria-disabled", String(isEnd || has[node.dataset.needs] === false));
      }
      toggle(el, reachable().length > 0 || n > 1);
      if (!all.some((node) => node.tabIndex === 0 && reachable().includes(node))) {
        const first = reachable()[0];
        if (first) stopAt(first);
      }
    },
    /** Whether the times are shown. */
    timed(isShown) {
      times.setAttribute("aria-expanded", String(isShown));
    },
  };
}
