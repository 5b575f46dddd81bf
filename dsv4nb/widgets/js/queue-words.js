// The queue in words. Pure.

const ENDS = {
  stop: "done",
  length: "token limit",
  tool_calls: "called tools",
  cancelled: "cancelled",
};

export const number = (n) => n.toLocaleString("en-US");

/** @returns {string} a span of time that is over, short */
export function span(seconds) {
  if (seconds < 0.0005) return "0 s";
  return seconds < 1 ? `${Math.round(1000 * seconds)} ms` : since(seconds);
}

/** @returns {string} a span of time that grows, in steps that can be read */
export function since(seconds) {
  if (seconds < 60) return `${seconds.toFixed(1)} s`;
  const whole = Math.floor(seconds);
  return whole < 3600 ? `${Math.floor(whole / 60)} min ${whole % 60} s` : `${Math.floor(whole / 3600)} h ${Math.floor((whole % 3600) / 60)} min`;
}

/** @returns {{ word: string, part: number | null }} what a request is doing, and how much of its prompt is read */
export function doing(one) {
  if (one.state === "queued") return { word: "waiting", part: null };
  if (one.n_tokens > 0) return { word: "answering", part: null };
  return { word: "reading the prompt", part: one.n_prompt ? one.n_read / one.n_prompt : 0 };
}

/** @returns {string} how it ended; a failure in its own words */
export const ended = (one) => (one.state === "failed" ? "failed" : (ENDS[one.outcome] ?? one.outcome));

export const rate = (one) => (one.rate === null ? "–" : `${one.rate.toFixed(1)} tok/s`);

/** @returns {string} the line beside the title */
export function summary(state) {
  const all = state.waiting.length + state.more;
  if (state.closed) return "the model is closed";
  if (all === 0) return "idle";
  const running = state.waiting.filter((one) => one.state === "running").length;
  return [running ? `${running} running` : "", all > running ? `${number(all - running)} waiting` : ""].filter(Boolean).join(" · ");
}
