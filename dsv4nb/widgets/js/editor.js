// A text that is changed in place: a message, or the arguments of a call.

import { element, focusable, say, toggle } from "./dom.js";

/**
 * @param {{ label: string, save: string, done: (text: string) => string, closed: () => void }} about `done` takes the
 *     text and returns why it cannot be taken, "" when it was; `closed`: nothing was changed
 */
export function editor(about) {
  const el = element("div", { class: "dsv4-editor", hidden: true });
  let form = null; // built when it is first wanted: a long chat has thousands of turns

  return {
    el,
    refuse: (text) => form?.refuse(text),
    get isOpen() {
      return !el.hidden;
    },
    open(text) {
      form ??= formIn(el, about);
      toggle(el, true);
      form.begin(text);
    },
    close() {
      toggle(el, false);
    },
  };
}

function formIn(el, { label, save, done, closed }) {
  const input = focusable("textarea", { class: "dsv4-input", rows: "1", "aria-label": label, spellcheck: "false" });
  const keep = focusable("button", { type: "button", class: "dsv4-quiet is-first", text: save });
  const cancel = focusable("button", { type: "button", class: "dsv4-quiet", text: "Cancel" });
  const wrong = element("p", { class: "dsv4-wrong", role: "alert", hidden: true });
  el.append(input, wrong, element("div", { class: "dsv4-row" }, keep, cancel));

  function fit() {
    input.style.height = "auto";
    input.style.height = `${input.scrollHeight + 2}px`;
  }

  function refuse(text) {
    say(wrong, text);
    toggle(wrong, text !== "");
    input.setAttribute("aria-invalid", String(text !== ""));
  }

  const finish = () => refuse(done(input.value));

  function stop() {
    toggle(el, false);
    closed();
  }

  input.addEventListener("input", () => {
    refuse("");
    fit();
  });
  el.addEventListener("keydown", (event) => {
    if (event.key === "Escape") stop();
    else if (event.key !== "Enter" || event.isComposing || event.target !== input) return;
    else if (event.shiftKey) breakLine(input, fit);
    else finish();
    event.preventDefault();
    event.stopPropagation();
  });
  keep.addEventListener("click", finish);
  cancel.addEventListener("click", stop);

  return {
    refuse,
    begin(text) {
      input.value = text;
      refuse("");
      fit();
      input.focus();
      input.setSelectionRange(text.length, text.length);
    },
  };
}

/** JupyterLab takes away what Shift+Enter does by itself. */
export function breakLine(input, after) {
  if (document.execCommand("insertText", false, "\n")) return; // the one way that keeps undo
  input.setRangeText("\n", input.selectionStart, input.selectionEnd, "end");
  after();
}
