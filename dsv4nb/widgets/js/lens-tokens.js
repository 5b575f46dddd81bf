// The tokens under a lens, as a value: no page, no model, so node can test it.
// Whatever is lost, repeated or late, the tokens are a beginning of the reply's, or `lost` asks for a snapshot.

import { LENS_FROM_KERNEL, MADE } from "./protocol.js";

/**
 * @typedef {{ id: number, text: string, made: string, logprob: number | null, entropy: number | null,
 *             rank: number | null, top: { id: number, text: string, logprob: number }[] }} Token
 * @typedef {{ run: number, label: string, note: string, live: boolean, continues: boolean, scores: boolean,
 *             scoring: boolean, fork: string, tokens: Token[], texts: Map<number, string>, changedFrom: number,
 *             lost: boolean, turns: [number, string, number][], shown: number, follows: boolean }} State
 *   `changedFrom`: the first token that a message before this one did not tell the same
 */

/** @returns {State} */
export function blank() {
  return {
    ...{ run: 0, label: "", note: "", live: false, continues: false, scores: false, scoring: false, fork: "" },
    ...{ tokens: [], texts: new Map(), changedFrom: 0, lost: false, turns: [], shown: -1, follows: true },
  };
}

/** @param {State} state @param {object} message of the kernel @param {DataView[]} buffers @returns {State} */
export function received(state, message, buffers) {
  switch (message.kind) {
    case "snapshot":
      return snapshot(state, message, buffers);
    case "frame":
      return frame(state, message, buffers);
    case "ended": {
      if (message.run !== state.run) return state;
      const { note, continues, scores } = message;
      return { ...state, live: false, note, continues, scores };
    }
    case "turns":
      return { ...state, turns: message.turns, shown: message.shown, follows: message.follows };
    default:
      return state;
  }
}

function snapshot(state, message, buffers) {
  const { run, label, note, live, continues, scores, scoring, fork, n } = message;
  if (run < state.run) return state;
  const isOther = run > state.run;
  const isOlder = !isOther && n < state.tokens.length;
  if (isOlder) return { ...state, lost: false };
  const texts = new Map(message.texts);
  return {
    ...state,
    ...{ run, label, note, live, continues, scores, scoring, fork, texts, lost: false },
    tokens: decoded(message, buffers, texts),
    changedFrom: 0,
  };
}

function frame(state, message, buffers) {
  const { run, start } = message;
  if (run < state.run) return state;
  if (run > state.run || start > state.tokens.length) return { ...state, lost: true };
  const texts = new Map([...state.texts, ...message.texts]);
  const fresh = decoded(message, buffers, texts);
  if (fresh === null) return { ...state, lost: true };
  if (start + fresh.length < state.tokens.length) return { ...state, texts }; // late: what is shown has all of it
  fresh.forEach((token, i) => {
    const known = state.tokens[start + i];
    if (token.made === "plain" && known) token.made = known.made; // how it came about is told after it, and not taken back
  });
  return { ...state, texts, tokens: state.tokens.slice(0, start).concat(fresh), changedFrom: start };
}

/** The tokens of a message; null where a text is missing that an earlier message told. */
function decoded({ n, k }, buffers, texts) {
  if (n === 0) return [];
  const at = (i, size, read) => (place) => read(buffers[i], place * size);
  const int = (view, place) => view.getInt32(place, true);
  const float = (view, place) => view.getFloat32(place, true);
  const [ids, made] = [at(0, 4, int), at(1, 1, (view, place) => view.getUint8(place))];
  const [logprobs, entropies, ranks] = [at(2, 4, float), at(3, 4, float), at(4, 4, int)];
  const [topIds, topLogprobs] = [at(5, 4, int), at(6, 4, float)];
  const tokens = [];
  for (let i = 0; i < n; i += 1) {
    const id = ids(i);
    if (!texts.has(id)) return null;
    const top = [];
    for (let j = i * k; j < (i + 1) * k && topIds(j) >= 0; j += 1) {
      if (!texts.has(topIds(j))) return null;
      top.push({ id: topIds(j), text: texts.get(topIds(j)), logprob: topLogprobs(j) });
    }
    const isKnown = ranks(i) > 0;
    tokens.push({
      id, text: texts.get(id), made: MADE[made(i)], top,
      logprob: isKnown ? logprobs(i) : null,
      entropy: isKnown ? entropies(i) : null,
      rank: isKnown ? ranks(i) : null,
    });
  }
  return tokens;
}

/** Of each measure: what a level means, from nothing to remark to most remarkable. */
export const MEASURES = {
  probability: {
    name: "probability",
    levels: ["90–100 %", "70–90 %", "50–70 %", "25–50 %", "10–25 %", "2–10 %", "below 2 %"],
    level: ({ logprob }) => (logprob === null ? null : descending(Math.exp(logprob), [0.9, 0.7, 0.5, 0.25, 0.1, 0.02])),
  },
  entropy: {
    name: "entropy",
    levels: ["below 0.1 nats", "0.1–0.5", "0.5–1", "1–1.5", "1.5–2.5", "2.5–4", "4 nats and more"],
    level: ({ entropy }) => (entropy === null ? null : ascending(entropy, [0.1, 0.5, 1, 1.5, 2.5, 4])),
  },
  rank: {
    name: "rank",
    levels: ["first", "", "second", "third", "4th and 5th", "6th to 10th", "behind the 10th"],
    level: ({ rank }) => (rank === null ? null : [0, 0, 2, 3, 4, 4, 5, 5, 5, 5, 5][rank] ?? 6),
  },
};

export const HOW = {
  accepted: "an accepted draft",
  correction: "the model's correction of a rejected draft",
  bonus: "a bonus behind the accepted drafts",
  first: "the first token, before any draft",
  given: "given, not chosen",
  plain: "chosen in a single step",
};

function descending(value, bounds) {
  const found = bounds.findIndex((bound) => value >= bound);
  return found < 0 ? bounds.length : found;
}

function ascending(value, bounds) {
  const found = bounds.findIndex((bound) => value < bound);
  return found < 0 ? bounds.length : found;
}

/** How a token looks under a measure: a class that the style sheet knows. @param {Token} token @param {string} measure */
export function look(token, measure) {
  if (measure === "speculation") return `dsv4-how-${token.made}`;
  const level = MEASURES[measure].level(token);
  return level === null ? "dsv4-unknown" : `dsv4-level-${level}`;
}

/**
 * What the tokens that the model chose come to.
 * @param {Token[]} tokens @param {number} most
 * @returns {{ n: number, perplexity: number, entropy: number, lowest: number[] } | null} null where nothing is known
 */
export function sums(tokens, most = 3) {
  let n = 0;
  let cost = 0;
  let entropy = 0;
  const lowest = [];
  tokens.forEach((token, i) => {
    if (token.logprob === null || token.made === "given") return;
    n += 1;
    cost -= token.logprob;
    entropy += token.entropy;
    if (lowest.length === most && tokens[lowest[most - 1]].logprob <= token.logprob) return;
    const place = lowest.findIndex((j) => tokens[j].logprob > token.logprob);
    lowest.splice(place < 0 ? lowest.length : place, 0, i);
    lowest.length = Math.min(lowest.length, most);
  });
  return n === 0 ? null : { n, perplexity: Math.exp(Math.min(cost / n, 700)), entropy: entropy / n, lowest };
}

const MARKS = { " ": "␣", "\n": "⏎", "\t": "⇥", "\r": "␍" };

/** A token's text with marks for its white space. */
export function visible(text) {
  return text === "" ? "∅" : text.replace(/[ \n\t\r]/g, (one) => MARKS[one]);
}

/** A token's text in the running text: a line break is seen, and breaks the line. */
export function running(text) {
  return text === "" ? "∅" : text.replaceAll("\n", "⏎\n").replaceAll("\t", "⇥\t");
}

/** A log-probability as a share, with as many digits as tell small ones apart. */
export function share(logprob) {
  const percent = 100 * Math.exp(logprob);
  if (percent >= 99.95 || percent === 0) return `${percent.toFixed(0)} %`;
  return percent >= 1 ? `${percent.toFixed(1)} %` : `${Number(percent.toPrecision(2))} %`;
}

/** A token as one sentence, for those who hear it. @param {Token} token */
export function sentence(token, index) {
  const said = [`Token ${index}, ${spoken(token.text)}`];
  if (token.logprob !== null) {
    said.push(`probability ${share(token.logprob)}`, `rank ${token.rank}`, `entropy ${token.entropy.toFixed(2)} nats`);
    const other = token.top.find(({ id }) => id !== token.id);
    if (other) said.push(`${other === token.top[0] ? "rather" : "else"} ${spoken(other.text)} with ${share(other.logprob)}`);
  }
  said.push(HOW[token.made]);
  return `${said.join(", ")}.`;
}

/** A token's text as it is said. */
export function spoken(text) {
  const words = { " ": "space", "\n": "line break", "\t": "tab" };
  if (text === "") return "no text";
  return text.trim() === "" ? [...text].map((one) => words[one] ?? one).join(" ") : `“${text.trim()}”`;
}

/** The rows of a table of tokens. @param {Token[]} tokens @param {number} first @param {number} n */
export function rows(tokens, first, n) {
  const head = ["token", "text", "id", "probability", "logprob", "rank", "entropy", "how", "rather or else"];
  const body = tokens.slice(first, first + n).map((token, i) => [
    String(first + i), visible(token.text), String(token.id),
    ...(token.logprob === null
      ? ["–", "–", "–", "–"]
      : [share(token.logprob), token.logprob.toFixed(3), String(token.rank), token.entropy.toFixed(3)]),
    token.made === "accepted" ? "accepted draft" : token.made,
    token.top.filter(({ id }) => id !== token.id).slice(0, 2).map((one) => `${visible(one.text)} ${share(one.logprob)}`).join(", "),
  ]);
  return [head, ...body];
}

/** Move the focus among `n` tokens; null for a key that does not. `line` is the place one line up or down. */
export function moved(at, key, n, line) {
  const steps = { ArrowLeft: -1, ArrowRight: 1, PageUp: -50, PageDown: 50, Home: -Infinity, End: Infinity };
  if (key in steps) return Math.min(n - 1, Math.max(0, at + steps[key]));
  if (key === "ArrowUp" || key === "ArrowDown") return line(key === "ArrowDown" ? 1 : -1);
  return null;
}

/** @param {object} message @returns {boolean} whether the kernel's message is one of the lens's, with all its fields */
export function isOfLens(message) {
  const fields = LENS_FROM_KERNEL[message?.kind];
  return fields !== undefined && fields.every((name) => name in message);
}
