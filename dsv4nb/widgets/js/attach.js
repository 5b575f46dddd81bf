// What goes along with the next message: a list of the notebook's variables to choose from, and a chip for each.

import { element, focusable, focused, say, toggle } from "./dom.js";

/**
 * @param {{ button: HTMLElement, list: HTMLElement, chips: HTMLElement }} page
 * @param {(kind: string, fields: object) => string} give
 */
export function attaching({ button, list, chips }, give) {
  const note = element("p", { class: "dsv4-note" });
  const found = element("div", { class: "dsv4-names" });
  list.append(note, found);
  let asked = "";

  function open() {
    toggle(list, true);
    button.setAttribute("aria-expanded", "true");
    say(note, "Reading the notebook…");
    found.replaceChildren();
    asked = give("list", {});
  }

  function close() {
    if (list.hidden) return;
    const hadFocus = list.contains(focused(list));
    toggle(list, false);
    button.setAttribute("aria-expanded", "false");
    asked = "";
    if (hadFocus) button.focus();
  }

  function choice([name, about, isTool]) {
    const node = focusable(
      "button",
      { type: "button", class: "dsv4-name", tabindex: "-1" },
      element("span", { class: "dsv4-name-text", text: isTool ? `${name}()` : name }),
      element("span", { class: "dsv4-name-about", text: isTool ? `tool · ${about}` : about }),
    );
    node.addEventListener("click", () => {
      give("attach", { name });
      close();
    });
    return node;
  }

  function chip({ name, about, tokens, is_tool }) {
    const cost = tokens === null ? "" : `${tokens.toLocaleString("en")} tokens`;
    const drop = focusable("button", { type: "button", class: "dsv4-icon dsv4-drop", "aria-label": `Remove ${name}`, text: "×" });
    drop.addEventListener("click", () => give("detach", { name }));
    return element(
      "li",
      { class: "dsv4-chip", title: about },
      element("span", { class: "dsv4-name-text", text: is_tool ? `${name}()` : name }),
      element("span", { class: "dsv4-chip-cost", text: [is_tool ? "tool" : "", cost].filter(Boolean).join(" · ") }),
      drop,
    );
  }

  button.addEventListener("click", () => (list.hidden ? open() : close()));
  list.addEventListener("keydown", (event) => {
    const nodes = [...found.children];
    const at = nodes.indexOf(event.target);
    const to = { ArrowDown: at + 1, ArrowUp: at - 1, Home: 0, End: nodes.length - 1 }[event.key];
    if (event.key === "Escape") close();
    else if (to === undefined || nodes.length === 0) return;
    else nodes[(to + nodes.length) % nodes.length].focus();
    event.preventDefault();
    event.stopPropagation();
  });
  found.addEventListener("focusin", (event) => {
    for (const node of found.children) node.tabIndex = node === event.target ? 0 : -1;
  });

  return {
    close,
    /** @param {{ id: string, names: [string, string, boolean][] }} message */
    names({ id, names }) {
      if (id !== asked) return;
      say(note, names.length ? "" : "The notebook has no text, table, array, dict, list or documented function yet.");
      toggle(note, names.length === 0);
      found.replaceChildren(...names.map(choice));
      if (found.firstChild) {
        found.firstChild.tabIndex = 0;
        found.firstChild.focus();
      }
    },
    failed(id, error) {
      if (id !== asked) return false;
      say(note, error);
      toggle(note, true);
      return true;
    },
    show(attached) {
      const at = [...chips.querySelectorAll("button")].indexOf(focused(chips));
      chips.replaceChildren(...attached.map(chip));
      toggle(chips, attached.length > 0);
      if (at >= 0) (chips.querySelectorAll("button")[Math.min(at, attached.length - 1)] ?? button).focus();
    },
  };
}
