// One token in full: what the model thought of it, and what it would rather or also have said.

import { element, focusable, say } from "./dom.js";
import { HOW, share, visible } from "./lens-tokens.js";

const HINT = "Point at a token, or walk with the arrow keys. Enter goes to its alternatives.";

/**
 * @param {{ listen: Function, onChoose: (alternative: number) => void, onLeave: () => void }} on
 */
export function detail({ listen, onChoose, onLeave }) {
  const title = element("h4", { class: "dsv4-token-text" });
  const where = element("p", { class: "dsv4-where" });
  const facts = element("dl", { class: "dsv4-facts" });
  const how = element("p", { class: "dsv4-where" });
  const heading = element("h4", { class: "dsv4-rather", text: "It could also have been" });
  const list = element("ol", { class: "dsv4-alternatives dsv4-bare" });
  const hint = element("p", { class: "dsv4-hint" });
  const el = element("section", { class: "dsv4-detail", "aria-label": "The token" }, title, where, facts, how, heading, list, hint);
  let key = "";

  const fact = (name, value) => element("div", {}, element("dt", { text: name }), element("dd", { text: value }));

  function alternative(one, token, continues) {
    const isChosen = one.id === token.id;
    const bar = element("span", { class: "dsv4-bar", "aria-hidden": "true" });
    bar.style.inlineSize = `${Math.max(0.5, 100 * Math.exp(one.logprob)).toFixed(1)}%`;
    const parts = [
      element("span", { class: "dsv4-alternative-text", text: visible(one.text) }),
      element("span", { class: "dsv4-share", text: `${share(one.logprob)}${isChosen ? " · chosen" : ""}` }),
      element("span", { class: "dsv4-track", "aria-hidden": "true" }, bar),
    ];
    const kind = `dsv4-alternative${isChosen ? " dsv4-chosen" : ""}`;
    if (!continues) return element("li", {}, element("div", { class: kind }, ...parts));
    const button = focusable("button", { type: "button", class: kind, title: "continue from here on a fork" }, ...parts);
    button.dataset.id = String(one.id);
    return element("li", {}, button);
  }

  listen(list, "click", (event) => {
    const button = event.target.closest("button");
    if (button) onChoose(Number(button.dataset.id));
  });
  listen(el, "keydown", (event) => {
    const buttons = [...list.querySelectorAll("button")];
    const at = buttons.indexOf(event.target);
    if (event.key === "Escape") onLeave();
    else if (at >= 0 && (event.key === "ArrowDown" || event.key === "ArrowUp")) {
      buttons[Math.min(buttons.length - 1, Math.max(0, at + (event.key === "ArrowDown" ? 1 : -1)))].focus();
    } else return;
    event.preventDefault();
    event.stopPropagation();
  });

  return {
    el,
    /** @param {import("./lens-tokens.js").Token | undefined} token */
    show(token, index, continues) {
      const now = token === undefined ? "" : `${index} ${continues} ${JSON.stringify(token)}`;
      if (now === key && now !== "") return;
      key = now;
      const has = token !== undefined;
      for (const node of [title, where, facts, how]) node.hidden = !has;
      heading.hidden = list.hidden = !has || token.top.length === 0;
      say(hint, !has ? HINT : continues && token.top.length > 0 ? "Choose one to continue from here on a fork." : "");
      if (!has) return;
      say(title, visible(token.text));
      say(where, `token ${index} · id ${token.id}`);
      say(how, HOW[token.made]);
      facts.replaceChildren(
        ...(token.logprob === null
          ? []
          : [
              fact("probability", share(token.logprob)), fact("logprob", token.logprob.toFixed(4)),
              fact("rank", String(token.rank)), fact("entropy", `${token.entropy.toFixed(3)} nats`),
            ]),
      );
      list.replaceChildren(...token.top.map((one) => alternative(one, token, continues)));
    },
    /** @returns {boolean} whether there was anything to go to */
    enter() {
      const button = list.querySelector("button:not(.dsv4-chosen)") ?? list.querySelector("button");
      button?.focus();
      return button !== null;
    },
  };
}
