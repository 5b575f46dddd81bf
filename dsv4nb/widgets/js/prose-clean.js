// The second wall: whatever HTML is about to be shown, only these elements and attributes are.

import createPurify from "dompurify";

const TAGS = [
  "p", "h3", "h4", "h5", "h6", "pre", "code", "blockquote", "ul", "ol", "li", "hr", "br", "table", "thead", "tbody",
  "tr", "th", "td", "strong", "em", "del", "a",
];
const MATHS_TAGS = [
  "math", "mrow", "mi", "mn", "mo", "ms", "mtext", "mspace", "msup", "msub", "msubsup", "mfrac", "mroot", "msqrt",
  "mtable", "mtr", "mtd", "mlabeledtr", "mover", "munder", "munderover", "mpadded", "mphantom", "menclose", "mstyle",
];
const MATHS_ATTRIBUTES = [
  "display", "mathvariant", "stretchy", "fence", "separator", "lspace", "rspace", "width", "height", "depth",
  "voffset", "rowspacing", "columnspacing", "columnalign", "rowalign", "columnlines", "rowlines", "notation",
  "linethickness", "scriptlevel", "displaystyle", "accent", "accentunder", "minsize", "maxsize", "movablelimits",
  "symmetric", "largeop",
];
const CLASSES = {
  CODE: /^(?:language-[\w+#.-]{1,20}|dsv4-tex(?: dsv4-display)?)$/,
  SPAN: /^(?:(?:hljs-[a-z][a-z_-]*|[a-z]+_+)(?: |$))+$/,
};
const COMMON = { ALLOW_DATA_ATTR: false, ALLOW_ARIA_ATTR: false, RETURN_DOM_FRAGMENT: true };

let purify = null; // made when it is first needed: there may be no page yet

/** @param {string} html of prose-markdown.js @returns {DocumentFragment} */
export function cleanProse(html) {
  const attributes = ["href", "start", "align", "class"];
  const fragment = cleaned(html, {
    ALLOWED_TAGS: TAGS,
    ALLOWED_ATTR: attributes,
    ADD_URI_SAFE_ATTR: attributes.slice(1),
    ALLOWED_URI_REGEXP: /^(?:https?|mailto):/i,
  });
  for (const link of fragment.querySelectorAll("a")) {
    link.target = "_blank";
    link.rel = "noopener noreferrer nofollow";
    link.dataset.lmSuppressShortcuts = "true";
  }
  return fragment;
}

/** @param {string} html of a highlighter @returns {DocumentFragment} */
export function cleanCode(html) {
  return cleaned(html, { ALLOWED_TAGS: ["span"], ALLOWED_ATTR: ["class"] });
}

/** @param {string} html MathML of a typesetter @returns {DocumentFragment} */
export function cleanMaths(html) {
  return cleaned(html, {
    ALLOWED_TAGS: MATHS_TAGS,
    ALLOWED_ATTR: MATHS_ATTRIBUTES,
    ADD_URI_SAFE_ATTR: MATHS_ATTRIBUTES,
    FORBID_CONTENTS: ["annotation", "annotation-xml", "script", "style"],
  });
}

function cleaned(html, options) {
  purify ??= made();
  return purify.sanitize(html, { ...COMMON, ...options }) ?? document.createDocumentFragment();
}

function made() {
  const own = createPurify(window);
  own.addHook("uponSanitizeAttribute", (node, attribute) => {
    if (attribute.attrName !== "class") return;
    attribute.keepAttr = CLASSES[node.nodeName]?.test(attribute.attrValue) ?? false;
  });
  return own;
}
