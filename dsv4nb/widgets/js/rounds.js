// The rounds that are shown, as a value: no page, no model, so node can test it.
// Whatever is lost, repeated or late, the rounds are a beginning of the reply's, or `lost` asks for a snapshot.

import { DRAFT, ROUND, ROUNDS_FROM_KERNEL, STATUSES } from "./protocol.js";

/**
 * @typedef {{ text: string, chosen: string | null, status: string, conf: number | null, survival: number | null,
 *             margin: number | null, q: number | null, p: number | null }} Draft
 * @typedef {{ reply: number, round: number, start: number, pending: string, drafts: Draft[], accepts: number,
 *             verified: number, next: string | null, kind: string | null, emitted: number, stop: string | null,
 *             ms: (number | null)[], reason: string, reasoning: string, content: string }} Round
 * @typedef {{ run: number, label: string, note: string, live: boolean, rewinds: boolean, mode: string,
 *             rounds: Round[], figures: object | null, sweep: object | null, lost: boolean,
 *             turns: [number, string, number][], shown: number, follows: boolean }} State
 */

/** @returns {State} */
export function blank() {
  return {
    ...{ run: 0, label: "", note: "", live: false, rewinds: false, mode: "exact", rounds: [], figures: null },
    ...{ sweep: null, lost: false, turns: [], shown: -1, follows: true },
  };
}

/** @param {State} state @param {object} message of the kernel @returns {State} */
export function received(state, message) {
  switch (message.kind) {
    case "snapshot":
      return snapshot(state, message);
    case "frame":
      return frame(state, message);
    case "ended":
      if (message.run !== state.run) return state;
      return { ...state, live: false, note: message.note, rewinds: message.rewinds };
    case "sweep":
      if (message.run !== state.run) return state;
      return { ...state, sweep: { n: message.n, points: message.points, note: message.note } };
    case "turns":
      return { ...state, turns: message.turns, shown: message.shown, follows: message.follows };
    default:
      return state;
  }
}

function snapshot(state, { run, label, note, live, rewinds, mode, rounds, figures }) {
  if (run < state.run) return state;
  if (run === state.run && rounds.length < state.rounds.length) return { ...state, lost: false };
  const sweep = run === state.run ? state.sweep : null;
  return { ...state, run, label, note, live, rewinds, mode, rounds: rounds.map(decoded), figures, sweep, lost: false };
}

function frame(state, { run, start, rounds, figures }) {
  if (run < state.run) return state;
  if (run > state.run || start > state.rounds.length) return { ...state, lost: true };
  const fresh = rounds.slice(state.rounds.length - start).map(decoded);
  if (fresh.length === 0 && figures === null) return state;
  return {
    ...state,
    rounds: fresh.length ? state.rounds.concat(fresh) : state.rounds,
    figures: figures ?? state.figures,
  };
}

/** @param {any[]} told a round as it travels @returns {Round} */
export function decoded(told) {
  const round = named(ROUND, told);
  round.drafts = round.drafts.map((draft) => {
    const own = named(DRAFT, draft);
    return { ...own, status: STATUSES[own.status] };
  });
  return round;
}

function named(names, values) {
  return Object.fromEntries(names.map((name, i) => [name, values[i]]));
}

/** The drafts of the longest round. @param {Round[]} rounds */
export function slots(rounds) {
  return rounds.reduce((most, round) => Math.max(most, round.drafts.length), 1);
}

/**
 * The text that a round of a reply found, from the end of what came before it.
 * @param {Round[]} rounds @param {number} index
 * @param {number} most characters of each
 * @returns {{ reasoning: string, content: string, isCut: boolean }}
 */
export function textBefore(rounds, index, most = 1200) {
  const texts = { reasoning: "", content: "" };
  let isCut = false;
  for (let i = index; i >= 0 && rounds[i].reply === rounds[index].reply; i -= 1) {
    texts.content = rounds[i].content + texts.content;
    texts.reasoning = rounds[i].reasoning + texts.reasoning;
    if (texts.content.length > most || texts.reasoning.length > most) {
      isCut = true;
      break;
    }
  }
  return { reasoning: texts.reasoning.slice(-most), content: texts.content.slice(-most), isCut };
}

/** Move within the columns; `slot` -1 is the round as a whole. */
export function moved({ round, slot }, key, rounds, page) {
  const last = rounds.length - 1;
  const steps = { ArrowLeft: -1, ArrowRight: 1, PageUp: -page, PageDown: page, Home: -Infinity, End: Infinity };
  if (key in steps) {
    const to = Math.min(last, Math.max(0, round + steps[key]));
    return { round: to, slot: Math.min(slot, rounds[to].drafts.length - 1) };
  }
  const deepest = rounds[round].drafts.length - 1;
  if (key === "ArrowDown") return { round, slot: Math.min(deepest, slot + 1) };
  if (key === "ArrowUp") return { round, slot: Math.max(-1, slot - 1) };
  return null;
}

/** @param {object} message @returns {boolean} whether the kernel's message is one of the panel's, with all its fields */
export function isOfRounds(message) {
  const fields = ROUNDS_FROM_KERNEL[message?.kind];
  return fields !== undefined && fields.every((name) => name in message);
}
