// The conversation as a value: no page, no model, so node can test it.
// Whatever is lost, repeated or late, the text shown is a beginning of the run's text or `lost` asks for a snapshot.

import { CHANNELS } from "./protocol.js";

/**
 * @typedef {import("./protocol.js").Entry} Entry
 * @typedef {import("./protocol.js").Card} Card
 * @typedef {{ run: number, user: string, command: string, next: number, reasoning: string, text: string,
 *             n_reasoning: number, cards: Card[], is_calling: boolean, isLate: boolean }} Live `next` is the index of
 *             the token that comes next; `is_calling`: a call is being written and none is complete; `isLate`: this
 *             view came when it was under way
 * @typedef {{ turns: Entry[], ended: number, live: Live | null, lost: boolean,
 *             pending: { id: string, text: string, at: number } | null }} Transcript `pending` stands in place of the
 *             turn `at` and those behind it
 */

/** @param {{ turns: Entry[], ended: number }} saved @returns {Transcript} */
export function opened(saved) {
  return { turns: saved.turns, ended: saved.ended, live: null, pending: null, lost: false };
}

/** A turn has ended, or the chat was emptied: `saved` is the whole truth about what is over. */
export function settled(state, saved) {
  const live = state.live && state.live.run > saved.ended ? state.live : null;
  const turns = saved.turns.map((entry, i) => (isEqual(state.turns[i], entry) ? state.turns[i] : entry));
  return { ...state, turns, ended: saved.ended, live, lost: live ? state.lost : false };
}

/** The person asked, behind the last turn or in place of turn `at`; nothing has come back. */
export function asked(state, id, text, at = Infinity) {
  return { ...state, pending: { id, text, at } };
}

/** The turns that are over and shown. */
export function past({ turns, pending }) {
  return pending && pending.at < turns.length ? turns.slice(0, pending.at) : turns;
}

/** The kernel is gone: what was said by then is all there will be. */
export function severed(state) {
  const { live } = state;
  if (!live) return { ...state, pending: null };
  const { user, reasoning, text, n_reasoning, is_calling } = live;
  const cards = live.cards.map((card) => (isOpen(card) ? { ...card, state: "unanswered", status: "no result" } : card));
  const entry = { user, reasoning, text, n_reasoning, cards, is_calling, stop_reason: "severed", error: "", footer: "" };
  return { ...state, turns: [...state.turns, entry], ended: live.run, live: null, pending: null };
}

/** The question was refused or taken back. */
export function withdrawn(state, id) {
  return state.pending?.id === id ? { ...state, pending: null } : state;
}

/** @param {Transcript} state @param {import("./protocol.js").Begin} message @returns {Transcript} */
export function begun(state, { run, user, command }) {
  if (isOver(state, run) || state.live?.run >= run) return state;
  const blank = { next: 0, reasoning: "", text: "", n_reasoning: 0, cards: [], is_calling: false, isLate: false };
  const live = { run, user, command, ...blank };
  return { ...state, live, pending: keepPending(state, command), lost: false };
}

/** @param {Transcript} state @param {import("./protocol.js").Frame} message @returns {Transcript} */
export function extended(state, { run, start, tokens }) {
  if (isOver(state, run) || state.live?.run > run) return state;
  if (state.live?.run !== run || start > state.live.next) return { ...state, lost: true };
  const fresh = tokens.slice(state.live.next - start);
  if (fresh.length === 0) return state;
  const live = { ...state.live, next: state.live.next + fresh.length };
  for (const [letter, text] of fresh) {
    const channel = CHANNELS[letter];
    if (channel === "content") live.text += text;
    else if (channel === "tool") live.is_calling = live.cards.length === 0; // what is written is not shown
    else if (channel === "reasoning") {
      live.reasoning += text;
      live.n_reasoning += 1;
    }
  }
  return { ...state, live };
}

/** @param {Transcript} state @param {import("./protocol.js").Call} message @returns {Transcript} */
export function called(state, { run, index, card }) {
  if (isOver(state, run) || state.live?.run > run) return state;
  if (state.live?.run !== run || index > state.live.cards.length) return { ...state, lost: true };
  const cards = state.live.cards.slice();
  cards[index] = newer(cards[index], card);
  return { ...state, live: { ...state.live, cards, is_calling: false } };
}

/** @param {Transcript} state @param {import("./protocol.js").Snapshot} message @returns {Transcript} */
export function caughtUp(state, message) {
  const { run, user, command, next, reasoning, text, n_reasoning } = message;
  if (isOver(state, run) || state.live?.run > run) return state;
  const shown = state.live?.run === run ? state.live : null;
  const cards = message.cards.map((card, i) => newer(shown?.cards[i], card));
  if (shown) cards.push(...shown.cards.slice(cards.length));
  const is_calling = cards.length === 0 && (message.is_calling || (shown?.is_calling ?? false));
  if (shown && shown.next >= next) return { ...state, live: { ...shown, cards, is_calling }, lost: false };
  const isLate = shown?.isLate ?? true;
  const live = { run, user, command, next, reasoning, text, n_reasoning, cards, is_calling, isLate };
  return { ...state, live, pending: keepPending(state, command), lost: false };
}

/** @returns {"idle" | "asked" | "reading" | "thinking" | "deciding" | "calling" | "answering"} */
export function phase(state) {
  const { live, pending } = state;
  if (!live) return pending ? "asked" : "idle";
  if (live.cards.some(isWaitingFor)) return "deciding";
  if (live.is_calling || live.cards.some(isRunning)) return "calling";
  if (live.text) return "answering";
  if (live.cards.length > 0) return "reading";
  return live.reasoning ? "thinking" : "reading";
}

/** Whether the reasoning is what is being written. */
export function isThinking({ text, cards, is_calling }) {
  return text === "" && cards.length === 0 && !is_calling;
}

/** Whether nothing that is shown tells that the run goes on. */
export function isWaiting(live) {
  if (live.text || live.cards.some(isOpen)) return false;
  return live.reasoning === "" || !isThinking(live);
}

/** How a turn ended, in words; "" when there is nothing to say. */
export function mark(entry) {
  if (entry.error) return `Failed: ${entry.error}`;
  const marks = { cancelled: "Stopped", length: "Reached the token limit", severed: "Not finished: the kernel is gone" };
  return marks[entry.stop_reason] ?? "";
}

/** The line above the folded reasoning. @param {number | null | undefined} seconds unknown when there are none */
export function thought(entry, isThinking, seconds = entry.reasoning_s) {
  if (entry.n_reasoning === null) return isThinking ? "Thinking…" : "Thoughts";
  const length = count(entry.n_reasoning) + (seconds >= 0.05 ? `, ${seconds.toFixed(1)} s` : "");
  return isThinking ? `Thinking… ${length}` : `Thought for ${length}`;
}

/** @param {number} n tokens @param {number} seconds 0 when unknown */
export function pace(n, seconds) {
  if (!n) return "";
  return seconds > 0 ? `${count(n)} · ${(n / seconds).toFixed(1)} tok/s` : count(n);
}

function count(n) {
  return `${n} token${n === 1 ? "" : "s"}`;
}

/** Whether two plain values are the same, so that what shows the one need not be touched. */
function isEqual(a, b) {
  if (a === b) return true;
  if (typeof a !== "object" || typeof b !== "object" || a === null || b === null) return false;
  const names = Object.keys(a);
  return names.length === Object.keys(b).length && names.every((name) => isEqual(a[name], b[name]));
}

function isOver(state, run) {
  return run <= state.ended;
}

/** A card that has its result does not lose it to an older message. */
function newer(shown, card) {
  return shown && !isOpen(shown) ? shown : card;
}

/** Whether its result is to come. */
export function isOpen(card) {
  return isRunning(card) || isWaitingFor(card);
}

/** Whether it waits for the person. */
function isWaitingFor(card) {
  return card.state === "waiting";
}

function isRunning(card) {
  return card.state === "running";
}

function keepPending(state, command) {
  return state.pending?.id === command ? null : state.pending;
}
