// Formulas. What sets them is large and comes from the kernel when the first formula does; until then, and where there
// is no kernel, a formula is shown as it was written.

import { element } from "./dom.js";
import { cleanMaths } from "./prose-clean.js";
import { tell } from "./prose-sight.js";

const AGAIN_MS = 5_000;
const KEPT = 500; // a block that grows is shown again and again, its formulas are set once

const waiting = new Set();
const known = new Map();
let typeset = null;
let ask = () => {};
let lastAsked = -Infinity;

/** @param {() => void} send asks the kernel for the typesetter */
export function mathsFrom(send) {
  ask = send;
}

/** The kernel's answer. @param {string} script a module */
export async function takeMaths(script) {
  if (typeset) return;
  const url = URL.createObjectURL(new Blob([script], { type: "text/javascript" }));
  try {
    ({ default: typeset } = await import(url));
  } catch {
    return; // a host that runs no such module shows formulas as they were written
  } finally {
    URL.revokeObjectURL(url);
  }
  const sources = [...waiting].filter((source) => source.isConnected);
  waiting.clear();
  const places = sources.map((source) => source.parentElement);
  sources.forEach(set);
  tell(places);
}

/** Put a formula in the place of its source, now or when it can be. */
export function setMaths(source) {
  if (typeset) {
    set(source);
    return;
  }
  waiting.add(source);
  const now = performance.now();
  if (now - lastAsked < AGAIN_MS) return;
  lastAsked = now;
  ask();
}

function set(source) {
  const isDisplay = source.classList.contains("dsv4-display");
  const key = `${isDisplay}${source.textContent}`;
  if (!known.has(key)) {
    if (known.size >= KEPT) known.clear();
    known.set(key, typeset(source.textContent, isDisplay));
  }
  const { html, error } = known.get(key);
  if (error) {
    source.title = error;
    return;
  }
  const formula = element("span", { class: isDisplay ? "dsv4-maths dsv4-display" : "dsv4-maths" });
  formula.append(cleanMaths(html));
  source.replaceWith(formula);
}
