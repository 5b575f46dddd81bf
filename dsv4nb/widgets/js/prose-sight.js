// What is set when. Thousands of texts at once would hold the page up for seconds, and nobody sees most of them: the
// last ones, which a conversation opens with, are set before anything is painted, others as they come into sight.

const AT_ONCE = 12_000; // characters, several screens
const MARGIN = "600px 0px";

let queued = []; // { node, length, set } of this task; `set` is null when it was called off
const awaited = new WeakMap();
let watcher = null;

/**
 * Set a text that is there as plain text; `dsv4-grown` is sent from where it stands when its size may have changed.
 *
 * @param {Element} node @param {number} length @param {() => void} set @returns {() => void} what calls it off
 */
export function setSoon(node, length, set) {
  const entry = { node, length, set };
  if (queued.push(entry) === 1) queueMicrotask(setLast);
  return () => {
    entry.set = null;
    watcher?.unobserve(node);
    awaited.delete(node);
  };
}

function setLast() {
  const entries = queued.filter(({ set }) => set).reverse();
  queued = [];
  const shown = [];
  let left = AT_ONCE;
  for (const { node, length, set } of entries) {
    if (left > 0 && !node.closest("details:not([open])")) {
      left -= length;
      shown.push(node);
      set();
    } else await_(node, set);
  }
  tell(shown);
}

function await_(node, set) {
  watcher ??= new IntersectionObserver(come, { rootMargin: MARGIN, scrollMargin: MARGIN });
  awaited.set(node, set);
  watcher.observe(node);
}

function come(entries) {
  const shown = [];
  for (const { target, isIntersecting } of entries) {
    if (!isIntersecting) continue;
    watcher.unobserve(target);
    awaited.get(target)?.();
    awaited.delete(target);
    shown.push(target);
  }
  tell(shown);
}

/** Tell the conversations of these that the end may have moved. */
export function tell(nodes) {
  const places = new Set(nodes.map((node) => node.closest("[role=log]") ?? node));
  for (const place of places) place.dispatchEvent(new Event("dsv4-grown", { bubbles: true }));
}
