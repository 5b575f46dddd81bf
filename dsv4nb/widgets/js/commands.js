// Commands to the kernel: each has an id, is repeated once if it is not acknowledged, and tells how it went.

const REPEAT_MS = 2000;
const SILENT_MS = 5000;

const CUT = "the kernel was restarted or closed; run the cell again";

/**
 * @param {(message: object) => void} send throws when there is no kernel to send to
 * @param {{ failed: (kind: string, id: string, error: string, trace: string) => void, silent: (kind: string, id: string) => void }} on
 *     `failed`: the kernel refused; `silent`: it has not answered and may still
 */
export function commands(send, on) {
  /** @type {Map<string, { kind: string, timers: number[] }>} */
  const open = new Map();
  let last = 0;
  const page = Math.random().toString(36).slice(2, 10); // two pages must not use one id

  function attempt(message) {
    try {
      send(message);
    } catch {
      queueMicrotask(() => settle({ id: message.id, ok: false, error: CUT, trace: "" })); // after the caller knows the id
    }
  }

  /** @param {import("./protocol.js").Ack} ack */
  function settle({ id, ok, error, trace }) {
    const kind = open.get(id)?.kind;
    if (kind === undefined) return; // another view's
    close(id);
    if (!ok) on.failed(kind, id, error, trace);
  }

  function close(id) {
    open.get(id)?.timers.forEach(clearTimeout);
    open.delete(id);
  }

  return {
    /** @returns {string} the command's id */
    give(kind, fields) {
      const id = `${page}-${(last += 1)}`;
      const message = { kind, id, ...fields };
      const timers = [setTimeout(() => attempt(message), REPEAT_MS), setTimeout(() => on.silent(kind, id), SILENT_MS)];
      open.set(id, { kind, timers });
      attempt(message);
      return id;
    },
    acknowledged: settle,
    forget: close,
    end() {
      [...open.keys()].forEach(close);
    },
  };
}
