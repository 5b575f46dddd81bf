// A code block: its language, a button that copies it, colours. Long lines scroll inside it.

import highlighter from "highlight.js/lib/core";
import bash from "highlight.js/lib/languages/bash";
import cpp from "highlight.js/lib/languages/cpp";
import diff from "highlight.js/lib/languages/diff";
import javascript from "highlight.js/lib/languages/javascript";
import json from "highlight.js/lib/languages/json";
import python from "highlight.js/lib/languages/python";
import sql from "highlight.js/lib/languages/sql";
import yaml from "highlight.js/lib/languages/yaml";

import { element, focusable, say } from "./dom.js";
import { cleanCode } from "./prose-clean.js";
import { patch } from "./prose-patch.js";

const PIECE = 4_000; // characters that are coloured at once while a block grows
const LONG = 50_000; // characters; a block that is longer stays in pieces
const COPIED_MS = 2_000;

for (const [name, grammar] of Object.entries({ bash, cpp, diff, javascript, json, python, sql, yaml })) {
  highlighter.registerLanguage(name, grammar);
}
highlighter.registerAliases(["cuda", "cu"], { languageName: "cpp" });
highlighter.registerAliases(["ts", "tsx", "typescript"], { languageName: "javascript" });

/** A code block that can grow: pieces that are complete are not coloured again. */
export function listing() {
  const code = element("code");
  const label = element("span", { class: "dsv4-lang" });
  const pre = focusable("pre", { role: "group", tabindex: "0" }, code);
  const copy = focusable("button", { type: "button", class: "dsv4-copy", "aria-live": "polite" }, ...offer());
  const el = element(
    "div",
    { class: "dsv4-listing" },
    element("div", { class: "dsv4-listing-head" }, label, copy),
    pre,
  );
  const shown = []; // { text, language, node }

  return {
    el,
    /**
     * @param {string} text
     * @param {string} language "" when none was named
     * @param {boolean} isOver whether it grows no more
     */
    show(text, language, isOver) {
      say(label, language || "text");
      pre.setAttribute("aria-label", language ? `Code, ${language}` : "Code");
      const pieces = isOver && text.length <= LONG ? [text] : piecesOf(text);
      pieces.forEach((piece, i) => {
        if (shown[i]?.text === piece && shown[i].language === language) return;
        if (!shown[i]) code.append((shown[i] = { node: element("span", { class: "dsv4-piece" }) }).node);
        patch(shown[i].node, coloured(piece, language));
        Object.assign(shown[i], { text: piece, language });
      });
      while (shown.length > pieces.length) shown.pop().node.remove();
    },
  };
}

/** Pieces of whole lines where there are lines; those of a longer text begin with the same ones. */
function piecesOf(text) {
  const pieces = [];
  for (let at = 0; at < text.length; at += pieces.at(-1).length) {
    const end = text.lastIndexOf("\n", at + PIECE) + 1;
    pieces.push(text.slice(at, at + PIECE >= text.length || end <= at ? at + PIECE : end));
  }
  return pieces;
}

function coloured(text, language) {
  const fragment = document.createDocumentFragment();
  if (highlighter.getLanguage(language)) {
    return cleanCode(highlighter.highlight(text, { language, ignoreIllegals: true }).value);
  }
  fragment.append(text);
  return fragment;
}

/** What a copy button says: a reply has another one. */
function offer() {
  return ["Copy", element("span", { class: "dsv4-unseen", text: " code" })];
}

/** Answer clicks on the copy buttons inside `root`, which come and go. */
export function listenForCopies(root) {
  root.addEventListener("click", async (event) => {
    const button = event.target.closest?.(".dsv4-copy");
    if (!button || !root.contains(button)) return;
    const code = button.closest(".dsv4-listing").querySelector("code");
    button.textContent = (await isCopied(code)) ? "Copied" : "Not copied: select it";
    setTimeout(() => button.replaceChildren(...offer()), COPIED_MS);
  });
}

/** Pages without https have no clipboard of their own; there the selection is copied. */
async function isCopied(code) {
  try {
    await navigator.clipboard.writeText(code.textContent);
    return true;
  } catch {
    getSelection().selectAllChildren(code);
    return document.execCommand("copy");
  }
}
