// The committed ids as a map of cells: what is in sight is drawn, whatever the length.

import { inWindow, KINDS, kindOf, ledgerFacts, moved, tokenWords } from "./cache-words.js";
import { inksOf, sized } from "./cache-canvas.js";
import { list } from "./acceptance-strip.js";
import { element, focusable, say, toggle } from "./dom.js";

const CELL = 13;
const PITCH = 17;
const TALL = 22; // of a row: the cell, the window's line, and air
const PAD = 4;
const AROUND = 14; // tokens of context on each side

const INKS = {
  line: "--edge", paper: "--paper", reused: "--bar", computed: "--blue", generated: "--good", window: "--violet",
  anchor: "--amber", focus: "--accent", ink: "--ink",
};

function drawKind(ctx, kind, x, y, ink) {
  ctx.lineWidth = 1;
  ctx.strokeStyle = ctx.fillStyle = ink[kind];
  if (kind === "generated") {
    ctx.fillRect(x, y, CELL, CELL);
    return;
  }
  ctx.strokeRect(x + 0.5, y + 0.5, CELL - 1, CELL - 1);
  if (kind === "computed") {
    ctx.beginPath();
    ctx.moveTo(x, y + CELL);
    ctx.lineTo(x + CELL, y);
    ctx.lineTo(x + CELL, y + CELL);
    ctx.fill();
  }
}

function drawMarks(ctx, { isAnchor, isNear }, x, y, ink) {
  if (isNear) {
    ctx.fillStyle = ink.window;
    ctx.fillRect(x, y + CELL + 2, PITCH, 2.5);
  }
  if (isAnchor) {
    ctx.fillStyle = ink.anchor;
    ctx.beginPath();
    ctx.moveTo(x + CELL + 3.5, y + CELL + 1);
    ctx.lineTo(x + CELL + 3.5, y - 3);
    ctx.lineTo(x + CELL - 4.5, y + 1);
    ctx.lineTo(x + CELL + 1.5, y + 5);
    ctx.lineTo(x + CELL + 1.5, y + CELL + 1);
    ctx.fill();
  }
}

/**
 * @param {{ listen: Function, texts: ReturnType<import("./cache-store.js").texts>, announce: (text: string) => void,
 *           onLook: (token: number) => void }} on
 */
export function ledgerMap({ listen, texts, announce, onLook }) {
  const canvas = element("canvas", { "aria-hidden": "true" });
  const whole = element("div", { class: "dsv4-map-whole" }, canvas);
  const scroller = focusable(
    "div",
    {
      class: "dsv4-map", role: "application", tabindex: "0", "aria-roledescription": "map of tokens",
      "aria-label": "Committed tokens. Arrows move between tokens, Enter shows what a token read.",
    },
    whole,
  );
  const facts = element("div", { class: "dsv4-map-facts" });
  const legend = element("ul", { class: "dsv4-keys", "aria-label": "What the cells show" });
  const told = element("p", { class: "dsv4-told" });
  const around = element("p", { class: "dsv4-around" });
  const probe = element("span", { class: "dsv4-probe", "aria-hidden": "true" });
  const el = element("div", { class: "dsv4-stack" }, facts, scroller, legend, told, around, probe);

  let ledger = null;
  let ink = null;
  let at = -1;
  let hover = -1;
  let scheduled = 0;
  let anchors = new Set();

  const columns = () => Math.max(1, Math.floor((scroller.clientWidth - 2 * PAD + PITCH - CELL) / PITCH));
  const repaint = () => (scheduled ||= requestAnimationFrame(paint));

  function paint() {
    scheduled = 0;
    if (!ledger || !el.isConnected || scroller.clientWidth === 0) return;
    ink ??= inksOf(probe, INKS);
    const per = columns();
    const rows = Math.ceil(ledger.n / per);
    whole.style.height = `${rows * TALL + 2 * PAD}px`;
    const height = Math.min(scroller.clientHeight, rows * TALL + 2 * PAD);
    const ctx = sized(canvas, scroller.clientWidth, height);
    const top = scroller.scrollTop;
    for (let row = Math.max(0, Math.floor((top - PAD) / TALL)); row < rows && row * TALL + PAD < top + height; row += 1) {
      for (let i = row * per; i < Math.min(ledger.n, (row + 1) * per); i += 1) {
        const [x, y] = [PAD + (i - row * per) * PITCH, PAD + 2 + row * TALL - top];
        drawKind(ctx, kindOf(i, ledger), x, y, ink);
        drawMarks(ctx, { isAnchor: anchors.has(i + 1), isNear: inWindow(i, ledger) }, x, y, ink);
        if (i === hover || i === at) {
          ctx.strokeStyle = ink.focus;
          ctx.lineWidth = 2;
          ctx.strokeRect(x - 2, y - 2, CELL + 4, CELL + 4);
        }
      }
    }
    tell();
  }

  function tell() {
    const i = hover >= 0 ? hover : at;
    if (i < 0) {
      say(told, "Point at a cell, or move through them with the arrow keys. Enter, or a double click, shows what a token read.");
      around.replaceChildren();
      toggle(around, false);
      return;
    }
    toggle(around, true);
    say(told, tokenWords(i, ledger, texts.at(i)));
    const mark = element("mark", { text: texts.at(i) ?? "…" });
    around.replaceChildren(
      document.createTextNode(texts.join(Math.max(0, i - AROUND), i)), mark,
      document.createTextNode(texts.join(i + 1, Math.min(ledger.n, i + 1 + AROUND))),
    );
  }

  function under(event) {
    const box = whole.getBoundingClientRect();
    const [column, row] = [Math.floor((event.clientX - box.left - PAD) / PITCH), Math.floor((event.clientY - box.top - PAD) / TALL)];
    const i = row * columns() + column;
    return column >= 0 && column < columns() && row >= 0 && i < ledger.n ? i : -1;
  }

  function go(to) {
    at = to;
    hover = -1;
    const y = PAD + Math.floor(at / columns()) * TALL;
    if (y < scroller.scrollTop) scroller.scrollTop = y - PAD;
    else if (y + TALL > scroller.scrollTop + scroller.clientHeight) scroller.scrollTop = y + TALL + PAD - scroller.clientHeight;
    announce(tokenWords(at, ledger, texts.at(at)));
    repaint();
  }

  listen(scroller, "scroll", repaint);
  listen(scroller, "pointermove", (event) => {
    const i = under(event);
    if (i === hover) return;
    hover = i;
    repaint();
  });
  listen(scroller, "pointerleave", () => {
    hover = -1;
    repaint();
  });
  listen(scroller, "click", (event) => {
    const i = under(event);
    if (i >= 0) go(i);
  });
  listen(scroller, "dblclick", (event) => {
    const i = under(event);
    if (i >= 0) onLook(i);
  });
  listen(scroller, "keydown", (event) => {
    if (!ledger?.n || event.altKey || event.ctrlKey || event.metaKey) return;
    if (event.key === "Enter" && at >= 0) onLook(at);
    else {
      const page = Math.max(1, Math.floor(scroller.clientHeight / TALL) - 1);
      const to = at < 0 && event.key.startsWith("Arrow") ? ledger.n - 1 : moved(Math.max(0, at), event.key, { n: ledger.n, columns: columns(), page });
      if (to === null) return;
      go(to);
    }
    event.preventDefault();
    event.stopPropagation();
  });
  const watching = new ResizeObserver(repaint);
  watching.observe(scroller);

  function key(kind) {
    const swatch = element("canvas", { "aria-hidden": "true" });
    const ctx = sized(swatch, 20, 20);
    if (kind in KINDS) drawKind(ctx, kind, 3, 3, ink);
    else drawMarks(ctx, { isAnchor: kind === "anchor", isNear: kind === "window" }, 3, 3, ink);
    return swatch;
  }

  return {
    el,
    repaint,
    recolour() {
      ink = inksOf(probe, INKS);
      const names = { ...KINDS, window: "what the next token sees", anchor: "an anchor ends here" };
      const shown = ledger && ledger.prompt > 0 ? Object.keys(names) : ["reused", "window", "anchor"];
      legend.replaceChildren(...shown.map((kind) => element("li", {}, key(kind), element("span", { text: names[kind] }))));
      repaint();
    },
    /** @param {import("./cache-words.js").Ledger | null} next */
    show(next) {
      const isOther = next?.key !== ledger?.key;
      ledger = next;
      if (isOther) at = hover = -1;
      anchors = new Set(next?.anchors ?? []);
      for (const node of [scroller, legend, told]) toggle(node, Boolean(next?.n));
      facts.replaceChildren(list(next ? ledgerFacts(next) : []));
      if (next?.n) this.recolour();
    },
    end() {
      watching.disconnect();
      cancelAnimationFrame(scheduled);
    },
  };
}
