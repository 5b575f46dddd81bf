// A load in words. Pure.

/** @returns {string} bytes in the largest unit that leaves at least one */
export function size(bytes) {
  for (const [unit, name] of [[1e9, "GB"], [1e6, "MB"], [1e3, "kB"]]) {
    if (bytes >= unit) return `${(bytes / unit).toFixed(1)} ${name}`;
  }
  return `${bytes} B`;
}

/** @returns {string} what is left, no more exact than it is known */
export function left(seconds) {
  if (seconds < 1.5) return "1 s";
  if (seconds < 90) return `${Math.round(seconds)} s`;
  const minutes = Math.round(seconds / 60);
  return minutes < 90 ? `${minutes} min` : `${(minutes / 60).toFixed(1)} h`;
}

export const isGoing = (state) => state.state === "loading" || state.state === "cancelling";

/** @returns {number | null} how much is read, null while nobody knows */
export function part(state) {
  return state.total > 0 ? state.done / state.total : null;
}

/** @returns {string} the line beside the title */
export function headline(state) {
  if (state.state === "waiting") return "";
  if (state.state === "loaded") return `loaded in ${state.elapsed.toFixed(state.elapsed < 10 ? 2 : 0)} s`;
  if (state.state === "cancelling") return "cancelling";
  if (state.state === "cancelled") return "cancelled";
  if (state.state === "failed") return "failed";
  return state.phase;
}

/** @returns {[string, string][]} what is known of a load that goes on, by label */
export function facts(state) {
  const known = [];
  if (state.total > 0) known.push(["read", `${size(state.done)} of ${size(state.total)}`]);
  if (state.rate !== null) known.push(["rate", `${size(state.rate)}/s`]);
  if (state.eta !== null) known.push(["left", left(state.eta)]);
  known.push(["so far", `${Math.floor(state.elapsed)} s`]);
  if (state.n_shards > 0) known.push(["file", `${state.n_shard} of ${state.n_shards}`]);
  for (const [device, bytes] of state.placed) known.push([`on ${device}`, size(bytes)]);
  return known;
}
