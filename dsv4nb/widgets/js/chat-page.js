// The chat's elements, as they stand in the page before anything is known.

import { element, focusable } from "./dom.js";
import { meter } from "./meter.js";

export function chatPage(examples) {
  const title = element("strong", { class: "dsv4-title" });
  const thinking = focusable("input", { type: "checkbox", role: "switch", class: "dsv4-switch" });
  const exporting = focusable("button", {
    type: "button",
    class: "dsv4-quiet",
    "aria-expanded": "false",
    text: "Export",
  });
  const fresh = focusable("button", { type: "button", class: "dsv4-quiet", text: "New chat" });
  const log = focusable("div", {
    class: "dsv4-log",
    role: "log",
    "aria-live": "off", // the status line speaks start and end; every token would drown it
    "aria-label": "Conversation",
    tabindex: "0",
  });
  const suggestions = examples.map((text) => focusable("button", { type: "button", class: "dsv4-example", text }));
  const empty = element(
    "div",
    { class: "dsv4-empty" },
    element("p", { class: "dsv4-invitation", text: "Ask something, or start with one of these." }),
    element("div", { class: "dsv4-examples" }, ...suggestions),
  );
  const alert = element("div", { class: "dsv4-alert", role: "alert", hidden: true });
  const list = element("div", { class: "dsv4-tray", role: "group", "aria-label": "Attach from the notebook", hidden: true });
  const chips = element("ul", { class: "dsv4-bare dsv4-chips", "aria-label": "Attached", hidden: true });
  const input = focusable("textarea", {
    class: "dsv4-input",
    rows: "1",
    placeholder: "Message the model",
    "aria-label": "Message",
    spellcheck: "false",
  });
  const button = focusable("button", { type: "button", class: "dsv4-send" });
  const attach = focusable("button", {
    type: "button",
    class: "dsv4-attach",
    "aria-expanded": "false",
    title: "Bring a variable along, or give the model a function",
    text: "Attach",
  });
  const status = element("span", { class: "dsv4-status", role: "status", "aria-live": "polite" });
  const room = meter();
  const keys = element("span", { class: "dsv4-keys", text: "Enter sends · Shift+Enter new line · Esc stops" });
  const aloud = focusable("button", {
    type: "button",
    class: "dsv4-quiet dsv4-aloud", // seen when it has the focus
    "aria-pressed": "false",
    text: "Announce replies",
    title: "A screen reader says each reply sentence by sentence",
  });
  const head = element(
    "div",
    { class: "dsv4-head" },
    title,
    aloud,
    element("label", { class: "dsv4-toggle" }, thinking, element("span", { text: "Thinking" })),
    exporting,
    fresh,
  );
  const root = element(
    "div",
    { class: "dsv4-panel", role: "group", "aria-label": "Chat" },
    head,
    log,
    empty,
    alert,
    element(
      "div",
      { class: "dsv4-composer" },
      list,
      chips,
      element("div", { class: "dsv4-compose" }, input, button),
      element("div", { class: "dsv4-foot" }, attach, status, room.el, room.words, keys),
    ),
  );
  return {
    ...{ root, head, title, aloud, thinking, exporting, fresh, log, suggestions, empty, alert },
    ...{ list, chips, input, button, attach, status, room },
  };
}
