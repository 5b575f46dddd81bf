// Messages between a panel's page and its kernel; protocol.py declares the same, and a test compares them.

export const FROM_KERNEL = {
  "begin": ["run", "user", "command"],
  "frame": ["run", "start", "tokens"],
  "call": ["run", "index", "card"],
  "snapshot": ["run", "user", "command", "next", "reasoning", "text", "n_reasoning", "cards", "is_calling"],
  "ack": ["id", "ok", "error"]
};
export const FROM_PAGE = {
  "send": ["id", "text"],
  "stop": ["id", "run", "command"],
  "reset": ["id"],
  "set_thinking": ["id", "value"],
  "resync": []
};
export const CHANNELS = { "c": "content", "r": "reasoning", "t": "tool", "h": "hidden" };

// The acceptance panel: `run` counts what its kernel half has shown; rounds are lists of the fields below.
export const ROUNDS_FROM_KERNEL = {
  "turns": ["turns", "shown", "follows"],
  "snapshot": ["run", "label", "note", "live", "rewinds", "mode", "rounds", "figures"],
  "frame": ["run", "start", "rounds", "figures"],
  "ended": ["run", "note", "rewinds"],
  "sweep": ["run", "n", "points", "note"],
  "ack": ["id", "ok", "error"]
};
export const ROUNDS_FROM_PAGE = {
  "show": ["id", "turn"],
  "rewind": ["id", "run", "round"],
  "sweep": ["id", "run"],
  "resync": []
};
export const ROUND = [
  "reply", "round", "start", "pending", "drafts", "accepts", "verified", "next", "kind", "emitted", "stop",
  "ms", "reason", "reasoning", "content"
];
export const DRAFT = ["text", "chosen", "status", "conf", "survival", "margin", "q", "p"];
export const STATUSES = {
  "a": "accepted", "r": "rejected", "u": "unreached", "n": "not_verified", "s": "past_stop"
};

/**
 * @typedef {{ run: number, user: string, command: string }} Begin
 * @typedef {{ run: number, start: number, tokens: [string, string][] }} Frame
 * @typedef {{ name: string, arguments: string, is_long: boolean, state: string, status: string, result: string,
 *             preview: string }} Card a tool call: `status` is the state in words, `preview` the result's beginning
 * @typedef {{ run: number, index: number, card: Card }} Call
 * @typedef {{ run: number, user: string, command: string, next: number, reasoning: string, text: string,
 *             n_reasoning: number, cards: Card[], is_calling: boolean }} Snapshot
 * @typedef {{ id: string, ok: boolean, error: string }} Ack
 * @typedef {{ user: string, reasoning: string, text: string, cards: Card[], is_calling: boolean,
 *             stop_reason: string | null, n_tokens: number, n_reasoning: number | null, seconds: number,
 *             footer: string, error: string }} Entry
 */

/** @param {object} message @returns {boolean} whether the kernel's message is one of ours, with all its fields */
export function isFromKernel(message) {
  const fields = FROM_KERNEL[message?.kind];
  return fields !== undefined && fields.every((name) => name in message);
}
