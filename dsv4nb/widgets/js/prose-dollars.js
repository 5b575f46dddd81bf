// Which dollars are formulas: pandoc's rules, and the brackets of LaTeX. A price is none: an opening $ has no space
// behind it, a closing one none before it and no digit behind it.

const LONGEST = 2_000; // characters; a bound also keeps what is never closed from being searched again and again

const INLINE = /^\$(?![\s$])((?:\\[^\n]|[^\s$\\]|\s+(?![\s$]))+?)\$(?!\d)/;
const BRACKETS = new RegExp(String.raw`^\\\(((?:(?!\\\)|\n[ \t]*\n)[^]){1,${LONGEST}})\\\)`);
const DISPLAY = display(String.raw`\$\$`, String.raw`\$\$`, "");
const DISPLAY_BRACKETS = display(String.raw`\\\[`, String.raw`\\\]`, "");
const BLOCK = display(String.raw` {0,3}\$\$`, String.raw`\$\$`, String.raw`[ \t]*(?:\n+|$)`);
const BLOCK_BRACKETS = display(String.raw` {0,3}\\\[`, String.raw`\\\]`, String.raw`[ \t]*(?:\n+|$)`);

function display(open, close, end) {
  return new RegExp(`^${open}((?:(?!${close}|\\n[ \\t]*\\n)[^]){1,${LONGEST}})${close}${end}`);
}

function found(source, pattern, isDisplay) {
  const match = pattern.exec(source);
  if (!match || match[1].trim() === "" || match[1].length > LONGEST) return undefined;
  return { type: "maths", raw: match[0], text: match[1].trim(), display: isDisplay };
}

export const inlineMaths = {
  name: "maths",
  level: "inline",
  start(source) {
    const places = ["$", "\\(", "\\["].map((sign) => source.indexOf(sign)).filter((place) => place >= 0);
    return places.length > 0 ? Math.min(...places) : undefined;
  },
  tokenizer(source) {
    if (source[0] === "$") {
      return source[1] === "$" ? found(source, DISPLAY, true) : found(source, INLINE, false);
    }
    return found(source, BRACKETS, false) ?? found(source, DISPLAY_BRACKETS, true);
  },
};

export const blockMaths = {
  name: "maths",
  level: "block",
  start(source) {
    return /\n {0,3}(?:\$\$|\\\[)/.exec(source)?.index;
  },
  tokenizer(source) {
    return found(source, BLOCK, true) ?? found(source, BLOCK_BRACKETS, true);
  },
};
