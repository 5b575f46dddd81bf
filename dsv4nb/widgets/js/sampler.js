// Sampling: the kernel's values, and over them what a person has just asked for.

import { element, focusable, focused, say, toggle } from "./dom.js";
import { SAMPLER_FROM_KERNEL } from "./protocol.js";
import { outbox } from "./sampler-outbox.js";
import { row } from "./sampler-rows.js";
import { SILENT, viewOf } from "./view.js";

const COPIED_MS = 1500;
const CUT = "The kernel was restarted or closed. What was set stays to be read; run the cell again to set more.";

const SPEED = "speed only: never changes the text";
const NOT_SPEED = "rejection changes the text, not its distribution";

function render({ model, el }) {
  let isCut = false;
  const view = viewOf({ model, el }, paint);
  const { alert, heard, listen, complain, announce, repaint } = view;

  const title = element("strong", { class: "dsv4-title" });
  const resetAll = focusable("button", { type: "button", class: "dsv4-quiet", text: "Reset all" });
  const presets = Object.entries(model.get("presets")).map(([name, label]) => {
    const button = focusable("button", { type: "button", class: "dsv4-preset", "data-preset": name, text: label });
    listen(button, "click", () => {
      complain("");
      changes.forgiveAll();
      orders.give("preset", { name });
      repaint();
    });
    return button;
  });
  const when = element("p", { class: "dsv4-when", role: "status", "aria-live": "polite" });
  const codes = element("div", { class: "dsv4-codes", role: "group", "aria-label": "As code" });

  const orders = view.orders({
    failed(kind, id, error) {
      changes.settled(id, error);
      if (kind !== "set") complain(error);
      repaint();
    },
    silent() {
      complain(SILENT);
    },
  });
  const changes = outbox((what) => orders.give("set", { changes: what }), { now: () => performance.now(), later: (job, ms) => setTimeout(job, ms) });

  const on = {
    listen,
    put(name, value) {
      complain("");
      changes.put(name, value);
      repaint();
    },
    reset(name) {
      complain("");
      changes.forgive(name);
      orders.give("reset", { names: [name] });
    },
    undo(name) {
      changes.forgive(name);
      repaint();
    },
    lock(value) {
      complain("");
      changes.forgive("seed");
      orders.give("lock", { value });
    },
  };
  const rows = new Map(model.get("controls").map((control) => [control.name, row(control, on)]));
  const badge = element("span", { class: "dsv4-badge" });
  const off = element("p", { class: "dsv4-note dsv4-off", hidden: true });
  const groups = Object.entries(model.get("groups")).map(([name, label]) => {
    const mine = model.get("controls").filter((control) => control.group === name);
    const head = element("div", { class: "dsv4-group-head" }, element("h3", { text: label }));
    if (name === "spec") head.append(badge);
    return element("section", { class: `dsv4-group dsv4-group-${name}`, role: "group", "aria-label": label }, head, ...(name === "spec" ? [off] : []), ...mine.map((control) => rows.get(control.name).el));
  });
  const root = element(
    "div",
    { class: "dsv4-panel", role: "group", "aria-label": "Sampling" },
    element("div", { class: "dsv4-head" }, title, element("div", { class: "dsv4-presets", role: "group", "aria-label": "Presets" }, ...presets), resetAll),
    when, alert,
    element("div", { class: "dsv4-groups" }, ...groups),
    codes, heard,
  );

  function receive(message) {
    if (message?.kind === "ack" && SAMPLER_FROM_KERNEL.ack.every((field) => field in message)) {
      if (message.ok) {
        changes.settled(message.id, "");
        complain("");
      }
      orders.acknowledged(message);
      repaint();
    }
  }

  function paint() {
    const state = model.get("state");
    say(title, model.get("title"));
    for (const button of presets) {
      button.setAttribute("aria-pressed", String(button.dataset.preset === state.preset));
      button.disabled = isCut;
    }
    resetAll.disabled = isCut || state.changed.length === 0;
    say(when, timing(state));
    toggle(when, !isCut);
    const why = state.blocked.spec_depth?.["1"] ?? "";
    say(off, why);
    toggle(off, why !== "");
    const isExact = state.values.spec_mode !== "rejection";
    say(badge, isExact ? SPEED : NOT_SPEED);
    badge.classList.toggle("is-warning", !isExact);
    const isSpec = new Set(model.get("controls").filter((one) => one.group === "spec").map((one) => one.name));
    for (const [name, one] of rows) {
      const asked = changes.open(name);
      const isOff =
        isCut || (why !== "" && isSpec.has(name) && !(name === "spec" && state.values.spec === false && state.blocked.spec?.true === undefined));
      const now = {
        value: asked ? asked.value : state.values[name],
        isChanged: state.changed.includes(name),
        note: state.notes[name] ?? "",
        refusal: changes.refusal(name),
        blocked: state.blocked[name] ?? {},
        isOff,
      };
      one.show(now, { ...state, isCut });
    }
    paintCode(state.code);
    el.dataset.changed = state.changed.join(" ");
    el.dataset.busy = String(state.busy);
  }

  function timing(state) {
    if (state.code.length === 1) return "Requests take these values with **panel.options.";
    return state.busy
      ? "A reply is running and keeps the values it began with. Changes apply to the next message."
      : "Changes apply to the next message.";
  }

  function paintCode(code) {
    if (codes.dataset.code === code.join("\n")) return;
    codes.dataset.code = code.join("\n");
    const hadFocus = [...codes.querySelectorAll("button")].indexOf(focused(codes));
    codes.replaceChildren(...code.map(copied));
    if (hadFocus >= 0) codes.querySelectorAll("button")[hadFocus]?.focus();
  }

  function copied(text) {
    const shown = element("code", { class: "dsv4-code", text });
    const button = focusable("button", { type: "button", class: "dsv4-quiet", text: "Copy", "aria-label": `Copy ${text}` });
    listen(button, "click", async () => {
      const done = await copy(text, shown);
      say(button, done ? "Copied" : "Selected");
      announce(done ? "Copied." : "Selected; copy it with the keyboard.");
      setTimeout(() => say(button, "Copy"), COPIED_MS);
    });
    return element("div", { class: "dsv4-code-row" }, shown, button);
  }

  listen(resetAll, "click", () => {
    complain("");
    changes.forgiveAll();
    orders.give("reset", { names: [] });
  });
  view.whenCut(() => {
    isCut = true;
    orders.end();
    complain(CUT);
    repaint();
  });
  view.hear({ "msg:custom": receive, "change:state": repaint, "change:title": repaint });

  view.mount("sampler", root);
  paint();
  return view.end;
}

/** @returns {Promise<boolean>} whether it is in the clipboard; else it is selected */
async function copy(text, node) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    getSelection()?.selectAllChildren(node);
    return document.execCommand("copy");
  }
}

export default { render };
