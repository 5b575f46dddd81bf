// Make one tree like another, keeping the nodes that are alike, so that a selection and a scroll position in them stay.

/** Make the children of `parent` those of `fresh`, which is used up. Text that became longer is appended to. */
export function patch(parent, fresh) {
  let old = parent.firstChild;
  for (const node of [...fresh.childNodes]) {
    const next = old?.nextSibling ?? null;
    if (!old) parent.append(node);
    else if (!isLike(old, node)) old.replaceWith(node);
    else if (old.nodeType === Node.TEXT_NODE) write(old, node.data);
    else if (old.nodeName !== "BUTTON") patch(old, node); // what a button says is its own affair
    old = next;
  }
  while (old) {
    const next = old.nextSibling;
    old.remove();
    old = next;
  }
}

function write(node, text) {
  if (!text.startsWith(node.data)) node.data = text;
  else if (text.length > node.length) node.appendData(text.slice(node.length));
}

/** Whether two nodes are of one kind. */
function isLike(a, b) {
  if (a.nodeName !== b.nodeName || a.attributes?.length !== b.attributes?.length) return false;
  return [...(a.attributes ?? [])].every(({ name, value }) => b.getAttribute(name) === value);
}
