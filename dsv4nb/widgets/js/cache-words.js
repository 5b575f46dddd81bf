// What the cache panel says: no page, so that node can test it.

export const KINDS = {
  reused: "reused",
  computed: "computed",
  generated: "generated",
};
export const ATTENTION = { swa: "window", csa: "window + picked by 4", hca: "window + all by 128" };
const STARTS = {
  exact: "nothing to compute",
  live: "continued",
  anchor: "from an anchor",
  host: "from host memory",
  reset: "from the beginning",
};

export const number = (n) => n.toLocaleString("en-US");
export const count = (n, word) => `${number(n)} ${word}${n === 1 ? "" : "s"}`;
export const percent = (share) => `${(100 * share).toFixed(1)} %`;

/** Bytes as people read them. */
export function size(n) {
  if (n < 1024) return `${number(n)} B`;
  if (n < 2 ** 20) return `${number(Math.round(n / 1024))} KiB`;
  const [part, unit] = n < 2 ** 30 ? [n / 2 ** 20, "MiB"] : [n / 2 ** 30, "GiB"];
  return `${number(Number(part.toFixed(1)))} ${unit}`;
}

/** A token's text on one line, so that blanks can be seen. */
export function quoted(text) {
  if (text === undefined) return "…";
  return `‘${text.replaceAll("\n", "⏎").replaceAll("\t", "⇥").replaceAll(" ", "·")}’`;
}

/**
 * @typedef {{ key: string, label: string, n: number, reused: number, prompt: number, window: number, anchors: number[] }} Ledger
 */

/** How the token at a position came about. @param {Ledger} ledger @returns {keyof typeof KINDS} */
export function kindOf(position, ledger) {
  if (position < ledger.reused) return "reused";
  return position < ledger.prompt ? "computed" : "generated";
}

/** Whether the next token's window holds a position. @param {Ledger} ledger */
export const inWindow = (position, ledger) => ledger.window > 0 && position >= ledger.n - ledger.window;

/** A token in words. @param {Ledger} ledger */
export function tokenWords(position, ledger, text) {
  const parts = [`token ${number(position)}`, quoted(text), KINDS[kindOf(position, ledger)]];
  if (inWindow(position, ledger)) parts.push("in the window");
  if (ledger.anchors.includes(position + 1)) parts.push(`an anchor of ${count(position + 1, "token")} ends here`);
  return parts.join(" · ");
}

/** The strip in numbers. @param {Ledger} ledger @returns {[string, string][]} */
export function ledgerFacts(ledger) {
  const facts = [["committed", count(ledger.n, "token")]];
  if (ledger.prompt > 0) {
    facts.push(
      ["reused", number(ledger.reused)],
      ["computed", number(Math.max(0, ledger.prompt - ledger.reused))],
      ["generated", number(Math.max(0, ledger.n - ledger.prompt))],
    );
  }
  if (ledger.window > 0) facts.push(["window", `from token ${number(Math.max(0, ledger.n - ledger.window))}`]);
  facts.push(["anchors", ledger.anchors.length ? `at ${ledger.anchors.map(number).join(", ")}` : "none"]);
  return facts;
}

/**
 * Where a key leads from a cell of a grid; null for a key that moves nothing.
 * @param {{ n: number, columns: number, page: number }} grid
 */
export function moved(at, key, { n, columns, page }) {
  const steps = {
    ArrowLeft: -1, ArrowRight: 1, ArrowUp: -columns, ArrowDown: columns,
    PageUp: -columns * page, PageDown: columns * page, Home: -n, End: n,
  };
  if (!(key in steps)) return null;
  return Math.max(0, Math.min(n - 1, at + steps[key]));
}

/** A decision: [what was done, in numbers]. */
export function decisionWords(one) {
  const rows = one.computed ? `${count(one.computed, "row")} computed` : "nothing computed";
  return [STARTS[one.kind] ?? one.kind, `${number(one.length)} of ${number(one.prompt)} prompt tokens reused, ${rows}`];
}

/** Where a prompt left the cache, "" when it did not. */
export function awayWords(away) {
  if (!away) return "";
  const [position, expected, met] = away;
  const end = met === null ? "the prompt ends there" : `the prompt has ${quoted(met)}`;
  return `Leaves the cache at token ${number(position)}: cached is ${quoted(expected)}, ${end}.`;
}

/** What a token read, in one sentence. */
export function readsWords(token, text, told, masses) {
  const parts = [`${count(told.rows, "row")} of the window (${percent(masses.rows)})`];
  if (told.ratio > 0) {
    const of = told.entries < told.visible ? ` of ${number(told.visible)}` : "";
    parts.push(`${number(told.entries)}${of} ${told.visible === 1 ? "entry" : "entries"} (${percent(masses.entries)})`);
  }
  parts.push(`the sink (${percent(told.sink)})`);
  const last = parts.pop();
  return `Token ${number(token)} ${quoted(text)} read ${parts.join(", ")} and ${last}.`;
}

/** The entries of an answer, as rows. */
export function entryRows(reads) {
  const { ratio, reach } = reads.told;
  return Array.from(reads.entries, (entry, i) => {
    const last = ratio * (entry + 1);
    return {
      entry,
      first: ratio * entry,
      last,
      from: Math.max(0, last - reach),
      mass: reads.mass[i],
      score: reads.scores.length ? reads.scores[i] : null,
    };
  });
}

const ORDERS = {
  mass: (a, b) => b.mass - a.mass,
  score: (a, b) => (b.score ?? 0) - (a.score ?? 0),
  position: (a, b) => a.entry - b.entry,
};
/** @param {keyof typeof ORDERS} by */
export const ordered = (rows, by) => [...rows].sort(ORDERS[by]);

export const span = (first, last) => (last - first === 1 ? number(first) : `${number(first)}–${number(last - 1)}`);

/** A cell of the expert map in words. */
export function expertWords(layer, expert, visits, tokens, routedBy) {
  return `layer ${layer}, expert ${expert}: ${number(visits)} of ${count(tokens, "token")} (${percent(visits / tokens)}), routed by ${routedBy}`;
}
