// Which experts were visited: a map of layers and experts, with a cursor and a table beside it.

import { inksOf, sized } from "./cache-canvas.js";
import { expertWords, number } from "./cache-words.js";
import { element, focusable, say, toggle } from "./dom.js";

const LEFT = 74; // pixels of the layers' names
const TOP = 20; // of the experts' numbers
const TALL = 24;
const WIDEST = 54;
const NUMBERED = 30; // pixels of a cell that can hold its number

const INKS = { ink: "--ink", faint: "--faint", paper: "--paper", hot: "--accent", focus: "--amber", line: "--line" };

const mix = (from, to, part) => {
  const parts = (colour) => colour.match(/[\d.]+/g).slice(0, 3).map(Number);
  const scale = /^color\(/.test(from) ? 255 : 1;
  const [a, b] = [parts(from).map((v) => v * scale), parts(to).map((v) => v * (/^color\(/.test(to) ? 255 : 1))];
  return a.map((value, i) => Math.round(value + (b[i] - value) * part));
};

/**
 * @param {{ listen: Function, announce: (text: string) => void, onAsk: (first: number, last: number) => void, name: string }} on
 */
export function expertMap({ listen, announce, onAsk, name }) {
  const scope = focusable("select", { class: "dsv4-select", id: `${name}-scope` });
  const controls = element("div", { class: "dsv4-controls" }, element("label", { for: `${name}-scope`, text: "Tokens" }), scope);
  const canvas = element("canvas", { "aria-hidden": "true" });
  const stage = focusable(
    "div",
    {
      class: "dsv4-heat", role: "application", tabindex: "0", "aria-roledescription": "map of layers and experts",
      "aria-label": "Visits by layer and expert. Arrows move between cells.",
    },
    canvas,
  );
  const told = element("p", { class: "dsv4-told" });
  const body = element("div");
  const twin = element(
    "details", { class: "dsv4-twin" }, focusable("summary", { text: "As a table" }),
    focusable("div", { class: "dsv4-wide dsv4-tall", tabindex: "0", role: "region", "aria-label": "Visits by layer and expert" }, body),
  );
  const probe = element("span", { class: "dsv4-probe", "aria-hidden": "true" });
  const el = element("div", { class: "dsv4-stack" }, controls, stage, told, twin, probe);

  let ledger = null;
  let routed = [];
  let map = null;
  let ink = null;
  let at = -1;
  let hover = -1;
  let scheduled = 0;
  let token = -1;

  const repaint = () => (scheduled ||= requestAnimationFrame(paint));
  const wide = () => Math.max(4, Math.min(WIDEST, (stage.clientWidth - LEFT - 4) / map.experts));

  function paint() {
    scheduled = 0;
    if (!map || !el.isConnected || stage.clientWidth === 0) return;
    ink ??= inksOf(probe, INKS);
    const { layers, experts, counts } = map;
    const w = wide();
    const ctx = sized(canvas, LEFT + w * experts + 2, TOP + TALL * layers + 2);
    ctx.font = ink.font;
    ctx.textBaseline = "middle";
    const most = Math.max(1, ...counts);
    const step = Math.ceil(26 / w);
    ctx.fillStyle = ink.faint;
    ctx.textAlign = "center";
    for (let e = 0; e < experts; e += step) ctx.fillText(String(e), LEFT + (e + 0.5) * w, TOP / 2);
    for (let layer = 0; layer < layers; layer += 1) {
      const y = TOP + layer * TALL;
      ctx.fillStyle = ink.ink;
      ctx.textAlign = "right";
      ctx.fillText(`${routed[layer] === "score" ? "" : "# "}layer ${layer}`, LEFT - 8, y + TALL / 2);
      ctx.textAlign = "center";
      for (let e = 0; e < experts; e += 1) {
        const visits = counts[layer * experts + e];
        const [r, g, b] = mix(ink.paper, ink.hot, visits / most);
        ctx.fillStyle = `rgb(${r} ${g} ${b})`;
        ctx.fillRect(LEFT + e * w, y, w - (w > 8 ? 2 : 0.5), TALL - 2);
        ctx.strokeStyle = ink.line;
        ctx.lineWidth = 1;
        if (w > 8) ctx.strokeRect(LEFT + e * w + 0.5, y + 0.5, w - 3, TALL - 3);
        if (w >= NUMBERED) {
          ctx.fillStyle = 0.299 * r + 0.587 * g + 0.114 * b > 112 ? "#11151c" : "#ffffff";
          ctx.fillText(number(visits), LEFT + e * w + w / 2 - 1, y + TALL / 2 - 0.5);
        }
        if (layer * experts + e === (hover >= 0 ? hover : at)) {
          ctx.strokeStyle = ink.focus;
          ctx.lineWidth = 2.5;
          ctx.strokeRect(LEFT + e * w - 0.5, y - 0.5, w - 1, TALL - 1);
        }
      }
    }
    const cell = hover >= 0 ? hover : at;
    say(told, cell < 0 ? "# routed by the token's id alone. Point at a cell, or move with the arrow keys." : words(cell));
  }

  const words = (cell) => {
    const [layer, expert] = [Math.floor(cell / map.experts), cell % map.experts];
    return expertWords(layer, expert, map.counts[cell], map.tokens, routed[layer] ?? "score");
  };

  function table() {
    const { layers, experts, counts } = map;
    const head = ["layer", "routed by", ...Array.from({ length: experts }, (_, e) => `e${e}`)];
    body.replaceChildren(
      element(
        "table", { class: "dsv4-table" }, element("caption", { class: "dsv4-unseen", text: "Visits by layer and expert" }),
        element("thead", {}, element("tr", {}, ...head.map((text) => element("th", { scope: "col", text })))),
        element("tbody", {}, ...Array.from({ length: layers }, (_, layer) => element("tr", {},
          element("th", { scope: "row", text: String(layer) }), element("td", { text: routed[layer] ?? "" }),
          ...Array.from(counts.subarray(layer * experts, (layer + 1) * experts), (visits) => element("td", { class: "dsv4-n", text: number(visits) })),
        ))),
      ),
    );
  }

  /** The choices: [text, first, last]. */
  function scopes() {
    const { n, reused, prompt } = ledger;
    const out = [["the whole sequence", 0, n]];
    if (prompt > 0 && reused < n) out.push(["the last turn: what it computed and said", reused, n]);
    if (prompt > 0 && prompt < n) out.push(["the reply", prompt, n]);
    if (token >= 0 && token < n) out.push([`token ${number(token)}, chosen under Attention`, token, token + 1]);
    return out;
  }

  function ask() {
    const found = scopes()[Number(scope.value)] ?? scopes()[0];
    onAsk(found[1], found[2]);
  }

  function under(event) {
    const box = canvas.getBoundingClientRect();
    const [e, layer] = [Math.floor((event.clientX - box.left - LEFT) / wide()), Math.floor((event.clientY - box.top - TOP) / TALL)];
    return map && e >= 0 && e < map.experts && layer >= 0 && layer < map.layers ? layer * map.experts + e : -1;
  }

  listen(scope, "change", ask);
  listen(stage, "pointermove", (event) => {
    const cell = under(event);
    if (cell === hover) return;
    hover = cell;
    repaint();
  });
  listen(stage, "pointerleave", () => {
    hover = -1;
    repaint();
  });
  listen(stage, "keydown", (event) => {
    if (!map || event.altKey || event.ctrlKey || event.metaKey) return;
    const steps = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0], Home: [0, -map.experts], End: [0, map.experts] };
    const step = steps[event.key];
    if (!step) return;
    const from = Math.max(0, at);
    const layer = Math.max(0, Math.min(map.layers - 1, Math.floor(from / map.experts) + step[0]));
    const expert = Math.max(0, Math.min(map.experts - 1, (from % map.experts) + step[1]));
    at = at < 0 ? 0 : layer * map.experts + expert;
    hover = -1;
    announce(words(at));
    repaint();
    event.preventDefault();
    event.stopPropagation();
  });
  const watching = new ResizeObserver(repaint);
  watching.observe(stage);

  return {
    el,
    recolour() {
      ink = null;
      repaint();
    },
    /** @param {number} chosen the token chosen under Attention, -1 for none */
    open(chosen) {
      if (!ledger?.n) return;
      token = chosen;
      const kept = scope.value || "0";
      scope.replaceChildren(...scopes().map(([text], i) => element("option", { value: String(i), text })));
      scope.value = Number(kept) < scope.options.length ? kept : "0";
      ask();
    },
    answered(answer) {
      map = answer;
      table();
      toggle(told, true);
      repaint();
    },
    show(next, told) {
      if (next?.key !== ledger?.key) {
        map = null;
        at = hover = -1;
        canvas.width = 0;
        body.replaceChildren();
        say(el.querySelector(".dsv4-told"), "Asking the engine…");
      }
      ledger = next;
      routed = told.map(([, , by]) => by);
    },
    end() {
      watching.disconnect();
      cancelAnimationFrame(scheduled);
    },
  };
}
