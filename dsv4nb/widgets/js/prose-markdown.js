// A reply's markdown as blocks of HTML, for prose-clean.js to sanitise. No page, so node can test it.
// A block's HTML depends on its own text alone (there are no reference links), so one that is finished stays as it is.
// HTML that a model writes is text, an image is its words and its address, and so is a link to anywhere but the web.

import { Lexer, Marked } from "marked";

import { blockMaths, inlineMaths } from "./prose-dollars.js";

const LONG_PROSE = 10_000; // characters; what is longer is a flood, and shown as it was written
const LONG_LIST = 4_000; // a longer list is several blocks, so that its items are finished one after another
// a line that opens dozens of quotes and lists in each other; every level costs a pass over the rest of the text
const NESTED = /^(?:[ \t]*(?:>|[*+-](?=[ \t])|\d{1,9}[.)](?=[ \t]))){24}/m;
const SCHEMES = new Set(["http:", "https:", "mailto:"]);

const { defaults } = new Marked({
  gfm: true,
  tokenizer: { def: () => undefined },
  extensions: [blockMaths, inlineMaths],
});

/**
 * @typedef {{ raw: string, html: string }} Block `raw` joined is the text
 * @param {string} text @returns {Block[]} `html` is "" for space between blocks
 */
export function blocks(text) {
  return tokensOf(text).map((token) => ({ raw: token.raw, html: block(token) }));
}

/** The blocks of a text as tokens, their insides too; rendering one is up to the caller. */
export function tokensOf(text) {
  if (NESTED.test(text)) return [{ type: "raw", raw: text }];
  const lexer = new Lexer(defaults);
  lexer.blockTokens(text, lexer.tokens);
  for (const { src, tokens } of lexer.inlineQueue) {
    if (src.length > LONG_PROSE) tokens.push({ type: "raw", raw: src });
    else lexer.inlineTokens(src, tokens);
  }
  return lexer.tokens.flatMap(pieces);
}

/** A list that is long is lists of some items each. */
function pieces(token) {
  if (token.type !== "list" || token.raw.length <= LONG_LIST) return [token];
  const lists = [];
  let length = LONG_LIST;
  for (const item of token.items) {
    if (length >= LONG_LIST) {
      lists.push({ ...token, items: [], raw: "", start: token.ordered ? parseInt(item.raw.trimStart(), 10) : "" });
      length = 0;
    }
    lists.at(-1).items.push(item);
    lists.at(-1).raw += item.raw;
    length += item.raw.length;
  }
  return lists;
}

export function block(token) {
  switch (token.type) {
    case "space":
      return "";
    case "heading": {
      const tag = `h${Math.min(token.depth + 2, 6)}`; // a notebook's own headings stand above them
      return `<${tag}>${inline(token.tokens)}</${tag}>`;
    }
    case "paragraph":
      return `<p>${inline(token.tokens)}</p>`;
    case "code":
      return code(token);
    case "blockquote":
      return `<blockquote>${token.tokens.map(block).join("")}</blockquote>`;
    case "list":
      return list(token);
    case "hr":
      return "<hr>";
    case "table":
      return table(token);
    case "html":
      return `<p>${escape(token.raw.trimEnd())}</p>`;
    case "maths":
      return `<p>${formula(token)}</p>`;
    default:
      return inline([token]);
  }
}

function code(token) {
  const language = languageOf(token);
  return `<pre><code${language && ` class="language-${language}"`}>${escape(token.text)}</code></pre>`;
}

function list({ ordered, start, loose, items }) {
  const tag = ordered ? "ol" : "ul";
  const from = ordered && start !== 1 ? ` start="${Number(start)}"` : "";
  const wrap = (token) => (loose && token.type === "text" ? `<p>${inline([token])}</p>` : block(token));
  return `<${tag}${from}>${items.map((item) => `<li>${item.tokens.map(wrap).join("")}</li>`).join("")}</${tag}>`;
}

function table({ header, rows }) {
  const place = ({ align }) => (align ? ` align="${align}"` : "");
  const row = (cells, tag) => cells.map((it) => `<${tag}${place(it)}>${inline(it.tokens)}</${tag}>`).join("");
  const body = rows.map((cells) => `<tr>${row(cells, "td")}</tr>`).join("");
  return `<table><thead><tr>${row(header, "th")}</tr></thead>${body && `<tbody>${body}</tbody>`}</table>`;
}

function inline(tokens) {
  return tokens.map(span).join("");
}

function span(token) {
  switch (token.type) {
    case "text":
      return token.tokens ? inline(token.tokens) : spoken(token.text);
    case "escape":
      return escape(token.text);
    case "strong":
    case "em":
    case "del":
      return `<${token.type}>${inline(token.tokens)}</${token.type}>`;
    case "codespan":
      return `<code>${escape(token.text)}</code>`;
    case "br":
      return "<br>";
    case "checkbox":
      return token.checked ? "☑ " : "☐ ";
    case "link":
      return isWeb(token.href) ? `<a href="${escape(token.href)}">${inline(token.tokens)}</a>` : escape(token.raw);
    case "image":
      return spoken(token.text) + escape(token.text ? ` (${token.href})` : token.href);
    case "html":
      return /^<br ?\/?>$/i.test(token.raw) ? "<br>" : escape(token.raw); // a table's cell has no other way
    case "maths":
      return formula(token);
    default:
      return escape(token.raw);
  }
}

function formula({ text, display }) {
  return `<code class="dsv4-tex${display ? " dsv4-display" : ""}">${escape(text)}</code>`;
}

/** The language of a code block, "" for none: people write anything behind a fence. */
export function languageOf({ lang = "" }) {
  return (/^[\w+#.-]{1,20}(?=$|[\s,{])/.exec(lang)?.[0] ?? "").toLowerCase();
}

/** Whether an address is a whole one of the web. */
function isWeb(href) {
  try {
    return SCHEMES.has(new URL(href).protocol);
  } catch {
    return false;
  }
}

function escape(text) {
  return text.replace(/[&<>"']/g, (sign) => `&#${sign.charCodeAt(0)};`);
}

/** Prose, in which an entity stands for its sign. */
function spoken(text) {
  return text.replace(/&(?!(?:#\d{1,7}|#x[\da-f]{1,6}|[a-z][a-z\d]{1,31});)|[<>"']/gi, escape);
}
