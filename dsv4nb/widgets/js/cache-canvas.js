// What the panel's canvases share.

/** Size a canvas for the screen and return its context, in CSS pixels. */
export { sized } from "./rounds-canvas.js";

/** Colours of the theme as a canvas takes them. @param {HTMLElement} probe @param {Record<string, string>} names */
export function inksOf(probe, names) {
  const found = {};
  for (const [name, variable] of Object.entries(names)) {
    probe.style.color = `var(${variable})`;
    found[name] = getComputedStyle(probe).color;
  }
  found.font = `11px ${getComputedStyle(probe).fontFamily}`;
  return found;
}
