// Messages between a chat's page and its kernel; protocol.py declares the same, and a test compares them.

export const FROM_KERNEL = {
  "begin": ["run", "user", "command"],
  "frame": ["run", "start", "tokens"],
  "snapshot": ["run", "user", "command", "next", "reasoning", "text", "tool", "n_reasoning"],
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

/**
 * @typedef {{ run: number, user: string, command: string }} Begin
 * @typedef {{ run: number, start: number, tokens: [string, string][] }} Frame
 * @typedef {{ run: number, user: string, command: string, next: number, reasoning: string, text: string,
 *             tool: string, n_reasoning: number }} Snapshot
 * @typedef {{ id: string, ok: boolean, error: string }} Ack
 * @typedef {{ user: string, reasoning: string, text: string, tool: string, stop_reason: string | null,
 *             n_tokens: number, n_reasoning: number | null, seconds: number, error: string }} Entry
 */

/** @param {object} message @returns {boolean} whether the kernel's message is one of ours, with all its fields */
export function isFromKernel(message) {
  const fields = FROM_KERNEL[message?.kind];
  return fields !== undefined && fields.every((name) => name in message);
}
