// What a token read in a layer, over the text that it came from.

import { ATTENTION, entryRows, moved, number, ordered, percent, quoted, readsWords, span } from "./cache-words.js";
import { element, focusable, say, toggle } from "./dom.js";

const BLOCK = 200; // tokens of a block of text
const MOST = 8192; // tokens of text that a page holds, the last ones
const SOON_MS = 120; // a cursor that moves on asks for nothing
const LEVELS = 8;

const level = (mass, top) => (mass > 0 && top > 0 ? Math.max(1, Math.ceil((LEVELS * mass) / top)) : 0);

/**
 * @param {{ listen: Function, texts: ReturnType<import("./cache-store.js").texts>, announce: (text: string) => void,
 *           onAsk: (token: number, layer: number) => void, name: string }} on
 */
export function readsView({ listen, texts, announce, onAsk, name }) {
  const layers = focusable("select", { class: "dsv4-select", id: `${name}-layer` });
  const order = focusable(
    "select", { class: "dsv4-select", id: `${name}-order` },
    element("option", { value: "mass", text: "attention" }), element("option", { value: "score", text: "indexer score" }),
    element("option", { value: "position", text: "position" }),
  );
  const controls = element(
    "div", { class: "dsv4-controls" },
    element("label", { for: `${name}-layer`, text: "Layer" }), layers,
    element("label", { for: `${name}-order`, text: "Entries by" }), order,
  );
  const sentence = element("p", { class: "dsv4-told" });
  const text = focusable("div", {
    class: "dsv4-source", role: "application", tabindex: "0", "aria-roledescription": "text of tokens",
    "aria-label": "The text. Left and right move the token whose reads are shown; up and down by ten.",
  });
  const note = element("p", { class: "dsv4-note", hidden: true });
  const keys = element(
    "ul", { class: "dsv4-keys", "aria-hidden": "true" },
    element("li", {}, element("span", { class: "dsv4-swatch dsv4-asking", text: "a" }), element("span", { text: "the token that reads" })),
    element("li", {}, element("span", { class: "dsv4-swatch", "data-row": "6", text: "a" }), element("span", { text: "window row, darker with more attention" })),
    element("li", {}, element("span", { class: "dsv4-swatch", "data-entry": "6", text: "a" }), element("span", { text: "compressed entry, thicker with more attention" })),
    element("li", {}, element("span", { class: "dsv4-swatch dsv4-lit", text: "a" }), element("span", { text: "the entry pointed at; dotted: what it pools beside" })),
  );
  const entries = element("tbody");
  const table = element(
    "table", { class: "dsv4-table dsv4-entries" },
    element("caption", { class: "dsv4-unseen", text: "Compressed entries that were read" }),
    element("thead", {}, element("tr", {}, ...["entry", "tokens", "score", "attention", "text"].map((head) => element("th", { scope: "col", text: head })))),
    entries,
  );
  const scroller = element("div", { class: "dsv4-wide dsv4-tall", role: "region", "aria-label": "Compressed entries that were read" }, table);
  const empty = element("p", { class: "dsv4-note", hidden: true });
  const rows = element("tbody");
  const twin = element(
    "details", { class: "dsv4-twin" }, focusable("summary", { text: "Window rows as a table" }),
    focusable("div", { class: "dsv4-wide dsv4-tall", tabindex: "0", role: "region", "aria-label": "Window rows" },
      element("table", { class: "dsv4-table" },
        element("caption", { class: "dsv4-unseen", text: "Window rows that were read, the most read first" }),
        element("thead", {}, element("tr", {}, ...["token", "attention", "text"].map((head) => element("th", { scope: "col", text: head })))), rows)),
  );
  const el = element("div", { class: "dsv4-stack" }, controls, sentence, text, note, keys, scroller, empty, twin);

  let ledger = null;
  let kinds = "";
  let token = -1;
  let layer = 0;
  let reads = null;
  let spans = [];
  let first = 0; // token of spans[0]
  let painted = []; // spans that carry a colour
  let lit = [];
  let timer = 0;
  let current = 0; // entry row that the keyboard stands at

  const at = (position) => spans[position - first];

  function lay() {
    first = Math.max(0, ledger.n - MOST);
    spans = [];
    const blocks = [];
    for (let start = first; start < ledger.n; start += BLOCK) {
      const block = element("span", { class: "dsv4-block" });
      for (let i = start; i < Math.min(ledger.n, start + BLOCK); i += 1) {
        const node = element("span", { "data-token": String(i) });
        spans.push(node);
        block.append(node);
      }
      blocks.push(block);
    }
    text.replaceChildren(...blocks);
    toggle(note, first > 0);
    say(note, `The text begins at token ${number(first)}; what lies before is in the tables.`);
    write();
  }

  /** Put the texts in that are there. */
  function write() {
    spans.forEach((node, i) => {
      const piece = texts.at(first + i);
      if (piece !== undefined && node.dataset.written === undefined) {
        node.textContent = piece || "·";
        node.dataset.written = "";
      }
    });
  }

  function ask(isSoon) {
    clearTimeout(timer);
    if (token < 0) return;
    timer = setTimeout(() => onAsk(token, layer), isSoon ? SOON_MS : 0);
  }

  function choose(to, isSoon = false) {
    at(token)?.classList.remove("dsv4-asking");
    token = to;
    at(token)?.classList.add("dsv4-asking");
    follow();
    ask(isSoon);
  }

  /** Keep the token in sight. */
  function follow() {
    const node = at(token);
    if (!node || !text.clientHeight) return;
    const [box, own] = [text.getBoundingClientRect(), node.getBoundingClientRect()];
    if (own.top < box.top || own.bottom > box.bottom) text.scrollTop += own.top - box.top - box.height / 2;
  }

  function clear(nodes, ...names) {
    for (const node of nodes) for (const one of names) delete node.dataset[one];
  }

  function paint() {
    clear(painted, "row", "entry");
    painted = [];
    light(null);
    if (!reads) return;
    follow(); // texts that came meanwhile may have moved it
    const { told } = reads;
    const top = Math.max(...reads.rows, 0);
    reads.rows.forEach((mass, i) => {
      const node = at(told.first + i);
      const grade = level(mass, top);
      if (!node || !grade) return;
      node.dataset.row = String(grade);
      painted.push(node);
    });
    const found = entryRows(reads);
    const most = Math.max(...reads.mass, 0);
    for (const one of found) {
      const grade = level(one.mass, most);
      for (let i = one.first; grade && i < one.last; i += 1) {
        const node = at(i);
        if (!node) continue;
        node.dataset.entry = String(grade);
        painted.push(node);
      }
    }
    const sum = (masses) => masses.reduce((all, mass) => all + mass, 0);
    say(sentence, readsWords(reads.token, texts.at(reads.token), told, { rows: sum(reads.rows), entries: sum(reads.mass) }));
    announce(sentence.textContent);
    tables(found);
  }

  function tables(found) {
    const { told } = reads;
    const held = entries.contains(document.activeElement);
    current = 0;
    const shown = ordered(found, order.value);
    const most = Math.max(...reads.mass, 1e-9);
    entries.replaceChildren(...shown.map((one, i) => entryRow(one, i, most)));
    toggle(scroller, shown.length > 0);
    toggle(empty, shown.length === 0);
    const ratio = told.ratio;
    say(empty, ratio === 0 ? "This layer has no compressed entries: it sees the window alone." : `No entry is complete yet: one stands for ${ratio} tokens.`);
    order.options[1].disabled = !reads.scores.length;
    if (held) entries.querySelector("button")?.focus();
    const near = Array.from(reads.rows, (mass, i) => ({ mass, token: told.first + i })).sort((a, b) => b.mass - a.mass);
    rows.replaceChildren(...near.map((one) => element("tr", {}, element("th", { scope: "row", text: number(one.token) }),
      element("td", { class: "dsv4-n", text: percent(one.mass) }), element("td", { class: "dsv4-tail", text: quoted(texts.at(one.token)) }))));
  }

  function entryRow(one, i, most) {
    const words = texts.join(one.first, one.last);
    const where = `tokens ${span(one.first, one.last)}`;
    const button = focusable("button", { type: "button", class: "dsv4-quiet", tabindex: i === 0 ? "0" : "-1", text: String(one.entry), "aria-label": `Entry ${one.entry}, ${where}, ${percent(one.mass)} of the attention` });
    button.addEventListener("focus", () => {
      entries.children[current]?.querySelector("button").setAttribute("tabindex", "-1");
      current = i;
      button.setAttribute("tabindex", "0");
      light(one);
    });
    button.addEventListener("blur", () => light(null));
    button.addEventListener("click", () => reveal(one));
    const bar = element("span", { class: "dsv4-level", "aria-hidden": "true" });
    bar.style.setProperty("--part", String(one.mass / most));
    const row = element("tr", {}, element("th", { scope: "row" }, button), element("td", { class: "dsv4-n", text: span(one.first, one.last) }),
      element("td", { class: "dsv4-n", text: one.score === null ? "–" : one.score.toFixed(3) }),
      element("td", { class: "dsv4-mass" }, bar, element("span", { text: percent(one.mass) })), element("td", { class: "dsv4-tail", text: words }));
    row.addEventListener("pointerenter", () => light(one));
    row.addEventListener("pointerleave", () => light(null));
    return row;
  }

  /** Show the source of an entry in the text. */
  function light(one) {
    for (const node of lit) node.classList.remove("dsv4-lit", "dsv4-pooled");
    lit = [];
    if (one === null) return;
    for (let i = one.from; i < one.last; i += 1) {
      const node = at(i);
      if (!node) continue;
      node.classList.add(i < one.first ? "dsv4-pooled" : "dsv4-lit");
      lit.push(node);
    }
  }

  function reveal(one) {
    const node = at(one.first);
    if (!node) return;
    const [box, own] = [text.getBoundingClientRect(), node.getBoundingClientRect()];
    text.scrollTop += own.top - box.top - box.height / 2;
  }

  listen(layers, "change", () => {
    layer = Number(layers.value);
    ask(false);
  });
  listen(order, "change", () => reads && tables(entryRows(reads)));
  listen(text, "click", (event) => {
    const found = event.target.closest?.("[data-token]");
    if (found) choose(Number(found.dataset.token));
  });
  listen(text, "keydown", (event) => {
    if (!ledger?.n || event.altKey || event.ctrlKey || event.metaKey) return;
    const to = moved(token < 0 ? ledger.n - 1 : token, event.key, { n: ledger.n, columns: 10, page: 10 });
    if (to === null) return;
    choose(Math.max(first, to), true);
    event.preventDefault();
    event.stopPropagation();
  });
  listen(entries, "keydown", (event) => {
    const to = moved(current, event.key, { n: entries.children.length, columns: 1, page: 10 });
    if (to === null || event.key === "ArrowLeft" || event.key === "ArrowRight") return;
    entries.children[to]?.querySelector("button").focus();
    event.preventDefault();
    event.stopPropagation();
  });

  return {
    el,
    write,
    get token() {
      return token;
    },
    /** The panel is on the screen: what is not there yet is asked for. */
    open() {
      if (!ledger?.n) return;
      if (spans.length === 0) lay();
      if (token < 0 || token >= ledger.n) choose(ledger.n - 1);
      else if (reads === null) ask(false);
    },
    look(to) {
      if (spans.length === 0) lay();
      choose(Math.max(first, to));
    },
    answered(answer) {
      if (answer.token !== token || answer.layer !== layer) return;
      reads = answer;
      paint();
    },
    show(next, told) {
      const known = JSON.stringify(told);
      if (known !== kinds) {
        kinds = known;
        layers.replaceChildren(...told.map(([kind, , routed], i) => element("option", { value: String(i), text: `${i} · ${ATTENTION[kind]}`, title: `experts by ${routed}` })));
        const better = told.findIndex(([kind]) => kind === "csa");
        layer = Math.max(0, better);
        layers.value = String(layer);
      }
      if (next?.key !== ledger?.key) {
        ledger = next;
        reads = null;
        spans = [];
        painted = lit = [];
        token = -1;
        text.replaceChildren();
        entries.replaceChildren();
        rows.replaceChildren();
        say(sentence, "Asking the engine…");
        for (const node of [scroller, empty]) toggle(node, false);
      }
      ledger = next;
    },
    end() {
      clearTimeout(timer);
    },
  };
}
