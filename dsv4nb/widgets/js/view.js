// The life of a panel on a page: what it hears, asks and complains of, when it paints, and its end.

import { commands } from "./commands.js";
import { element, focusable, say, toggle } from "./dom.js";
import { whenCut } from "./kernel.js";

export const SILENT = "The kernel has not answered yet. A running cell or a restarted kernel can be the reason.";

const RESYNC_MS = 500;
const RECOLOUR_MS = [0, 200, 800]; // the style sheet of a theme arrives after its attribute
const THEME = { attributes: true, attributeFilter: ["class", "theme", "data-jp-theme-light", "data-jp-theme-name"] };

/**
 * @param {{ model: object, el: HTMLElement }} given
 * @param {() => void} paint is called at most once per animation frame
 * @param {HTMLElement} alert where refusals are shown
 */
export function viewOf({ model, el }, paint, alert = element("div", { class: "dsv4-alert", role: "alert", hidden: true })) {
  const heard = element("span", { class: "dsv4-unseen", role: "status", "aria-live": "polite" });
  const bound = new AbortController();
  const ends = [() => bound.abort(), () => cancelAnimationFrame(scheduled)];
  let scheduled = 0;
  let lastAsked = -Infinity;
  let tracing = ""; // of the failure that is being told

  const listen = (node, type, handler) => node.addEventListener(type, handler, { signal: bound.signal });

  function paintNow() {
    cancelAnimationFrame(scheduled);
    scheduled = 0;
    paint();
  }

  return {
    alert,
    heard,
    listen,
    paintNow,

    repaint() {
      scheduled ||= requestAnimationFrame(paintNow);
    },

    /** @param {string} text "" takes the complaint back */
    complain(text) {
      if (tracing) alert.replaceChildren(text, traceOf(tracing));
      else say(alert, text);
      toggle(alert, text !== "");
    },

    /** Say it to a screen reader. */
    announce(text) {
      say(heard, text);
    },

    /** @param {Parameters<typeof commands>[1]} on */
    orders(on) {
      const failed = (kind, id, error, trace) => {
        tracing = trace;
        on.failed(kind, id, error);
        tracing = "";
      };
      const orders = commands((message) => model.send(message), { ...on, failed });
      ends.push(orders.end);
      return orders;
    },

    /** Ask for all of the state, now and then at most. @returns {boolean} false when there is no kernel to ask */
    resync() {
      const now = performance.now();
      if (now - lastAsked < RESYNC_MS) return true;
      lastAsked = now;
      try {
        model.send({ kind: "resync" });
        return true;
      } catch {
        return false;
      }
    },

    /** @param {Record<string, (...told: any[]) => void>} handlers of what the model tells */
    hear(handlers) {
      for (const [name, handler] of Object.entries(handlers)) {
        model.on(name, handler);
        ends.push(() => model.off(name, handler));
      }
    },

    whenCut(cut) {
      ends.push(whenCut(model, cut));
    },

    /** Call `recolour` when the theme changes, for what a style sheet does not reach. */
    onTheme(recolour) {
      const soon = () => RECOLOUR_MS.forEach((ms) => setTimeout(() => !bound.signal.aborted && recolour(), ms));
      const themes = new MutationObserver(soon);
      for (const node of [document.body, document.documentElement]) themes.observe(node, THEME);
      listen(window.matchMedia("(prefers-color-scheme: dark)"), "change", soon);
      ends.push(() => themes.disconnect());
      return soon;
    },

    mount(name, root) {
      el.classList.add("dsv4", `dsv4-${name}`);
      el.replaceChildren(root);
    },

    end() {
      for (const end of ends) end();
    },
  };
}

/** Where a fault of ours or of a value's own code comes from, for who wants to report it. */
function traceOf(text) {
  const summary = focusable("summary", { class: "dsv4-unfold", text: "Show traceback" });
  return element("details", {}, summary, focusable("pre", { class: "dsv4-trace", tabindex: "0", text }));
}
