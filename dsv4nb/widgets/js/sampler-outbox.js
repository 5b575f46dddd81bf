// Changes on their way: one command at a time, the newest value of a control wins, at most one command a period. A
// slider that is dragged therefore asks no more than the kernel answers.

export const PERIOD_MS = 80;

/**
 * @param {(changes: object) => string} give sends a command and returns its id
 * @param {{ now: () => number, later: (job: () => void, ms: number) => unknown }} clock
 */
export function outbox(give, clock) {
  /** @type {Map<string, unknown>} */
  const waiting = new Map();
  /** @type {Map<string, { name: string, value: unknown }>} */
  const sent = new Map();
  /** @type {Map<string, { value: unknown, error: string }>} */
  const refused = new Map();
  let due = 0;
  let isSet = false;

  function flush() {
    isSet = false;
    if (waiting.size === 0 || sent.size > 0) return;
    const left = due - clock.now();
    if (left > 0) {
      isSet = true;
      clock.later(flush, left);
      return;
    }
    const [name, value] = waiting.entries().next().value;
    waiting.delete(name);
    due = clock.now() + PERIOD_MS;
    const id = give({ [name]: value });
    sent.set(id, { name, value });
  }

  return {
    /** Ask for a value. */
    put(name, value) {
      refused.delete(name);
      waiting.set(name, value);
      if (!isSet) flush();
    },
    /** The kernel answered. */
    settled(id, error) {
      const one = sent.get(id);
      if (one === undefined) return;
      sent.delete(id);
      if (error && !waiting.has(one.name)) refused.set(one.name, { value: one.value, error });
      if (!isSet) flush();
    },
    /** Let go of what was refused. */
    forgive(name) {
      refused.delete(name);
    },
    forgiveAll: () => refused.clear(),
    /** @returns {{ value: unknown } | undefined} what a person asked for and nobody has answered or granted */
    open(name) {
      if (waiting.has(name)) return { value: waiting.get(name) };
      for (const one of sent.values()) if (one.name === name) return one;
      return refused.get(name);
    },
    /** @returns {string} why the value was refused, "" if it was not */
    refusal: (name) => refused.get(name)?.error ?? "",
  };
}
