// A reply for who listens: sentence after sentence into a live region, when asked for.

const MS_PER_CHARACTER = 55; // a screen reader at an easy pace; what replaces a text too soon cuts it off
const LEAST_MS = 600;

const END = /[.!?…]["'’”)\]]*(?=\s)|[。！？]/u;
const FENCE = /^ {0,3}(`{3,}|~{3,})/;
const NUMBER = /(^|\s)\d+\.$/; // of a list, and not the end of a sentence

/**
 * @param {string} text of a reply as it stands, Markdown
 * @param {number} from where the sentence before ended
 * @param {boolean} isOver no more will come
 * @returns {{ said: string, to: number } | null} the next sentence, null while none is complete
 */
export function nextSentence(text, from, isOver) {
  let start = from + text.slice(from).match(/^\s*/)[0].length;
  if (start >= text.length) return null;
  const isLineStart = start === 0 || text.lastIndexOf("\n", start - 1) >= from || text[start - 1] === "\n";
  const fence = isLineStart ? text.slice(text.lastIndexOf("\n", start - 1) + 1).match(FENCE) : null;
  if (fence) {
    const end = closing(text, start, fence[1]);
    return end > 0 || isOver ? { said: "A block of code.", to: end > 0 ? end : text.length } : null;
  }
  const newline = text.indexOf("\n", start);
  const line = newline < 0 ? text.slice(start) : text.slice(start, newline + 1);
  const stop = endOf(line);
  if (stop < 0 && newline < 0 && !isOver) return null;
  const to = start + (stop < 0 ? line.length : stop);
  const said = plain(text.slice(start, to));
  return said ? { said, to } : nextSentence(text, to, isOver);
}

/** Where the first sentence of a line ends, -1 when it goes on. */
function endOf(line) {
  for (let at = 0; ; ) {
    const found = line.slice(at).match(END);
    if (!found) return -1;
    at += found.index + found[0].length;
    if (!NUMBER.test(line.slice(0, at))) return at;
  }
}

/** Behind the fence that closes a block, 0 while it is open. */
function closing(text, start, mark) {
  const open = text.indexOf("\n", start);
  const found = open < 0 ? null : text.slice(open + 1).match(new RegExp(`^ {0,3}${mark}[${mark[0]}]*[ \\t]*(\\n|$)`, "m"));
  return found ? open + 1 + found.index + found[0].length : 0;
}

function plain(markdown) {
  return markdown
    .replace(/!?\[([^\]]*)\]\([^)]*\)/g, "$1") // a link by its words
    .replace(/^\s*(?:(?:[>#+-]+|\*)\s+)+|\|/g, " ")
    .replace(/(?<=\S)[*~`]+|[*~`]+(?=\S)|\b_+\B|\B_+\b/g, "")
    .replace(/\s+/g, " ")
    .trim();
}

/** @param {(text: string) => void} say puts a text into the live region */
export function speaker(say) {
  let [text, at, isOver, waiting] = ["", 0, false, 0];

  function go() {
    waiting = 0;
    const next = nextSentence(text, at, isOver);
    if (!next) return;
    at = next.to;
    say(next.said);
    waiting = setTimeout(go, Math.max(LEAST_MS, next.said.length * MS_PER_CHARACTER));
  }

  return {
    /** A reply as it stands; one that does not go on where the one before stood is another. */
    hear(now, over) {
      if (!now.startsWith(text)) this.hush();
      [text, isOver] = [now, over];
      if (!waiting) go();
    },
    /** Say no more of this reply. */
    hush() {
      clearTimeout(waiting);
      [text, at, isOver, waiting] = ["", 0, false, 0];
      say("");
    },
  };
}
