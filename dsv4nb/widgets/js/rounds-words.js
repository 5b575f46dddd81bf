// What is shown of rounds, in words; no page, so node can test it.

/** @typedef {import("./rounds.js").Round} Round @typedef {import("./rounds.js").Draft} Draft */

export const WORDS = {
  accepted: "accepted",
  rejected: "rejected",
  unreached: "unreached",
  not_verified: "not verified",
  past_stop: "past stop",
};

const WHY = {
  accepted: "the model chose the same token",
  rejected: "the model chose another token",
  unreached: "it stands behind a rejected draft",
  not_verified: "it was not run through the model",
  past_stop: "it stands behind the end of the reply",
};

const STOPS = {
  eos: "the reply ended here",
  stop_string: "a stop string ended the reply here",
  budget: "the token limit ended the reply here",
  tool_calls: "tool calls ended the reply here",
};

const FAR = 1e299; // the kernel's word for infinite is larger

/** A token as people can see it: blanks and line ends are drawn. */
export function visible(text) {
  if (text === "") return "∅";
  return text.replaceAll("\n", "⏎").replaceAll("\t", "⇥").replace(/^ +| +$/g, (blanks) => "␣".repeat(blanks.length));
}

/** @param {number | null} value */
export function number(value, digits = 2) {
  if (value === null || value === undefined) return "–";
  if (Math.abs(value) > FAR) return value > 0 ? "∞" : "−∞";
  return value.toFixed(digits);
}

/** A probability: small ones keep their size. @param {number | null} value */
export function chance(value) {
  if (value === null || value === undefined) return "–";
  if (value !== 0 && value < 0.001) return value.toExponential(1);
  return value > 0.9995 && value < 1 ? "> 0.999" : value.toFixed(3);
}

export function percent(value, digits = 1) {
  return value === null || value === undefined ? "–" : `${(100 * value).toFixed(digits)} %`;
}

export function count(n, what) {
  return `${n.toLocaleString("en")} ${what}${n === 1 ? "" : "s"}`;
}

/** @param {Round} round @param {number} slot from 0 */
export function slotTitle(round, slot) {
  return `Round ${round.round}, draft ${slot + 1} of ${round.drafts.length}: ${WORDS[round.drafts[slot].status]}`;
}

/** @param {Round} round @param {number} slot @returns {[string, string][]} what there is to say of a draft */
export function slotFacts(round, slot) {
  const draft = round.drafts[slot];
  const chosen = draft.chosen === null ? "nothing" : visible(draft.chosen);
  return [
    ["drafted", visible(draft.text)],
    ["chosen", chosen],
    ["p (model)", chance(draft.p)],
    ["q (drafter)", chance(draft.q)],
    ["margin", number(draft.margin)],
    ["confidence", chance(draft.conf)],
    ["survival", chance(draft.survival)],
  ];
}

/** One sentence for a listener. */
export function slotSentence(round, slot) {
  const draft = round.drafts[slot];
  const chosen = draft.chosen === null ? "" : `, chosen ${visible(draft.chosen)}`;
  const numbers = `p ${chance(draft.p)}, q ${chance(draft.q)}, confidence ${chance(draft.conf)}`;
  return `${slotTitle(round, slot)}, ${WHY[draft.status]}. Drafted ${visible(draft.text)}${chosen}. ${numbers}.`;
}

export function why(status) {
  return WHY[status];
}

/** @param {Round} round */
export function roundSentence(round) {
  const drafts = round.verified ? `${round.accepts} of ${count(round.verified, "verified draft")} accepted` : "no draft verified";
  const ms = round.ms[3] === null ? "" : `, ${number(round.ms[3], 1)} ms`;
  return `Round ${round.round}: ${drafts}, ${count(round.emitted, "token")}${ms}.`;
}

/** @param {Round} round @returns {[string, string][]} */
export function roundFacts(round) {
  const names = ["draft", "verify", "commit"];
  const parts = names.map((name, i) => (round.ms[i] === null ? "" : `${name} ${number(round.ms[i], 1)}`)).filter(Boolean);
  const facts = [
    ["drafts", round.drafts.length ? `${round.accepts} accepted of ${round.verified} verified, ${round.drafts.length} drafted` : "none"],
    ["tokens", `${round.emitted}`],
    ["rows", `${round.verified + 1}${round.reason ? `: ${round.reason}` : ""}`],
  ];
  if (round.ms[3] !== null) facts.push(["time", `${number(round.ms[3], 1)} ms${parts.length ? ` (${parts.join(", ")})` : ""}`]);
  const after = { bonus: "the model's own, behind the accepted drafts", correction: "the model's own, in place of a rejected draft" };
  if (round.next !== null) facts.push(["chosen next", `${visible(round.next)} (${after[round.kind] ?? "the model's own"})`]);
  if (round.stop !== null) facts.push(["end", STOPS[round.stop] ?? round.stop]);
  return facts;
}

function range([low, high], say) {
  const [a, b] = [say(low), say(high)];
  return a === b ? a : `${a} to ${b}`;
}

/**
 * What another window would have come to, and how sure that is.
 * @param {{ tau: number | null, rows: number, drafted: number, tokens: [number, number], accepted: [number, number],
 *           ms_per_token: [number, number] | null, unknown: number, departures: number }} point
 * @param {number} n rounds
 * @returns {{ window: string, facts: [string, string][], sure: string }}
 */
export function counterfactual(point, n) {
  const per = ([low, high]) => [low / n, high / n];
  const facts = [
    ["tokens/round", range(per(point.tokens), (x) => number(x))],
    ["tokens", range(point.tokens, (x) => x.toLocaleString("en"))],
    ["rows verified", `${point.rows.toLocaleString("en")} (${number(point.rows / n)} a round)`],
  ];
  if (point.drafted) {
    const rates = point.accepted.map((x) => x / point.drafted);
    facts.push(["draft acceptance rate", range(rates, percent)]);
  }
  if (point.ms_per_token) facts.push(["ms/token", range(point.ms_per_token, (x) => number(x))]);
  const doubts = [];
  if (point.unknown) {
    doubts.push(`bounds: ${count(point.unknown, "round")} did not run the drafts that would tell`);
  }
  if (point.departures) {
    doubts.push(`an estimate: ${count(point.departures, "round")} would have gone on from elsewhere`);
  }
  const sure = doubts.length ? doubts.join("; ") : "exact for this text";
  return { window: point.tau === null ? "all drafts are verified" : `tau ${point.tau}`, facts, sure };
}

export function speedOnly(mode) {
  return mode === "rejection"
    ? "In rejection mode the window also changes which text is drawn."
    : "Changes the speed, never the text.";
}
