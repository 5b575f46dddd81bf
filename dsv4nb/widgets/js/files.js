// Text out of the page: to the clipboard, or as a file.

import { element } from "./dom.js";

/** @returns {Promise<boolean>} whether it is in the clipboard; pages without https have none but the selection's */
export async function copied(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return copiedBySelection(text);
  }
}

function copiedBySelection(text) {
  const had = document.activeElement;
  const area = element("textarea", { readonly: true, "aria-hidden": "true", style: "position:fixed;opacity:0" });
  area.value = text;
  document.body.append(area);
  area.select();
  try {
    return document.execCommand("copy");
  } finally {
    area.remove();
    had?.focus?.();
  }
}

export function download(file, mime, text) {
  const url = URL.createObjectURL(new Blob([text], { type: mime }));
  const link = element("a", { href: url, download: file, hidden: true });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(url), 60_000); // a slow host reads it later
}
