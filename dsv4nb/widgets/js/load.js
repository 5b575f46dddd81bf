// A load: how far it is, a way to stop it, and at its end the card of the model.

import { element, focusable, focused, say, toggle } from "./dom.js";
import { facts, headline, isGoing, part } from "./load-words.js";
import { viewOf } from "./view.js";

const PATIENCE_MS = 400; // not every kernel reads messages while a cell runs; then its interrupt does the same

const CUT = "The kernel was restarted or closed, and nothing is loaded any more. Run the cell again to load.";

function render({ model, el }) {
  let isCut = false;
  let wasGoing = false;
  let isAsked = false;
  const view = viewOf({ model, el }, paint);
  const { alert, heard, listen, complain, announce, repaint } = view;

  const title = element("strong", { class: "dsv4-title" });
  const status = element("span", { class: "dsv4-state" });
  const cancel = focusable("button", { type: "button", class: "dsv4-quiet", text: "Cancel" });
  const bar = element("progress", { class: "dsv4-bar", max: "1", "aria-label": "Weights that were read" });
  const share = element("span", { class: "dsv4-share" });
  const known = element("dl", { class: "dsv4-known" });
  const path = element("p", { class: "dsv4-path" });
  const going = element("div", { class: "dsv4-going" }, element("div", { class: "dsv4-bar-row" }, bar, share), known, path);
  const empty = element("p", { class: "dsv4-empty", text: "Nothing is being loaded. dsv4nb.load(path, progress=panel) shows it here." });
  const card = element("dl", { class: "dsv4-card" });
  const fold = element("details", { class: "dsv4-fold" }, focusable("summary", { class: "dsv4-unfold", text: "About the model" }), card);
  const root = element(
    "div",
    { class: "dsv4-panel", role: "group", "aria-label": "Load" },
    element("div", { class: "dsv4-head" }, title, status, cancel),
    alert, empty, going, fold, heard,
  );

  const orders = view.orders({
    failed(kind, id, error) {
      isAsked = false;
      complain(error);
      view.paintNow();
    },
    silent() {
      if (isGoing(model.get("state"))) complain("The kernel has not answered yet. Interrupt it with ■ to stop the load.");
    },
  });

  listen(cancel, "click", () => {
    if (isAsked) return;
    complain("");
    isAsked = true;
    orders.give("cancel", {});
    repaint();
    setTimeout(() => {
      const { state, interrupts } = model.get("state");
      if (state === "loading" && interrupts) model.widget_manager?.kernel?.interrupt?.();
    }, PATIENCE_MS);
  });

  function paint() {
    const state = model.get("state");
    const isOn = isGoing(state) && !isCut;
    const isLoaded = state.state === "loaded";
    const has = focused(cancel) === cancel;
    say(title, model.get("title") || state.name || "Load");
    say(status, isCut ? "gone" : headline(state));
    root.dataset.state = isCut ? "gone" : state.state;
    toggle(cancel, isOn);
    const isCancelling = isAsked || state.state === "cancelling";
    cancel.setAttribute("aria-disabled", String(isCancelling)); // a disabled button would lose the focus
    say(cancel, isCancelling ? "Cancelling" : "Cancel");
    if (!isOn) {
      isAsked = false;
      complain(isCut && state.state !== "waiting" ? CUT : state.error);
    }
    toggle(empty, state.state === "waiting");
    toggle(going, !isLoaded && state.state !== "waiting");
    const read = part(state);
    if (read === null) bar.removeAttribute("value");
    else bar.value = read;
    toggle(bar.parentElement, isOn || read !== null);
    say(share, read === null ? "" : `${Math.floor(100 * read)} %`);
    rows(known, isOn ? facts(state) : []);
    say(path, [state.shard, state.path].filter(Boolean).join(" · "));
    toggle(fold, isLoaded);
    if (isLoaded) rows(card, state.facts);
    if (wasGoing !== isOn && isLoaded) {
      fold.open = !state.brief;
      if (has) fold.querySelector("summary").focus();
    }
    if (wasGoing && !isOn && isLoaded) announce(`${state.name} is loaded.`);
    if (!wasGoing && isOn) announce(`Loading ${state.name}.`);
    wasGoing = isOn;
    el.dataset.state = state.state;
  }

  view.whenCut(() => {
    isCut = true;
    orders.end();
    repaint();
  });
  const receive = (message) => {
    if (message?.kind === "ack") orders.acknowledged(message);
  };
  view.hear({ "msg:custom": receive, "change:state": repaint, "change:title": repaint });

  view.mount("load", root);
  fold.open = !model.get("state").brief;
  paint();
  return view.end;
}

/** Write label and text pairs; what stays is not touched, so that a selection lives. */
function rows(list, pairs) {
  while (list.children.length > pairs.length) list.lastElementChild.remove();
  pairs.forEach(([label, text], i) => {
    const row = list.children[i] ?? list.appendChild(element("div", {}, element("dt"), element("dd")));
    say(row.firstElementChild, label);
    say(row.lastElementChild, text);
  });
}

export default { render };
