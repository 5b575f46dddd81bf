// Elements by name. Text goes in as text, never as markup.

/**
 * @param {string} tag
 * @param {Record<string, string | boolean | undefined>} attributes `class` and the like; `text` is the content
 * @param {...Node} children
 */
export function element(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "text") node.textContent = String(value);
    else if (value === true) node.setAttribute(name, "");
    else if (value !== false && value !== undefined) node.setAttribute(name, String(value));
  }
  node.append(...children);
  return node;
}

/** An element that can have the focus; the attribute keeps JupyterLab's shortcuts away from its keys. */
export function focusable(tag, attributes = {}, ...children) {
  return element(tag, { ...attributes, "data-lm-suppress-shortcuts": "true" }, ...children);
}

/** Show or hide without touching what is already right. */
export function toggle(node, isShown) {
  if (node.hidden === isShown) node.hidden = !isShown;
}

/** Set the text only if it differs, so that a live region speaks once. */
export function say(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

/** The element that has the focus, wherever `node` stands. */
export function focused(node) {
  return node.getRootNode().activeElement;
}
