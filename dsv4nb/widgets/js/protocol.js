// Messages between a panel's page and its kernel; protocol.py declares the same, and a test compares them.

export const FROM_KERNEL = {
  "begin": ["run", "user", "command"],
  "frame": ["run", "start", "tokens"],
  "call": ["run", "index", "card"],
  "snapshot": ["run", "user", "command", "next", "reasoning", "text", "n_reasoning", "cards", "is_calling"],
  "forked": ["code", "turns"],
  "names": ["id", "names"],
  "measured": ["id", "room"],
  "times": ["id", "runs"],
  "exported": ["id", "file", "mime", "content"],
  "maths": ["script"],
  "ack": ["id", "ok", "error", "trace"]
};
export const FROM_PAGE = {
  "send": ["id", "text"],
  "stop": ["id", "run", "command"],
  "reset": ["id"],
  "set_thinking": ["id", "value"],
  "edit": ["id", "turn", "text"],
  "switch": ["id", "turn"],
  "rewind": ["id", "turn"],
  "fork": ["id", "turn"],
  "approve": ["id", "call", "text"],
  "deny": ["id", "call"],
  "list": ["id"],
  "attach": ["id", "name"],
  "detach": ["id", "name"],
  "measure": ["id", "text"],
  "times": ["id", "turn"],
  "export": ["id", "form", "turn"],
  "maths": [],
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
  "ack": ["id", "ok", "error", "trace"]
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

// The sampler panel: the values are a trait. A large seed travels as text.
export const SAMPLER_FROM_KERNEL = {
  "refused": ["id", "name", "error"],
  "ack": ["id", "ok", "error", "trace"]
};
export const SAMPLER_FROM_PAGE = {
  "set": ["id", "changes"],
  "preset": ["id", "name"],
  "reset": ["id", "names"],
  "lock": ["id", "value"]
};

// The queue panel: the requests are a trait.
export const QUEUE_FROM_KERNEL = {
  "ack": ["id", "ok", "error", "trace"]
};
export const QUEUE_FROM_PAGE = {
  "cancel": ["id", "request"]
};

// The load panel: how far it is is a trait.
export const LOAD_FROM_KERNEL = {
  "ack": ["id", "ok", "error", "trace"]
};
export const LOAD_FROM_PAGE = {
  "cancel": ["id"]
};

// The cache panel: facts are a trait; texts and arrays are asked for. `key` names the ids that are meant.
export const CACHE_FROM_KERNEL = {
  "text": ["id", "key", "first", "pieces"],
  "reads": ["id", "key", "token", "layer", "told"],
  "experts": ["id", "key", "first", "last", "told"],
  "ack": ["id", "ok", "error", "trace"]
};
export const CACHE_FROM_PAGE = {
  "choose": ["id", "key"],
  "text": ["id", "key", "first", "last"],
  "reads": ["id", "key", "token", "layer"],
  "experts": ["id", "key", "first", "last"],
  "pin": ["id", "store", "entry", "value"],
  "delete": ["id", "store", "entry"],
  "move": ["id", "store", "entry"]
};

// The token lens: `run` counts what its kernel half has shown; tokens are buffers, each text is told once.
export const LENS_FROM_KERNEL = {
  "turns": ["turns", "shown", "follows"],
  "snapshot": [
    "run", "label", "note", "live", "continues", "scores", "scoring", "fork", "n", "k", "texts"
  ],
  "frame": ["run", "start", "n", "k", "texts"],
  "ended": ["run", "note", "continues", "scores"],
  "ack": ["id", "ok", "error", "trace"]
};
export const LENS_FROM_PAGE = {
  "show": ["id", "turn"],
  "score": ["id", "run"],
  "continue": ["id", "run", "token", "alternative"],
  "back": ["id"],
  "resync": []
};
export const MADE = ["plain", "given", "first", "accepted", "correction", "bonus"];

/**
 * @typedef {{ run: number, user: string, command: string }} Begin
 * @typedef {{ run: number, start: number, tokens: [string, string][] }} Frame
 * @typedef {{ id: string, name: string, arguments: string, is_long: boolean, state: string, status: string, result: string,
 *             preview: string }} Card a tool call: `status` is the state in words, `preview` the result's beginning
 * @typedef {{ run: number, index: number, card: Card }} Call
 * @typedef {{ code: string, turns: number }} Forked a new chat with the first `turns` turns; `code` shows it
 * @typedef {{ used: number, max_seq: number, left: number, words: string }} Room
 * @typedef {{ choice: string, rows: [string, string, number, number, string][] }} RunFacts rows: phase, note, start and
 *             length in seconds, length in words
 * @typedef {{ run: number, user: string, command: string, next: number, reasoning: string, text: string,
 *             n_reasoning: number, cards: Card[], is_calling: boolean }} Snapshot
 * @typedef {{ id: string, ok: boolean, error: string, trace: string }} Ack
 * @typedef {{ script: string }} Maths a module that sets formulas
 * @typedef {{ user: string, reasoning: string, text: string, cards: Card[], is_calling: boolean,
 *             stop_reason: string | null, n_tokens: number, n_reasoning: number | null, reasoning_s: number | null,
 *             seconds: number,
 *             is_timed: boolean, footer: string, error: string, number: number, siblings: number[] }} Entry `number` is
 *             the turn's own among all turns, `siblings` are those in its place, its own among them
 */

/** @param {object} message @returns {boolean} whether the kernel's message is one of ours, with all its fields */
export function isFromKernel(message) {
  const fields = FROM_KERNEL[message?.kind];
  return fields !== undefined && fields.every((name) => name in message);
}
