// One row per control. A row knows how to show a value and what a person makes of it, and nothing else.

import { element, focusable, focused, say, toggle } from "./dom.js";
import { last, lines, position, shown, spoken, stepped, strings, typed, valueAt } from "./sampler-scale.js";

let rows = 0;

/**
 * @param {object} control as the kernel declares it
 * @param {{ put: (name: string, value: unknown) => void, reset: (name: string) => void, undo: (name: string) => void,
 *           lock: (isLocked: boolean) => void, listen: Function }} on
 */
export function row(control, on) {
  const name = `dsv4-set-${(rows += 1)}-${Math.random().toString(36).slice(2, 8)}`;
  const made = KINDS[control.kind](control, name, on);
  const label = element("label", { class: "dsv4-label", for: name, text: control.label });
  const mark = element("span", { class: "dsv4-changed", hidden: true, title: "changed from the default" }, element("span", { class: "dsv4-unseen", text: " (changed)" }));
  const hint = element("p", { class: "dsv4-hint", id: `${name}-hint`, text: control.hint, hidden: control.hint === "" });
  const reset = focusable("button", { type: "button", class: "dsv4-icon dsv4-reset", "aria-label": `Reset ${control.label}`, title: "Back to the default", text: "↺" });
  const note = element("p", { class: "dsv4-note", id: `${name}-note`, hidden: true });
  const alert = element("p", { class: "dsv4-alert", role: "alert", hidden: true });
  const undo = focusable("button", { type: "button", class: "dsv4-quiet dsv4-undo", text: "Take it back", "aria-label": `Take the value of ${control.label} back`, hidden: true });
  made.main.setAttribute("aria-describedby", `${name}-hint ${name}-note`);
  const el = element(
    "div",
    { class: `dsv4-row dsv4-row-${control.kind}`, "data-name": control.name },
    element("div", { class: "dsv4-name" }, label, mark),
    element("div", { class: "dsv4-ways" }, ...made.ways),
    reset, hint, note, alert, undo,
  );
  on.listen(reset, "click", () => {
    on.reset(control.name);
    made.main.focus();
  });
  on.listen(undo, "click", () => {
    on.undo(control.name);
    made.main.focus();
  });

  return {
    el,
    /** @param {{ value: unknown, isChanged: boolean, note: string, refusal: string, blocked: object, isOff: boolean }} now */
    show(now, all) {
      made.show(now, all);
      toggle(mark, now.isChanged);
      reset.style.visibility = now.isChanged && !all.isCut ? "visible" : "hidden";
      const why = now.isOff ? "" : [now.note, ...new Set(Object.values(now.blocked))].filter(Boolean).join(" ");
      say(note, why);
      toggle(note, why !== "");
      say(alert, now.refusal && `Not applied: ${now.refusal}`);
      toggle(alert, now.refusal !== "");
      toggle(undo, now.refusal !== "");
      el.classList.toggle("is-changed", now.isChanged);
      for (const node of made.ways.flatMap((way) => [way, ...way.querySelectorAll("input, select, textarea")])) {
        if (node.matches("input, textarea, select")) node.setAttribute("aria-invalid", String(now.refusal !== ""));
      }
    },
  };
}

const KINDS = { number: numbers, choice, switch: switched, lines: texts, seed, window: policy };

/** A field that is read when a person is done with it. */
function field(control, name, on, { commit, step, label }) {
  const entry = focusable("input", { type: "text", inputmode: "decimal", class: "dsv4-entry", id: name, autocomplete: "off", spellcheck: "false", "aria-label": label });
  let before = "";
  const done = () => {
    if (entry.value === before) return;
    before = entry.value;
    commit(entry.value);
  };
  on.listen(entry, "change", done);
  on.listen(entry, "keydown", (event) => {
    if (event.key === "Enter") done();
    else if (event.key === "Escape") entry.value = before;
    else if (step && (event.key === "ArrowUp" || event.key === "ArrowDown")) step(event.key === "ArrowUp" ? 1 : -1);
    else return;
    event.preventDefault();
  });
  return {
    entry,
    show(text) {
      if (focused(entry) === entry && entry.value !== before) return; // being written
      before = text;
      if (entry.value !== text) entry.value = text;
    },
  };
}

function slider(control, on, put) {
  const range = focusable("input", { type: "range", class: "dsv4-slider", min: "0", max: String(last(control)), step: "1", "aria-label": `${control.label}, slider` });
  on.listen(range, "input", () => put(valueAt(control, Number(range.value))));
  return {
    range,
    show(value) {
      const at = String(position(control, typeof value === "number" ? value : null));
      if (range.value !== at) range.value = at;
      range.setAttribute("aria-valuetext", spoken(control, value));
      range.style.setProperty("--part", `${(100 * Number(at)) / (last(control) || 1)}%`);
    },
  };
}

function numbers(control, name, on) {
  let value = null;
  const put = (next) => on.put(control.name, next);
  const sliding = slider(control, on, put);
  const entering = field(control, name, on, { commit: (text) => put(typed(text)), step: (by) => put(stepped(control, value, by)) });
  if (control.stops.includes(null)) entering.entry.placeholder = "all";
  return {
    main: entering.entry,
    ways: [sliding.range, entering.entry],
    show(now) {
      value = typeof now.value === "number" ? now.value : null;
      const isOff = now.isOff;
      sliding.range.disabled = entering.entry.disabled = isOff;
      sliding.show(now.value);
      entering.show(shown(now.value));
    },
  };
}

/** Choices that would be refused cannot be made; the row says why. */
function options(select, control, now, value) {
  const known = [...select.options].map((option) => option.value);
  if (!known.includes(value)) select.append(element("option", { value, text: value }));
  for (const option of select.options) option.disabled = option.value !== value && now.blocked[option.value] !== undefined;
  if (select.value !== value) select.value = value;
}

function selectOf(control, name) {
  const given = control.choices.map(([value, text]) => element("option", { value, text }));
  return focusable("select", { class: "dsv4-select", id: name }, ...given);
}

function choice(control, name, on) {
  const select = selectOf(control, name);
  on.listen(select, "change", () => on.put(control.name, select.value === "" ? null : select.value));
  return {
    main: select,
    ways: [select],
    show(now) {
      select.disabled = now.isOff;
      options(select, control, now, shown(now.value));
    },
  };
}

function switched(control, name, on) {
  const box = focusable("input", { type: "checkbox", role: "switch", class: "dsv4-switch", id: name });
  on.listen(box, "change", () => on.put(control.name, box.checked));
  return {
    main: box,
    ways: [box],
    show(now) {
      box.checked = now.value === true;
      box.disabled = now.isOff || now.blocked[String(!box.checked)] !== undefined;
    },
  };
}

function texts(control, name, on) {
  const area = focusable("textarea", { class: "dsv4-area", id: name, rows: "2", spellcheck: "false" });
  let before = "";
  on.listen(area, "change", () => on.put(control.name, strings((before = area.value))));
  return {
    main: area,
    ways: [area],
    show(now) {
      const text = lines(Array.isArray(now.value) ? now.value : []);
      if (focused(area) === area && area.value !== before) return;
      before = text;
      if (area.value !== text) area.value = text;
      area.disabled = now.isOff;
    },
  };
}

function seed(control, name, on) {
  const entering = field(control, name, on, { commit: (text) => on.put("seed", text.trim() === "" ? null : text.trim()) });
  entering.entry.inputMode = "numeric";
  entering.entry.placeholder = "drawn";
  const lock = focusable("input", { type: "checkbox", role: "switch", class: "dsv4-switch" });
  const keep = focusable("button", { type: "button", class: "dsv4-quiet", text: "Keep it" });
  const told = element("span", { class: "dsv4-drawn" });
  on.listen(lock, "change", () => on.lock(lock.checked));
  on.listen(keep, "click", () => {
    on.lock(true);
    lock.focus();
  });
  return {
    main: entering.entry,
    ways: [entering.entry, element("label", { class: "dsv4-toggle" }, lock, element("span", { text: "Lock" })), element("div", { class: "dsv4-told" }, told, keep)],
    show(now, all) {
      const isLocked = now.value !== null && now.refusal === "";
      lock.checked = isLocked;
      entering.entry.disabled = lock.disabled = keep.disabled = now.isOff;
      entering.show(shown(now.value));
      toggle(keep, !isLocked && all.seed !== "");
      say(told, isLocked ? "the same each time" : all.seed === "" ? "drawn for each message" : `drawn; the last was ${all.seed}`);
    },
  };
}

function policy(control, name, on) {
  const select = selectOf(control, name);
  const tau = { name: "tau", label: "Confidence tau", low: 0.05, high: 0.95, step: 0.05, stops: [] };
  let window = ["slot", 0.5, 0];
  const put = (next) => on.put(control.name, next);
  const sliding = slider(tau, on, (value) => put(["slot", value, window[2]]));
  const entering = field(tau, `${name}-tau`, on, {
    commit: (text) => put(["slot", typed(text), window[2]]),
    step: (by) => put(["slot", stepped(tau, window[1], by), window[2]]),
    label: "tau",
  });
  const floor = field(tau, `${name}-floor`, on, { commit: (text) => put(["slot", window[1], typed(text) ?? 0]), label: "drafts that are verified in any case" });
  floor.entry.inputMode = "numeric";
  const more = element(
    "div",
    { class: "dsv4-slot" },
    element("span", { class: "dsv4-sub", text: "tau" }), sliding.range, entering.entry,
    element("span", { class: "dsv4-sub", text: "at least" }), floor.entry,
    element("span", { class: "dsv4-sub", text: "drafts" }),
  );
  on.listen(select, "change", () => put(select.value === "slot" ? window : select.value));
  return {
    main: select,
    ways: [select, more],
    show(now) {
      const isSlot = Array.isArray(now.value);
      if (isSlot) window = now.value;
      select.disabled = now.isOff;
      options(select, control, now, isSlot ? "slot" : shown(now.value));
      toggle(more, isSlot);
      for (const node of [sliding.range, entering.entry, floor.entry]) node.disabled = now.isOff;
      sliding.show(window[1]);
      entering.show(shown(window[1]));
      floor.show(shown(window[2]));
    },
  };
}
