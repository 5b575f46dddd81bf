// Decisions, snapshots and bytes: lists and tables of buttons and bars.

import { awayWords, count, decisionWords, number, size } from "./cache-words.js";
import { element, focusable, say, toggle } from "./dom.js";

const NARROW_OUT = ["logits kept", "hits", "ends with"]; // columns that a narrow page does without
const cell = (text, kind = "") => element("td", { text, class: kind });

function table(caption, heads, rows) {
  return element(
    "table",
    { class: "dsv4-table" },
    element("caption", { class: "dsv4-unseen", text: caption }),
    element("thead", {}, element("tr", {}, ...heads.map((text) => element("th", { scope: "col", text, class: NARROW_OUT.includes(text) ? "dsv4-out" : undefined })))),
    element("tbody", {}, ...rows),
  );
}

const wide = (label, ...children) =>
  focusable("div", { class: "dsv4-wide", tabindex: "0", role: "region", "aria-label": label }, ...children);

/** Why each run started where it did. */
export function decisions() {
  const starts = element("p", { class: "dsv4-note" });
  const items = element("ol", { class: "dsv4-bare dsv4-log", "aria-label": "Decisions, the newest first" });
  const empty = element("p", { class: "dsv4-empty", text: "No decision yet. Each turn of a chat and each request of a batch makes one." });
  const more = element("p", { class: "dsv4-note", hidden: true });
  return {
    el: element("div", { class: "dsv4-stack" }, starts, empty, items, more),
    show(state) {
      say(starts, `Starts: ${state.starts}`);
      toggle(empty, state.log.length === 0);
      toggle(starts, state.log.length > 0);
      say(more, `and ${count(state.more, "older one")}`);
      toggle(more, state.more > 0);
      items.replaceChildren(...state.log.map(decision));
    },
  };
}

function decision(one) {
  const [word, numbers] = decisionWords(one);
  const share = element("span", { class: "dsv4-share", "aria-hidden": "true" });
  share.style.setProperty("--part", String(one.prompt ? one.length / one.prompt : 0));
  const parts = [
    element("div", { class: "dsv4-line" }, element("span", { class: "dsv4-badge", "data-kind": one.kind, text: word }), element("span", { class: "dsv4-faint", text: `#${one.number} · ${one.at}` })),
    element("div", { class: "dsv4-line" }, share, element("span", { text: numbers })),
    element("p", { class: "dsv4-why", text: one.reason }),
  ];
  const away = awayWords(one.away);
  if (away) parts.push(element("p", { class: "dsv4-away", text: away }));
  return element("li", { class: "dsv4-decision" }, ...parts);
}

/** @param {{ onOrder: (kind: string, fields: object) => void, onShow: (key: string) => void }} on */
export function snapshots({ onOrder, onShow }) {
  const device = element("div");
  const host = element("div");
  const more = element("p", { class: "dsv4-note", hidden: true });
  const el = element(
    "div",
    { class: "dsv4-stack" },
    element("h4", { text: "Anchors on the device" }), device, element("h4", { text: "Prefixes in host memory" }), host, more,
  );

  function button(text, label, act) {
    const node = focusable("button", { type: "button", class: "dsv4-quiet", text, "aria-label": label });
    node.addEventListener("click", act); // goes with the row
    return node;
  }

  function row(store, one, facts, move) {
    const what = store === "anchor" ? `anchor ${one.id}` : `prefix ${one.id}`;
    const fields = { store, entry: one.id };
    const pin = button(one.pinned ? "Unpin" : "Pin", `${one.pinned ? "Unpin" : "Pin"} ${what}`, () => onOrder("pin", { ...fields, value: !one.pinned }));
    const doings = [pin, button(move[0], `${move[1]} ${what}`, () => onOrder("move", fields))];
    if (store === "anchor") doings.unshift(button("Show", `Show the tokens of ${what}`, () => onShow(`anchor ${one.id}`)));
    doings.push(button("Delete", `Delete ${what}`, () => onOrder("delete", fields)));
    return element(
      "tr",
      { "data-entry": `${store} ${one.id}` },
      element("th", { scope: "row", text: one.pinned ? `${one.id} pinned` : String(one.id) }),
      ...facts.map((text, i) => cell(text, ["", "", "dsv4-out", "dsv4-tail dsv4-out"][i])),
      element("td", { class: "dsv4-doings" }, ...doings),
    );
  }

  function fill(place, caption, heads, rows, nothing) {
    const held = place.contains(document.activeElement) ? document.activeElement.getAttribute("aria-label") : null;
    place.replaceChildren(rows.length ? wide(caption, table(caption, [...heads, "what to do"], rows)) : element("p", { class: "dsv4-note", text: nothing }));
    if (held === null) return;
    const swapped = held.startsWith("Pin") ? `Unpin${held.slice(3)}` : held.startsWith("Unpin") ? `Pin${held.slice(5)}` : held;
    const same = [...place.querySelectorAll("button")].find((node) => [held, swapped].includes(node.getAttribute("aria-label")));
    (same ?? place.querySelector("button"))?.focus();
  }

  return {
    el,
    show(state) {
      fill(
        device, "Anchors on the device", ["id", "tokens", "own bytes", "logits kept", "ends with"],
        state.anchors.map((one) => row("anchor", one, [number(one.tokens), size(one.bytes), one.logits ? "yes" : "no", one.name], ["To host", "Copy to host memory:"])),
        "None. A run that ends well leaves some.",
      );
      say(more, `and ${number(state.more_stored)} more, less recently used`);
      toggle(more, state.more_stored > 0);
      const isOff = state.budgets[1][2] === 0;
      fill(
        host, "Prefixes in host memory", ["id", "tokens", "bytes", "hits", "ends with"],
        state.host.map((one) => row("host", one, [number(one.tokens), size(one.bytes), number(one.hits), one.name], ["Restore", "Bring back to the device:"])),
        isOff ? "Host memory is off; load the model with host_cache_mib= to keep long prefixes there." : "None yet. Long prompts that nobody knew are kept here.",
      );
    },
  };
}

function bar(used, of, label) {
  const node = element("span", { class: "dsv4-level", role: "img", "aria-label": label });
  node.style.setProperty("--part", String(of ? Math.min(1, used / of) : 0));
  return node;
}

const CLASSES = {
  window: "key/value rows of the sliding window",
  compressor: "compressed entries that are attended to",
  indexer: "keys that entries are picked by",
  source: "rows that the next entries are pooled from",
  drafter: "context rows of the drafter",
  prefill: "what prompts are read in chunks with",
  forward: "angles of all positions, and what kernels hand on",
};

/** What the caches take. */
export function memory() {
  const devices = element("div", { class: "dsv4-stack" });
  const budgets = element("div");
  const free = element("p", { class: "dsv4-note" });
  const none = element("p", { class: "dsv4-empty", text: "This engine does not tell what its caches take." });
  return {
    el: element("div", { class: "dsv4-stack" }, none, devices, element("h4", { text: "Budgets" }), budgets, free),
    show(state) {
      toggle(none, state.devices.length === 0);
      say(free, `About ${size(state.free)} of the machine's memory are free.`);
      devices.replaceChildren(
        ...state.devices.flatMap((one) => [
          element("h4", { text: `On ${one.name}` }),
          wide(`Bytes on ${one.name}`, table(`Bytes on ${one.name}`, ["class", "in use", "share of all", "set aside", "what it holds"], [
            ...one.classes.map(([name, used, reserved]) => element("tr", { "data-class": name },
              element("th", { scope: "row", text: name }), cell(size(used), "dsv4-n"),
              element("td", {}, bar(used, one.reserved, `${name}: ${size(used)} in use, of ${size(one.reserved)} set aside for all`)),
              cell(size(reserved), "dsv4-n"), cell(CLASSES[name] ?? "", "dsv4-tail"))),
            element("tr", { class: "dsv4-sum" }, element("th", { scope: "row", text: "all" }), cell(size(one.used), "dsv4-n"),
              element("td", {}, bar(one.used, one.reserved, `all: ${size(one.used)} of ${size(one.reserved)}`)), cell(size(one.reserved), "dsv4-n"), cell("", "dsv4-tail")),
          ])),
        ]),
      );
      const rows = state.budgets.map(([name, used, of]) => element("tr", {},
        element("th", { scope: "row", text: name }), cell(size(used), "dsv4-n"),
        element("td", {}, bar(used, of, `${name}: ${size(used)} of ${size(of)}`)), cell(of ? size(of) : "off", "dsv4-n"),
        cell(name === "anchors" ? "rows and last blocks, counted for each snapshot" : "copies of long prefixes", "dsv4-tail")));
      budgets.replaceChildren(wide("Budgets", table("Budgets", ["store", "in use", "share", "at most", "what it holds"], rows)));
    },
  };
}
