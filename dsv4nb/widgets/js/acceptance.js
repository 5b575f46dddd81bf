// Rounds of speculation: a reducer's state, painted at most once per animation frame.

import { strip, list, table } from "./acceptance-strip.js";
import { opened } from "./acceptance-round.js";
import { element, focusable, say, toggle } from "./dom.js";
import { replies } from "./replies.js";
import { positionRows, positions, reliability, reliabilityRows, seriesKey, taus } from "./rounds-charts.js";
import { counterfactual, count, number, percent, speedOnly } from "./rounds-words.js";
import { blank, isOfRounds, received } from "./rounds.js";
import { SILENT, viewOf } from "./view.js";

const SWEEP_MS = 2000;
const CURVES = [
  ["accepted, of all rounds", "bar"],
  ["accepted, of the rounds that verified it", "line"],
  ["accepted, of those that accepted all before it", "line"],
];

/** @param {[string, "line" | "bar" | "marks"][]} keys a series each */
function chart(title, keys) {
  const plot = element("div", { class: "dsv4-chart-plot" });
  const said = element("p", { class: "dsv4-said" });
  const twin = element("div", { class: "dsv4-wide" });
  const legend = keys.map(([text, look], i) => element("li", {}, seriesKey(i, look), element("span", { text })));
  const summary = focusable("summary", { class: "dsv4-unfold", text: "As a table" });
  const fold = element("details", { class: "dsv4-twin" }, summary, twin);
  const el = element(
    "section",
    { class: "dsv4-chart", "aria-label": title },
    element("h4", { text: title }), plot, element("ul", { class: "dsv4-keys" }, ...legend), said, fold,
  );
  return { el, plot, said, twin, fold };
}

function parts(name) {
  const title = element("strong", { class: "dsv4-title" });
  const turns = replies((n) => count(n, "round"));
  const status = element("span", { class: "dsv4-state" });
  const facts = element("dl", { class: "dsv4-totals", "aria-label": "Totals" });
  const empty = element("p", { class: "dsv4-empty" });
  const slider = focusable("input", { type: "range", class: "dsv4-tau", id: name, "aria-label": "tau of the confidence window", min: "0", max: "0", step: "1" });
  const tauLabel = element("label", { for: name, text: "tau" });
  const tauOut = element("output", { class: "dsv4-tau-out", for: name });
  const what = chart("What another tau would have done", [["tokens a round", "line"], ["rows a round", "line"]]);
  const whatFacts = element("div");
  const whatSure = element("p", { class: "dsv4-sure" });
  const speed = element("p", { class: "dsv4-speed" });
  what.fold.remove();
  what.said.replaceWith(element("div", { class: "dsv4-tau-row" }, tauLabel, slider, tauOut), whatFacts, whatSure, speed);
  const where = chart("Accepted, by position", CURVES);
  const true_ = chart("Are confidences true?", [["confidence", "marks"], ["survival", "marks"]]);
  const charts = element("div", { class: "dsv4-charts" }, what.el, where.el, true_.el);
  return { title, turns, status, facts, empty, slider, tauOut, what, whatFacts, whatSure, speed, where, true_, charts };
}

function render({ model, el }) {
  let state = blank();
  let open = -1;
  let at = 10; // of the sweep's points: tau 0.5
  let lastSwept = -Infinity;
  let painted = { run: -1, figures: null, sweep: null, at: -1, open: NaN };
  let hasKernel = true;
  let entering = false;

  const view = viewOf({ model, el }, paint);
  const { listen, complain, announce, repaint } = view;
  const page = parts(`dsv4-tau-${Math.random().toString(36).slice(2, 10)}`);

  const columns = strip({ listen, onOpen: go, onClose: () => closeRound(), announce });
  const round = opened({
    listen,
    onGo: (index) => go(index, false),
    onClose: () => closeRound(),
    onRewind(index) {
      complain("");
      orders.give("rewind", { run: state.run, round: index });
    },
  });
  const body = element("div", { class: "dsv4-body" }, page.facts, columns.el, round.el, page.charts);
  const root = element(
    "div",
    { class: "dsv4-panel", role: "group", "aria-label": "Speculation" },
    element("div", { class: "dsv4-head" }, page.title, page.turns.el, page.status),
    view.alert, page.empty, body, view.heard,
  );

  const orders = view.orders({
    failed(kind, id, error) {
      if (kind === "show") page.turns.undo();
      complain(error);
      repaint();
    },
    silent() {
      complain(SILENT);
    },
  });

  function go(index, withFocus = false) {
    open = Math.max(0, Math.min(state.rounds.length - 1, index));
    entering ||= withFocus;
    repaint();
  }

  function closeRound() {
    const wasOpen = open >= 0;
    open = -1;
    repaint();
    if (wasOpen) columns.focus();
  }

  function receive(message) {
    if (!isOfRounds(message)) return;
    if (message.kind === "ack") {
      orders.acknowledged(message);
      return;
    }
    const before = state;
    state = received(state, message);
    if (state.lost) resync();
    if (state.run !== before.run) {
      open = -1;
      complain("");
    }
    if (!state.live && (before.live || state.run !== before.run)) sweep(true);
    if (before.live && !state.live && state.run === before.run) announce(`The reply ended after ${count(state.rounds.length, "round")}.`);
    repaint();
  }

  function resync() {
    if (!view.resync()) hasKernel = false;
  }

  /** Ask what other windows would have made of the rounds, unless that is known. */
  function sweep(isDue) {
    const now = performance.now();
    if (state.rounds.length === 0 || state.sweep?.n === state.rounds.length) return;
    if (!isDue && now - lastSwept < SWEEP_MS) return;
    lastSwept = now;
    orders.give("sweep", { run: state.run });
  }

  function paint() {
    const has = state.rounds.length > 0;
    say(page.title, model.get("title"));
    page.turns.show(state);
    const counted = has ? count(state.rounds.length, "round") : "";
    say(page.status, [counted, state.live ? "running" : has && state.note].filter(Boolean).join(" · "));
    el.dataset.live = String(state.live);
    el.dataset.rounds = String(state.rounds.length);
    toggle(body, has);
    toggle(page.empty, !has);
    say(page.empty, nothing());
    if (!has) return;
    const point = state.sweep?.points[Math.min(at, state.sweep.points.length - 1)];
    const tau = point === undefined ? 0.5 : point.tau;
    columns.show({ rounds: state.rounds, tau, opened: open, isOther: painted.run !== state.run });
    const shown = `${state.run} ${open} ${open === state.rounds.length - 1} ${state.rewinds}`;
    if (painted.open !== shown) round.show(state, open);
    if (entering) round.focus();
    entering = false;
    if (painted.figures !== state.figures && state.figures) paintFigures(state.figures);
    if (painted.sweep !== state.sweep || painted.at !== at || painted.run !== state.run) paintSweep();
    painted = { ...painted, run: state.run, figures: state.figures, sweep: state.sweep, at, open: shown };
  }

  function nothing() {
    if (!hasKernel) return "There is no kernel. Run the cell again to see the rounds.";
    if (state.run === 0) return "Asking the kernel…";
    if (state.live) return "Waiting for the first round…";
    return state.note || "No reply yet. Its rounds appear here as they are played.";
  }

  function paintFigures(figures) {
    page.facts.replaceChildren(
      ...figures.facts.map(([name, value, hint]) =>
        element("div", { title: hint }, element("dt", { text: name }), element("dd", { text: value }), element("dd", { class: "dsv4-hint", text: hint })),
      ),
    );
    page.where.plot.replaceChildren(positions(figures.curves));
    const ends = figures.accepts.map((n, a) => `${a}: ${n}`).join(" · ");
    say(page.where.said, `Rounds by accepted drafts: ${ends}`);
    page.where.twin.replaceChildren(table(positionRows(figures.curves), "Accepted, by position"));
    const { confidence, survival } = figures;
    toggle(page.true_.el, confidence.n > 0);
    page.true_.plot.replaceChildren(reliability([confidence, survival]));
    const tell = (name, told) => `${name}: ECE ${percent(told.ece)}, AUC ${number(told.auc, 3)}, ${count(told.n, "draft")}`;
    page.true_.said.replaceChildren(
      element("span", { text: tell("confidence", confidence) }), element("br"), element("span", { text: tell("survival", survival) }),
    );
    const rows = reliabilityRows([["confidence", confidence], ["survival", survival]]);
    page.true_.twin.replaceChildren(table(rows, "Predicted against observed acceptance"));
  }

  function paintSweep() {
    const points = state.sweep?.points ?? [];
    page.slider.disabled = points.length === 0;
    say(page.speed, speedOnly(state.mode));
    if (points.length === 0) {
      page.what.plot.replaceChildren();
      page.whatFacts.replaceChildren();
      say(page.tauOut, "");
      say(page.whatSure, state.sweep?.note ?? "It is computed when the reply ends.");
      return;
    }
    at = Math.min(at, points.length - 1);
    page.slider.max = String(points.length - 1);
    page.slider.value = String(at);
    const { n } = state.sweep;
    const told = counterfactual(points[at], n);
    page.slider.setAttribute("aria-valuetext", told.window);
    say(page.tauOut, points[at].tau === null ? "off" : points[at].tau.toFixed(2));
    page.what.plot.replaceChildren(taus(points, n, at));
    const fact = state.figures?.facts.find(([name]) => name === "tokens/round");
    page.whatFacts.replaceChildren(list(told.facts));
    const recorded = fact ? ` As recorded: ${fact[1]} tokens/round.` : "";
    const part = n < state.rounds.length ? ` Of the first ${count(n, "round")}.` : "";
    say(page.whatSure, `${told.sure[0].toUpperCase()}${told.sure.slice(1)}.${recorded}${part}`);
  }

  listen(page.slider, "input", () => {
    at = Number(page.slider.value);
    sweep(false);
    repaint();
  });
  listen(page.turns.el, "change", () => {
    complain("");
    orders.give("show", { turn: Number(page.turns.el.value) });
  });
  view.onTheme(() => columns.recolour());
  view.hear({ "msg:custom": receive, "change:title": repaint });

  view.mount("acceptance", root);
  paint();
  resync();
  repaint();

  return () => {
    view.end();
    columns.end();
  };
}

export default { render };
