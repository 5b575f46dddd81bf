// Values of a control and the positions of its slider: evenly spaced, or a list of stops where small steps matter at
// one end. A value between two stops stays what it is; only its handle stands at the nearer one.

/** @returns {number} how many positions there are, less one */
export function last(control) {
  if (control.stops.length > 0) return control.stops.length - 1;
  return Math.round((control.high - control.low) / control.step);
}

/** @param {number | null} value @returns {number} the position nearest to it */
export function position(control, value) {
  if (control.stops.length > 0) {
    if (value === null) return Math.max(0, control.stops.indexOf(null));
    const far = control.stops.map((stop) => (stop === null ? Infinity : Math.abs(stop - value)));
    return far.indexOf(Math.min(...far));
  }
  const at = Math.round(((value ?? control.low) - control.low) / control.step);
  return Math.max(0, Math.min(last(control), at));
}

/** @returns {number | null} the value at a position */
export function valueAt(control, at) {
  if (control.stops.length > 0) return control.stops[at];
  return Number((control.low + at * control.step).toFixed(decimals(control.step)));
}

/** @returns {number | null} the value a step up or down from one that may stand between two positions */
export function stepped(control, value, by) {
  const at = position(control, value);
  const here = valueAt(control, at);
  const isBetween = value !== null && here !== null && here !== value;
  const to = isBetween && Math.sign(here - value) === Math.sign(by) ? at : at + by;
  return valueAt(control, Math.max(0, Math.min(last(control), to)));
}

/** @returns {number | string | null} what a person typed: a number, nothing, or text that the engine will refuse */
export function typed(text) {
  const bare = text.trim().replace(/(\d)[\s_](?=\d{3}\b)/g, "$1");
  if (bare === "") return null;
  const number = Number(bare);
  return Number.isFinite(number) ? number : text.trim();
}

/** @returns {string} a value as it stands in its field */
export function shown(value) {
  return value === null || value === undefined ? "" : String(value);
}

/** @returns {string} a value as it is spoken */
export function spoken(control, value) {
  if (value === null) return "all that is left";
  if (value === 0 && control.stops[0] === 0) return control.name === "penalty_last_n" ? "the whole context" : "off";
  return String(value);
}

/** Lines of a field and strings: \n stands for a line break, \t for a tab, \\ for a backslash. */
export function strings(text) {
  const plain = { n: "\n", t: "\t", r: "\r", "\\": "\\" };
  return text
    .split("\n")
    .filter((line) => line !== "")
    .map((line) => line.replace(/\\([ntr\\])/g, (_, letter) => plain[letter]));
}

/** The other way round. */
export function lines(strings) {
  const told = { "\n": "\\n", "\t": "\\t", "\r": "\\r", "\\": "\\\\" };
  return strings.map((one) => one.replace(/[\n\t\r\\]/g, (letter) => told[letter])).join("\n");
}

function decimals(step) {
  const text = String(step);
  return text.includes(".") ? text.split(".")[1].length : 0;
}
