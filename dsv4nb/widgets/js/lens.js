// A reply under the lens: a reducer's state, painted at most once per animation frame.

import { table } from "./acceptance-strip.js";
import { element, focusable, say, toggle } from "./dom.js";
import { detail } from "./lens-detail.js";
import { grid } from "./lens-grid.js";
import { blank, HOW, isOfLens, look, MEASURES, received, rows, sums, visible, share } from "./lens-tokens.js";
import { replies } from "./replies.js";
import { SILENT, viewOf } from "./view.js";

const CUT = "The kernel was restarted or closed. What it last told stays; run the cell again to ask for more.";
const PAGE = 100; // rows of the table
const SWATCHES = [0, 1, 2, 3, 4, 5, 6].map((level) => `dsv4-level-${level}`).concat(Object.keys(HOW).map((how) => `dsv4-how-${how}`));

function button(text, extra = "") {
  return focusable("button", { type: "button", class: `dsv4-quiet ${extra}`, text });
}

function render({ model, el }) {
  let state = blank();
  let measure = "probability";
  let pointed = null;
  let chosen = null; // the token that has, or had last, the focus
  let from = 0; // the first token that is not painted as it is
  let painted = { run: -1, tokens: null, measure: "" };
  let page = 0;
  let hasKernel = true;

  const view = viewOf({ model, el }, paint);
  const { alert, heard, listen, complain, announce, repaint } = view;

  const title = element("strong", { class: "dsv4-title" });
  const turns = replies((n) => `${n} tokens`);
  const by = focusable("select", { class: "dsv4-select", "aria-label": "Colour by" });
  by.append(
    ...[...Object.entries(MEASURES).map(([value, { name }]) => [value, name]), ["speculation", "speculation"]].map(
      ([value, text]) => element("option", { value, text: `by ${text}` }),
    ),
  );
  const back = button("Back to the original");
  const status = element("span", { class: "dsv4-state" });
  const fork = element("p", { class: "dsv4-fork" });
  const empty = element("p", { class: "dsv4-empty" });
  const note = element("p", { class: "dsv4-note" });
  const ask = element("p", { class: "dsv4-ask" });
  const compute = button("Compute probabilities", "dsv4-compute");
  ask.append(element("span", { text: "This reply was made without them." }), compute);
  const summary = element("p", { class: "dsv4-summary" });
  const legend = element("ul", { class: "dsv4-keys", "aria-label": "What the colours and lines mean" });
  const probe = element("span", { class: "dsv4-unseen", "aria-hidden": "true" });

  const one = detail({
    listen,
    onChoose(alternative) {
      complain("");
      announce("Continuing on a fork…");
      orders.give("continue", { run: state.run, token: shownToken(), alternative });
    },
    onLeave: () => chosen !== null && tokens.focusOn(chosen),
  });
  const tokens = grid({
    listen,
    announce,
    onPoint(index) {
      pointed = index;
      repaint();
    },
    onFocus(index) {
      chosen = index;
      pointed = null;
      repaint();
    },
    onEnter(index) {
      chosen = index;
      paintDetail();
      if (!one.enter()) announce("There is no alternative to go to.");
    },
  });

  const twin = focusable("div", { class: "dsv4-wide", tabindex: "0", role: "region", "aria-label": "Table of tokens" });
  const earlier = button("Earlier");
  const later = button("Later");
  const span = element("span", { class: "dsv4-said" });
  const fold = element(
    "details", { class: "dsv4-twin" },
    focusable("summary", { class: "dsv4-unfold", text: "As a table" }),
    element("div", { class: "dsv4-pages" }, earlier, later, span), twin,
  );
  const stage = element("div", { class: "dsv4-stage" }, tokens.el, one.el);
  const body = element("div", { class: "dsv4-body" }, ask, summary, stage, legend, fold);
  const root = element(
    "div", { class: "dsv4-panel", role: "group", "aria-label": "Token lens" },
    element("div", { class: "dsv4-head" }, title, turns.el, by, back, status),
    alert, fork, note, empty, body, heard, probe,
  );

  const orders = view.orders({
    failed(kind, id, error) {
      if (kind === "show") turns.undo();
      complain(error);
      announce("");
      repaint();
    },
    silent(kind) {
      if (kind === "score") return; // behind the requests in the queue it may take long
      complain(SILENT);
    },
  });

  function receive(message, buffers) {
    if (!isOfLens(message)) return;
    if (message.kind === "ack") {
      orders.acknowledged(message);
      return;
    }
    const before = state;
    state = received(state, message, (buffers ?? []).map((buffer) => new DataView(buffer.buffer ?? buffer, buffer.byteOffset ?? 0, buffer.byteLength)));
    if (state.tokens !== before.tokens) from = Math.min(from, state.changedFrom);
    if (state.lost) resync();
    if (state.run !== before.run) {
      chosen = pointed = null;
      page = 0;
      complain("");
      if (state.fork && state.fork !== before.fork) announce("This is the fork.");
    }
    if (before.live && !state.live && state.run === before.run) announce(`The reply ended after ${state.tokens.length} tokens.`);
    repaint();
  }

  function resync() {
    if (!view.resync()) hasKernel = false;
  }

  function shownToken() {
    return pointed ?? chosen;
  }

  function paint() {
    const n = state.tokens.length;
    const isOther = painted.run !== state.run;
    say(title, model.get("title"));
    turns.show(state);
    say(status, [n > 0 ? `${n.toLocaleString("en")} token${n === 1 ? "" : "s"}` : "", state.live ? "running" : ""].filter(Boolean).join(" · "));
    el.dataset.live = String(state.live);
    el.dataset.tokens = String(n);
    el.dataset.run = String(state.run);
    toggle(back, state.fork !== "");
    toggle(fork, state.fork !== "");
    say(fork, state.fork ? `A fork: the chat it was made of is as it was. In Python it is ${state.fork}.` : "");
    toggle(note, state.note !== "" && n > 0);
    say(note, state.note);
    toggle(body, n > 0);
    toggle(empty, n === 0);
    say(empty, nothing());
    toggle(ask, state.scores || state.scoring);
    compute.disabled = state.scoring;
    say(compute, state.scoring ? "Computing…" : "Compute probabilities");
    if (isOther) tokens.reset();
    if (state.fork && chosen === null && pointed === null) {
      const place = state.tokens.findLastIndex(({ made }) => made === "given");
      if (place >= 0) chosen = place; // where the fork began
    }
    if (painted.tokens !== state.tokens || painted.measure !== measure || isOther) {
      tokens.show(state.tokens, isOther ? 0 : from, measure);
      from = Infinity;
      paintSummary();
      paintLegend();
      paintTable();
    }
    paintDetail();
    painted = { ...painted, run: state.run, tokens: state.tokens, measure };
  }

  function nothing() {
    if (!hasKernel) return "There is no kernel. Run the cell again to see the tokens.";
    if (state.run === 0) return "Asking the kernel…";
    if (state.live) return "Waiting for the first token…";
    return state.note || "No reply yet. Its tokens appear here as they are made.";
  }

  function paintDetail() {
    const index = shownToken();
    one.show(index === null ? undefined : state.tokens[index], index, state.continues && !state.live);
  }

  function paintSummary() {
    const told = sums(state.tokens);
    toggle(summary, told !== null);
    if (told === null) return;
    const lowest = told.lowest.map((i) => {
      const { text, logprob } = state.tokens[i];
      const link = button(`${visible(text)} ${share(logprob)}`, "dsv4-lowest");
      link.dataset.i = String(i);
      link.setAttribute("aria-label", `token ${i}, ${visible(text)}, ${share(logprob)}`);
      return link;
    });
    summary.replaceChildren(
      element("span", { text: `perplexity ${told.perplexity.toFixed(2)}` }),
      element("span", { text: `mean entropy ${told.entropy.toFixed(2)} nats` }),
      element("span", { text: "least likely:" }), ...lowest,
    );
  }

  function paintLegend() {
    const seen = new Map();
    for (const token of state.tokens) {
      const kind = look(token, measure);
      seen.set(kind, (seen.get(kind) ?? 0) + 1);
    }
    const named = measure === "speculation"
      ? Object.entries(HOW).map(([how, words]) => [`dsv4-how-${how}`, words])
      : MEASURES[measure].levels.map((words, level) => [`dsv4-level-${level}`, words]);
    legend.replaceChildren(
      ...named.filter(([kind, words]) => words && seen.has(kind)).map(([kind, words]) =>
        element("li", {}, element("span", { class: `dsv4-token ${kind}`, text: "abc" }), element("span", { text: `${words} (${seen.get(kind)})` })),
      ),
    );
  }

  function paintTable() {
    if (!fold.open) return;
    const n = state.tokens.length;
    const pages = Math.max(1, Math.ceil(n / PAGE));
    page = Math.min(page, pages - 1);
    toggle(earlier.parentElement, pages > 1);
    earlier.disabled = page === 0;
    later.disabled = page === pages - 1;
    say(span, `tokens ${page * PAGE} to ${Math.min(n, (page + 1) * PAGE) - 1} of ${n}`);
    twin.replaceChildren(table(rows(state.tokens, page * PAGE, PAGE), "Tokens and their probabilities"));
  }

  /** Ink is black or white, whatever is read better on a colour of the theme that is on. */
  function ink() {
    const pen = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
    const light = (value) => (value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4);
    for (const kind of SWATCHES) {
      probe.className = `dsv4-unseen dsv4-token ${kind}`;
      pen.fillStyle = getComputedStyle(root).backgroundColor;
      pen.fillRect(0, 0, 1, 1);
      pen.fillStyle = getComputedStyle(probe).backgroundColor;
      pen.fillRect(0, 0, 1, 1);
      const [r, g, b] = [...pen.getImageData(0, 0, 1, 1).data].slice(0, 3).map((value) => light(value / 255));
      const luminance = 0.2126 * r + 0.7152 * g + 0.0722 * b;
      root.style.setProperty(`--ink-${kind.slice(5)}`, luminance > 0.18 ? "#101114" : "#f6f7f9");
    }
  }

  listen(by, "change", () => {
    measure = by.value;
    repaint();
  });
  listen(turns.el, "change", () => {
    complain("");
    orders.give("show", { turn: Number(turns.el.value) });
  });
  listen(compute, "click", () => {
    complain("");
    orders.give("score", { run: state.run });
  });
  listen(back, "click", () => orders.give("back", {}));
  listen(summary, "click", (event) => {
    const link = event.target.closest("button");
    if (link) tokens.focusOn(Number(link.dataset.i));
  });
  listen(fold, "toggle", paintTable);
  for (const [control, step] of [[earlier, -1], [later, 1]]) {
    listen(control, "click", () => {
      page += step;
      paintTable();
    });
  }
  const recolour = view.onTheme(ink);
  view.whenCut(() => {
    state = { ...state, live: false, continues: false, scores: false, scoring: false };
    hasKernel = false;
    complain(CUT);
    repaint();
  });
  view.hear({ "msg:custom": receive, "change:title": repaint });

  view.mount("lens", root);
  paint();
  recolour();
  resync();
  return view.end;
}

export default { render };
