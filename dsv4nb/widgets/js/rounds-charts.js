// Small line charts as SVG, each with a table that says the same.

import { chance, percent } from "./rounds-words.js";

const SPACE = "http://www.w3.org/2000/svg";
const W = 300;
const H = 168;
const BOX = { left: 40, right: 18, top: 10, bottom: 32 };

function svg(tag, attributes = {}, ...children) {
  const node = document.createElementNS(SPACE, tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "text") node.textContent = String(value);
    else if (value !== undefined) node.setAttribute(name, String(value));
  }
  node.append(...children);
  return node;
}

function plot(label, { x, y, xName, xTicks, yTicks, ySay }) {
  const root = svg("svg", { viewBox: `0 0 ${W} ${H}`, role: "img", "aria-label": label, class: "dsv4-plot" });
  for (const value of yTicks) {
    root.append(
      svg("line", { x1: BOX.left, x2: W - BOX.right, y1: y(value), y2: y(value), class: "dsv4-grid" }),
      svg("text", { x: BOX.left - 6, y: y(value) + 4, "text-anchor": "end", text: ySay(value) }),
    );
  }
  for (const [value, text] of xTicks) {
    root.append(svg("text", { x: x(value), y: H - BOX.bottom + 16, "text-anchor": "middle", text }));
  }
  root.append(svg("text", { x: (BOX.left + W - BOX.right) / 2, y: H - 3, "text-anchor": "middle", text: xName }));
  return root;
}

const across = (from, to) => (value) => BOX.left + ((value - from) / (to - from || 1)) * (W - BOX.left - BOX.right);
const upward = (from, to) => (value) => H - BOX.bottom - ((value - from) / (to - from || 1)) * (H - BOX.top - BOX.bottom);

const SHAPES = [
  (x, y) => svg("circle", { cx: x, cy: y, r: 3.5 }),
  (x, y) => svg("rect", { x: x - 3.2, y: y - 3.2, width: 6.4, height: 6.4 }),
  (x, y) => svg("path", { d: `M${x} ${y - 4.4}l4.2 7.2h-8.4z` }),
];

/** A legend's picture of a series. @param {"line" | "bar" | "marks"} look */
export function seriesKey(i, look = "line") {
  if (look === "bar") {
    const bar = svg("rect", { x: 7, y: 0, width: 12, height: 12, class: "dsv4-bar" });
    return svg("svg", { viewBox: "0 0 26 12", width: 26, height: 12, "aria-hidden": "true" }, bar);
  }
  return svg(
    "svg",
    { viewBox: "0 0 26 12", width: 26, height: 12, "aria-hidden": "true", class: `dsv4-series dsv4-series-${i}` },
    ...(look === "line" ? [svg("line", { x1: 0, x2: 26, y1: 6, y2: 6 })] : []),
    SHAPES[i](13, 6),
  );
}

/** The first as bars, which the others often touch. @param {[string, (number | null)[]][]} curves by position */
export function positions(curves) {
  const n = Math.max(1, ...curves.map(([, values]) => values.length));
  const x = across(0.6, n + 0.4), y = upward(0, 1);
  const ticks = Array.from({ length: n }, (_, k) => [k + 1, String(k + 1)]);
  const root = plot("Accepted drafts by position", {
    x, y, xName: "draft", xTicks: ticks, yTicks: [0, 0.25, 0.5, 0.75, 1], ySay: (value) => percent(value, 0),
  });
  curves.forEach(([, values], i) => {
    const told = values.map((value, k) => [k + 1, value]).filter(([, value]) => value !== null);
    const points = told.map(([k, value]) => [x(k), y(value)]);
    if (i === 0) {
      const bar = ([px, py]) => svg("rect", { x: px - 13, y: py, width: 26, height: y(0) - py, class: "dsv4-bar" });
      root.append(...points.map(bar));
      return;
    }
    root.append(
      svg(
        "g",
        { class: `dsv4-series dsv4-series-${i}` },
        svg("polyline", { points: points.map((point) => point.join(",")).join(" ") }),
        ...points.map((point) => SHAPES[i](...point)),
      ),
    );
  });
  return root;
}

/** Larger marks stand for more drafts. @param {{ bins: [number, number, number][] }[]} told confidence, then survival */
export function reliability(told) {
  const x = across(0, 1), y = upward(0, 1);
  const ticks = [0, 0.25, 0.5, 0.75, 1];
  const root = plot("Predicted against observed acceptance", {
    x, y, xName: "predicted", xTicks: ticks.map((value) => [value, percent(value, 0)]).slice(1), yTicks: ticks,
    ySay: (value) => percent(value, 0),
  });
  root.append(svg("line", { x1: x(0), y1: y(0), x2: x(1), y2: y(1), class: "dsv4-diagonal" }));
  told.forEach(({ bins }, i) => {
    const most = Math.max(1, ...bins.map(([n]) => n));
    const points = bins.map(([, predicted, observed]) => [x(predicted), y(observed)]);
    root.append(
      svg(
        "g",
        { class: `dsv4-series dsv4-series-${i}` },
        ...points.map(([px, py], k) => sizedMark(i, px, py, 2.2 + 3.4 * Math.sqrt(bins[k][0] / most))),
      ),
    );
  });
  return root;
}

function sizedMark(i, x, y, r) {
  return i === 0
    ? svg("circle", { cx: x, cy: y, r })
    : svg("rect", { x: x - r * 0.85, y: y - r * 0.85, width: 1.7 * r, height: 1.7 * r });
}

/**
 * Tokens and rows a round under each tau; the shade is what the record leaves open.
 * @param {object[]} points all drafts first, then by tau @param {number} n rounds @param {number} at index in sight
 */
export function taus(points, n, at) {
  const most = Math.max(2, Math.ceil(Math.max(...points.map(({ rows }) => rows / n))));
  const x = across(0, 1), y = upward(0, most);
  const step = most > 4 ? 2 : 1;
  const root = plot("Tokens and verified rows a round, by tau", {
    x, y, xName: "tau", xTicks: [[0, "off"], [0.25, "0.25"], [0.5, "0.5"], [0.75, "0.75"], [1, "1"]],
    yTicks: Array.from({ length: Math.floor(most / step) + 1 }, (_, i) => i * step), ySay: String,
  });
  const place = (point, value) => `${x(point.tau ?? 0).toFixed(1)},${y(value / n).toFixed(1)}`;
  const low = points.map((point) => place(point, point.tokens[0]));
  const high = points.map((point) => place(point, point.tokens[1]));
  root.append(
    svg("polygon", { points: [...low, ...high.toReversed()].join(" "), class: "dsv4-band" }),
    svg(
      "g",
      { class: "dsv4-series dsv4-series-0" },
      svg("polyline", { points: low.join(" ") }),
      svg("polyline", { points: high.join(" ") }),
    ),
    svg(
      "g",
      { class: "dsv4-series dsv4-series-1" },
      svg("polyline", { points: points.map((point) => place(point, point.rows)).join(" ") }),
    ),
  );
  const point = points[at];
  if (point) {
    const px = x(point.tau ?? 0);
    root.append(
      svg("line", { x1: px, x2: px, y1: BOX.top, y2: H - BOX.bottom, class: "dsv4-cursor" }),
      svg("g", { class: "dsv4-series dsv4-series-0" }, SHAPES[0](px, y(point.tokens[0] / n))),
      svg("g", { class: "dsv4-series dsv4-series-1" }, SHAPES[1](px, y(point.rows / n))),
    );
  }
  return root;
}

/** Rows of a table: [head, ...cells] each. */
export function positionRows(curves) {
  const n = Math.max(0, ...curves.map(([, values]) => values.length));
  const head = ["accepted", ...Array.from({ length: n }, (_, k) => `draft ${k + 1}`)];
  return [head, ...curves.map(([name, values]) => [name, ...values.map((value) => percent(value))])];
}

export function reliabilityRows(named) {
  const rows = [["", "drafts", "predicted", "observed"]];
  for (const [name, { bins }] of named) {
    for (const [n, predicted, observed] of bins) rows.push([name, String(n), chance(predicted), chance(observed)]);
  }
  return rows;
}
