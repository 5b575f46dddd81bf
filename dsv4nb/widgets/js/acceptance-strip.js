// The columns as a person handles them: scrolled, pointed at, walked through by keyboard.

import { element, focusable, toggle } from "./dom.js";
import { moved, slots } from "./rounds.js";
import {
  PITCH, drawColumns, drawOverview, hit, laneLabels, lanes, legendKey, middle, STATUSES,
} from "./rounds-canvas.js";
import { roundFacts, roundSentence, slotFacts, slotSentence, slotTitle, why, WORDS } from "./rounds-words.js";

const INKS = {
  ink: "--ink", soft: "--faint", faint: "--mid", line: "--line", paper: "--paper", accepted: "--accepted",
  rejected: "--rejected", rejectedSoft: "--rejected-soft", bar: "--bar", draft: "--draft", verify: "--verify",
  tau: "--tau", focus: "--accent", hover: "--hover", opened: "--opened",
};
const NEAR_END_PX = 8;

/**
 * @param {{ listen: Function, onOpen: (round: number, byKey?: boolean) => void, onClose: () => void, announce: (text: string) => void }} on
 */
export function strip({ listen, onOpen, onClose, announce }) {
  const labels = element("div", { class: "dsv4-lanes", "aria-hidden": "true" });
  const canvas = element("canvas", { "aria-hidden": "true" });
  const whole = element("div", { class: "dsv4-whole" }, canvas);
  const scroller = focusable(
    "div",
    {
      class: "dsv4-scroller",
      role: "application",
      tabindex: "0",
      "aria-roledescription": "columns of rounds",
      "aria-label": "Rounds. Left and right move between rounds, up and down between drafts, Enter opens a round.",
    },
    whole,
  );
  const tip = element("div", { class: "dsv4-tip", hidden: true, "aria-hidden": "true" });
  const overview = element("canvas", { class: "dsv4-overview", "aria-hidden": "true" });
  const latest = focusable("button", { type: "button", class: "dsv4-quiet dsv4-latest", text: "Latest ⇥", hidden: true });
  const legend = element("ul", { class: "dsv4-keys", "aria-label": "What the columns show" });
  const probe = element("span", { class: "dsv4-probe", "aria-hidden": "true" });
  const stage = element("div", { class: "dsv4-stage" }, labels, scroller, tip);
  const el = element("div", { class: "dsv4-strip" }, stage, overview, element("div", { class: "dsv4-under" }, legend, latest), probe);

  let view = { rounds: [], tau: null, opened: -1 };
  let at = lanes(1, { conf: true, ms: true });
  let shape = "";
  let ink = null;
  let focus = null;
  let hover = null;
  let tipped = "";
  let follows = true;
  let width = 0;
  let slowest = 1;
  let scheduled = 0;

  const repaint = () => (scheduled ||= requestAnimationFrame(paint));

  function inks() {
    const found = {};
    for (const [name, variable] of Object.entries(INKS)) {
      probe.style.color = `var(${variable})`;
      found[name] = getComputedStyle(probe).color;
    }
    found.font = `10px ${getComputedStyle(probe).fontFamily}`;
    return found;
  }

  /** The theme has changed: its style sheet may arrive later than its name. */
  function recolour() {
    ink = inks();
    legend.replaceChildren(...STATUSES.map((status) => element("li", {}, legendKey(status, ink), element("span", { text: WORDS[status] }))));
    repaint();
  }

  function lay() {
    const { rounds } = view;
    const has = {
      conf: rounds.some((round) => round.drafts.some((draft) => draft.conf !== null)),
      ms: rounds.some((round) => round.ms[3] !== null),
    };
    const n = slots(rounds);
    const wanted = `${n} ${has.conf} ${has.ms}`;
    if (wanted === shape) return;
    shape = wanted;
    at = lanes(n, has);
    whole.style.height = `${at.height}px`;
    labels.style.height = `${at.height}px`;
    labels.replaceChildren(
      ...laneLabels(n, at).map(([text, y]) => element("span", { text, style: `top:${y}px` })),
    );
  }

  function paint() {
    scheduled = 0;
    if (!el.isConnected || view.rounds.length === 0) return;
    ink ??= inks();
    const { rounds, tau, opened } = view;
    if (follows && hover === null) scroller.scrollLeft = scroller.scrollWidth; // what is pointed at stays in place
    const left = scroller.scrollLeft;
    drawColumns(canvas, { rounds, left, width, at, ink, tau, focus, hover, opened, slowest });
    const isLong = rounds.length * PITCH > width + 1;
    toggle(overview, isLong);
    if (isLong) drawOverview(overview, { rounds, width: stage.clientWidth, left, inSight: width, ink, slots: slots(rounds) });
    toggle(latest, isLong && !follows);
    placeTip(left);
  }

  function placeTip(left) {
    const target = hover ?? focus;
    const key = target ? `${target.round} ${target.slot}` : "";
    const round = target && view.rounds[target.round];
    if (!round) {
      tipped = "";
      toggle(tip, false);
      return;
    }
    if (key !== tipped) fillTip(round, target.slot);
    tipped = key;
    toggle(tip, true);
    const { x, y } = middle(target, at);
    const room = stage.clientWidth - tip.offsetWidth;
    const wanted = labels.offsetWidth + x - left - tip.offsetWidth / 2;
    tip.style.left = `${Math.max(0, Math.min(room, wanted))}px`;
    tip.style.top = `${target.slot < 0 ? at.tokens + 4 : y + 16}px`;
  }

  function fillTip(round, slot) {
    const isSlot = slot >= 0;
    const facts = isSlot ? slotFacts(round, slot) : roundFacts(round);
    tip.replaceChildren(
      element("strong", { text: isSlot ? slotTitle(round, slot) : `Round ${round.round}` }),
      element("p", { text: isSlot ? `${why(round.drafts[slot].status)}` : "click for the text up to here" }),
      list(facts),
    );
  }

  function focusOn(to) {
    focus = to;
    follows = follows && to.round === view.rounds.length - 1;
    const left = to.round * PITCH;
    if (left < scroller.scrollLeft) scroller.scrollLeft = left;
    else if (left + PITCH > scroller.scrollLeft + width) scroller.scrollLeft = left + PITCH - width;
    const round = view.rounds[to.round];
    announce(to.slot < 0 ? roundSentence(round) : slotSentence(round, to.slot));
    repaint();
  }

  function under(event) {
    const box = whole.getBoundingClientRect();
    return hit(event.clientX - box.left, event.clientY - box.top, view.rounds, at);
  }

  listen(scroller, "scroll", () => {
    follows = scroller.scrollWidth - scroller.scrollLeft - scroller.clientWidth < NEAR_END_PX;
    hover = null;
    repaint();
  });
  listen(scroller, "pointermove", (event) => {
    const found = under(event);
    if (found?.round === hover?.round && found?.slot === hover?.slot) return;
    hover = found;
    repaint();
  });
  listen(scroller, "pointerleave", () => {
    hover = null;
    repaint();
  });
  listen(scroller, "click", (event) => {
    const found = under(event);
    if (!found) return;
    focus = null;
    onOpen(found.round);
  });
  listen(scroller, "focus", () => {
    if (!view.rounds.length || !scroller.matches(":focus-visible")) return;
    const inSight = Math.min(view.rounds.length - 1, Math.floor((scroller.scrollLeft + width) / PITCH) - 1);
    const round = Math.max(0, view.opened >= 0 ? view.opened : inSight);
    focusOn(focus ?? { round, slot: Math.min(0, view.rounds[round].drafts.length - 1) });
  });
  listen(scroller, "blur", () => {
    focus = null;
    repaint();
  });
  listen(scroller, "keydown", (event) => {
    if (!view.rounds.length || event.altKey || event.ctrlKey || event.metaKey) return;
    if (event.key === "Escape") {
      if (view.opened < 0 && focus === null && hover === null) return;
      hover = focus = null;
      onClose();
    } else if (event.key === "Enter" || event.key === " ") {
      if (focus) onOpen(focus.round, true);
    } else {
      const page = Math.max(1, Math.floor(width / PITCH) - 1);
      const to = moved(focus ?? { round: view.rounds.length - 1, slot: -1 }, event.key, view.rounds, page);
      if (to === null) return;
      hover = null;
      focusOn(to);
    }
    event.preventDefault();
    event.stopPropagation();
    repaint();
  });
  listen(latest, "click", () => {
    follows = true;
    repaint();
  });
  const jump = (event) => {
    if (!(event.buttons & 1)) return;
    const box = overview.getBoundingClientRect();
    const share = (event.clientX - box.left) / box.width;
    scroller.scrollLeft = share * view.rounds.length * PITCH - width / 2;
  };
  listen(overview, "pointerdown", (event) => {
    overview.setPointerCapture(event.pointerId);
    jump(event);
  });
  listen(overview, "pointermove", jump);

  const watching = new ResizeObserver(() => {
    width = scroller.clientWidth;
    recolour();
  });
  watching.observe(scroller);

  return {
    el,
    recolour,
    /** @param {{ rounds: import("./rounds.js").Round[], tau: number | null, opened: number, isOther: boolean }} next */
    show(next) {
      if (next.isOther) {
        focus = hover = null;
        follows = true;
        slowest = 1;
      }
      const { rounds } = next;
      const seen = next.isOther ? 0 : view.rounds.length;
      for (let i = seen; i < rounds.length; i += 1) slowest = Math.max(slowest, rounds[i].ms[3] ?? 0);
      view = next;
      whole.style.width = `${rounds.length * PITCH}px`;
      lay();
      repaint();
    },
    focus() {
      scroller.focus();
    },
    end() {
      watching.disconnect();
      cancelAnimationFrame(scheduled);
    },
  };
}

/** Facts as a list of terms. @param {[string, string][]} facts */
export function list(facts) {
  const parts = facts.map(([name, value]) => element("div", {}, element("dt", { text: name }), element("dd", { text: value })));
  return element("dl", { class: "dsv4-facts" }, ...parts);
}

/** A table; the first row names its columns, the first column its rows. @param {string[][]} rows */
export function table(rows, caption) {
  const [head, ...body] = rows;
  return element(
    "table",
    { class: "dsv4-table" },
    element("caption", { class: "dsv4-unseen", text: caption }),
    element("thead", {}, element("tr", {}, ...head.map((text) => element("th", { scope: "col", text })))),
    element(
      "tbody",
      {},
      ...body.map(([name, ...cells]) =>
        element("tr", {}, element("th", { scope: "row", text: name }), ...cells.map((text) => element("td", { text }))),
      ),
    ),
  );
}
