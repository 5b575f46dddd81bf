// The conversation as a value: no page, no model, so node can test it.
// Whatever is lost, repeated or late, the text shown is a beginning of the run's text or `lost` asks for a snapshot.

import { CHANNELS } from "./protocol.js";

/**
 * @typedef {import("./protocol.js").Entry} Entry
 * @typedef {{ run: number, user: string, command: string, next: number, reasoning: string, text: string,
 *             tool: string, n_reasoning: number }} Live `next` is the index of the token that comes next
 * @typedef {{ turns: Entry[], ended: number, live: Live | null, pending: { id: string, text: string } | null,
 *             lost: boolean }} Transcript
 */

/** @param {{ turns: Entry[], ended: number }} saved @returns {Transcript} */
export function opened(saved) {
  return { turns: saved.turns, ended: saved.ended, live: null, pending: null, lost: false };
}

/** A turn has ended, or the chat was emptied: `saved` is the whole truth about what is over. */
export function settled(state, saved) {
  const live = state.live && state.live.run > saved.ended ? state.live : null;
  return { ...state, turns: saved.turns, ended: saved.ended, live, lost: live ? state.lost : false };
}

/** The person asked; nothing has come back. */
export function asked(state, id, text) {
  return { ...state, pending: { id, text } };
}

/** The question was refused or taken back. */
export function withdrawn(state, id) {
  return state.pending?.id === id ? { ...state, pending: null } : state;
}

/** @param {Transcript} state @param {import("./protocol.js").Begin} message @returns {Transcript} */
export function begun(state, { run, user, command }) {
  if (isOver(state, run) || state.live?.run >= run) return state;
  const live = { run, user, command, next: 0, reasoning: "", text: "", tool: "", n_reasoning: 0 };
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
    else if (channel === "tool") live.tool += text;
    else if (channel === "reasoning") {
      live.reasoning += text;
      live.n_reasoning += 1;
    }
  }
  return { ...state, live };
}

/** @param {Transcript} state @param {import("./protocol.js").Snapshot} message @returns {Transcript} */
export function caughtUp(state, message) {
  const { run, user, command, next, reasoning, text, tool, n_reasoning } = message;
  if (isOver(state, run) || state.live?.run > run) return state;
  if (state.live?.run === run && state.live.next >= next) return { ...state, lost: false };
  const live = { run, user, command, next, reasoning, text, tool, n_reasoning };
  return { ...state, live, pending: keepPending(state, command), lost: false };
}

/** @returns {"idle" | "asked" | "reading" | "thinking" | "answering"} */
export function phase(state) {
  const { live, pending } = state;
  if (!live) return pending ? "asked" : "idle";
  if (live.text || live.tool) return "answering";
  return live.reasoning ? "thinking" : "reading";
}

/** How a turn ended, in words; "" when there is nothing to say. */
export function mark(entry) {
  if (entry.error) return `Failed: ${entry.error}`;
  return { cancelled: "Stopped", length: "Reached the token limit" }[entry.stop_reason] ?? "";
}

/** The line above the folded reasoning. */
export function thought(entry, isThinking) {
  if (isThinking) return "Thinking…";
  return entry.n_reasoning === null ? "Thoughts" : `Thought for ${count(entry.n_reasoning)}`;
}

/** @param {number} n tokens @param {number} seconds 0 when unknown */
export function pace(n, seconds) {
  if (!n) return "";
  return seconds > 0 ? `${count(n)} · ${(n / seconds).toFixed(1)} tok/s` : count(n);
}

function count(n) {
  return `${n} token${n === 1 ? "" : "s"}`;
}

function isOver(state, run) {
  return run <= state.ended;
}

function keepPending(state, command) {
  return state.pending?.id === command ? null : state.pending;
}
