// Where the time of a turn went: a small table, with a bar per phase as its last column.

import { element } from "./dom.js";

/** @param {import("./protocol.js").RunFacts[]} runs */
export function waterfall(runs) {
  return element("div", { class: "dsv4-times" }, ...runs.map((run, i) => timesOf(run, i, runs.length)));
}

function timesOf({ choice, rows }, i, n) {
  const end = Math.max(...rows.map(([, , start, seconds]) => start + seconds), 1e-9);
  const caption = n > 1 ? `Run ${i + 1} of ${n} · ${choice}` : `Time by phase · ${choice}`;
  return element(
    "table",
    { class: "dsv4-waterfall" },
    element("caption", { text: caption }),
    element(
      "thead",
      { class: "dsv4-unseen" },
      element("tr", {}, ...["Phase", "Length", "Of the whole"].map((text) => element("th", { scope: "col", text }))),
    ),
    element("tbody", {}, ...rows.map((row) => phase(row, end))),
  );
}

function phase([name, note, start, seconds, words], end) {
  const bar = element("span", { class: "dsv4-phase" });
  bar.style.marginInlineStart = percent(start / end);
  bar.style.width = percent(seconds / end);
  const share = element("span", { class: "dsv4-unseen", text: percent(seconds / end) });
  const label = element("th", { scope: "row", text: name });
  if (note) label.append(element("span", { class: "dsv4-phase-note", text: ` ${note}` }));
  return element("tr", {}, label, element("td", { text: words }), element("td", {}, bar, share));
}

function percent(part) {
  return `${(100 * part).toFixed(1)}%`;
}
