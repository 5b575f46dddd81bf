// The conversation out of the page: written by the kernel, then downloaded or copied here.

import { element, focusable, toggle } from "./dom.js";
import { download } from "./files.js";

const FORMS = { notebook: "Notebook cells", jsonl: "JSONL", markdown: "Markdown" };

/**
 * @param {HTMLElement} button opens the choice of forms
 * @param {(kind: string, fields: object) => string} give
 */
export function exporting(button, give) {
  const choices = Object.entries(FORMS).map(([form, text]) => {
    const node = focusable("button", { type: "button", class: "dsv4-quiet", text });
    node.addEventListener("click", () => ask(form, 0, ({ file, mime, content }) => download(file, mime, content)));
    return node;
  });
  const label = element("span", { class: "dsv4-strip-label", text: "Download as" });
  const el = element(
    "div",
    { class: "dsv4-strip", role: "group", "aria-label": "Export", hidden: true },
    label,
    ...choices,
  );
  const open = new Map(); // id of a command -> what is done with what comes

  function ask(form, turn, then) {
    open.set(give("export", { form, turn }), then);
  }

  function askTimes(turn, then) {
    open.set(give("times", { turn }), ({ runs }) => then(runs));
  }

  function show(isShown) {
    toggle(el, isShown);
    button.setAttribute("aria-expanded", String(isShown));
  }

  button.addEventListener("click", () => {
    show(el.hidden);
    if (!el.hidden) choices[0].focus();
  });
  el.addEventListener("keydown", (event) => {
    if (event.key !== "Escape") return;
    event.stopPropagation();
    show(false);
    button.focus();
  });
  show(false);

  return {
    el,
    ask,
    askTimes,
    close: () => show(false),
    /** @param {{ id: string }} message what was asked for */
    came(message) {
      open.get(message.id)?.(message); // another view's is none of ours
      open.delete(message.id);
    },
  };
}
