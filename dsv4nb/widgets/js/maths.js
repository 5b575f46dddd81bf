// The typesetter of formulas, a module of its own that a page asks for when it meets one. MathML needs no fonts.

import katex from "katex";

/** @param {string} tex @param {boolean} isDisplay @returns {{ html: string, error: string }} */
export default function typeset(tex, isDisplay) {
  try {
    const html = katex.renderToString(tex, {
      displayMode: isDisplay,
      output: "mathml",
      trust: false,
      strict: "ignore",
      maxExpand: 200,
      maxSize: 20,
    });
    return { html, error: "" };
  } catch (error) {
    return { html: "", error: String(error.message ?? error) };
  }
}
