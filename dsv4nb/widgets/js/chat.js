// The chat: a reducer's state, painted at most once per animation frame.

import { commands } from "./commands.js";
import { element, focusable, say, toggle } from "./dom.js";
import { isFromKernel } from "./protocol.js";
import { asked, begun, called, caughtUp, extended, mark, opened, pace, phase, settled, withdrawn } from "./transcript.js";
import { turn } from "./turn.js";

const FACTS_MS = 250;
const RESYNC_MS = 500;
const NEAR_END_PX = 32;

const PHRASES = {
  asked: "Sending…",
  reading: "Reading the prompt…",
  thinking: "Thinking…",
  calling: "Calling a tool…",
  answering: "Answering…",
};

function parts(examples) {
  const title = element("strong", { class: "dsv4-title" });
  const thinking = focusable("input", { type: "checkbox", role: "switch", class: "dsv4-switch" });
  const fresh = focusable("button", { type: "button", class: "dsv4-quiet", text: "New chat" });
  const log = focusable("div", {
    class: "dsv4-log",
    role: "log",
    "aria-live": "off", // the status line speaks start and end; every token would drown it
    "aria-label": "Conversation",
    tabindex: "0",
  });
  const suggestions = examples.map((text) => focusable("button", { type: "button", class: "dsv4-example", text }));
  const empty = element(
    "div",
    { class: "dsv4-empty" },
    element("p", { class: "dsv4-invitation", text: "Ask something, or start with one of these." }),
    element("div", { class: "dsv4-examples" }, ...suggestions),
  );
  const alert = element("p", { class: "dsv4-alert", role: "alert", hidden: true });
  const input = focusable("textarea", {
    class: "dsv4-input",
    rows: "1",
    placeholder: "Message the model",
    "aria-label": "Message",
    spellcheck: "false",
  });
  const button = focusable("button", { type: "button", class: "dsv4-send" });
  const status = element("span", { class: "dsv4-status", role: "status", "aria-live": "polite" });
  const keys = element("span", { class: "dsv4-keys", text: "Enter sends · Shift+Enter new line · Esc stops" });
  const root = element(
    "div",
    { class: "dsv4-panel", role: "group", "aria-label": "Chat" },
    element(
      "div",
      { class: "dsv4-head" },
      title,
      element("label", { class: "dsv4-toggle" }, thinking, element("span", { text: "Thinking" })),
      fresh,
    ),
    log,
    empty,
    alert,
    element("div", { class: "dsv4-compose" }, input, button),
    element("div", { class: "dsv4-foot" }, status, keys),
  );
  return { root, title, thinking, fresh, log, suggestions, empty, alert, input, button, status };
}

function render({ model, el }) {
  let state = opened(model.get("transcript"));
  let isFollowing = true;
  let isNews = false; // turns that were over before this view came are not announced
  let outcome = "";
  let scheduled = 0;
  let lastAsked = -Infinity;
  let lastFacts = 0;
  let clock = { run: 0, start: 0, first: 0 };
  let takingBack = "";

  const page = parts(model.get("examples"));
  const turns = [];
  const bound = new AbortController();
  const listen = (node, type, handler) => node.addEventListener(type, handler, { signal: bound.signal });

  const orders = commands((message) => model.send(message), {
    failed(kind, id, error) {
      if (kind === "send") giveBack(id);
      if (id === takingBack) outcome = "Not sent.";
      else complain(kind === "send" ? `Not sent: ${error}` : error);
      if (kind === "set_thinking") page.thinking.checked = model.get("thinking");
      repaint();
    },
    silent(kind, id) {
      const cause = "The kernel has not answered yet. A running cell or a restarted kernel can be the reason.";
      complain(state.pending?.id === id ? `${cause} Stop takes your message back.` : cause);
      repaint();
    },
  });

  function complain(text) {
    say(page.alert, text);
    toggle(page.alert, text !== "");
  }

  function isBusy() {
    return phase(state) !== "idle" || model.get("status") !== "idle";
  }

  function submit(text) {
    if (isBusy() || text.trim() === "") return false;
    complain("");
    outcome = "";
    const id = orders.give("send", { text });
    state = asked(state, id, text);
    isFollowing = true;
    repaint();
    return true;
  }

  function submitInput() {
    if (submit(page.input.value)) {
      page.input.value = "";
      fit();
    }
    page.input.focus();
  }

  function giveBack(id) {
    const text = state.pending?.id === id ? state.pending.text : "";
    state = withdrawn(state, id);
    orders.forget(id);
    if (text) page.input.value = page.input.value ? `${text}\n${page.input.value}` : text;
    fit();
  }

  function stop() {
    if (!isBusy()) return;
    const pending = state.pending?.id ?? "";
    const run = state.live?.run ?? (pending ? 0 : model.get("run"));
    orders.give("stop", { run, command: state.live?.command || pending });
    if (pending && !page.alert.hidden) {
      complain("");
      giveBack(pending); // the kernel is silent: do not wait for it
      outcome = "Not sent.";
      repaint();
    } else takingBack = pending;
  }

  function fit() {
    page.input.style.height = "auto";
    page.input.style.height = `${page.input.scrollHeight + 2}px`;
    paintButton();
  }

  /** JupyterLab takes away what Shift+Enter does by itself. */
  function breakLine() {
    if (document.execCommand("insertText", false, "\n")) return; // the one way that keeps undo
    const { selectionStart, selectionEnd } = page.input;
    page.input.setRangeText("\n", selectionStart, selectionEnd, "end");
    fit();
  }

  function receive(message) {
    if (!isFromKernel(message)) return;
    if (message.kind === "ack") orders.acknowledged(message);
    else if (message.kind === "begin") state = begun(state, message);
    else if (message.kind === "frame") state = extended(state, message);
    else if (message.kind === "call") state = called(state, message);
    else if (message.kind === "snapshot") state = caughtUp(state, message);
    if (state.lost) resync();
    repaint();
  }

  function resync() {
    const now = performance.now();
    if (now - lastAsked < RESYNC_MS) return;
    lastAsked = now;
    try {
      model.send({ kind: "resync" });
    } catch {
      // no kernel: the saved transcript is all there is
    }
  }

  function settle() {
    const before = state.ended;
    state = settled(state, model.get("transcript"));
    if (state.ended > before && state.turns.length > 0) {
      const last = state.turns.at(-1);
      outcome = last.error ? "Failed." : mark(last) ? `${mark(last)}.` : "Done.";
    } else outcome = "";
    isNews = true;
    repaint();
  }

  function repaint() {
    scheduled ||= requestAnimationFrame(paint);
  }

  function paint() {
    scheduled = 0;
    const isRunning = state.live !== null || state.pending !== null;
    const wanted = state.turns.length + (isRunning ? 1 : 0);
    while (turns.length > wanted) turns.pop().el.remove();
    state.turns.forEach((entry, i) => {
      if (turns[i]?.shows === entry) return;
      turnAt(i).ended(entry, isNews);
      turns[i].shows = entry;
    });
    if (state.live) {
      const { run, command } = state.live;
      turnAt(wanted - 1, [run, command || run]).running(state.live, facts(state.live));
      turns[wanted - 1].shows = run;
    } else if (state.pending) {
      turnAt(wanted - 1, [state.pending.id]).waiting(state.pending.text);
      turns[wanted - 1].shows = state.pending.id;
    }
    toggle(page.empty, wanted === 0);
    toggle(page.log, wanted > 0);
    page.log.setAttribute("aria-busy", String(isRunning));
    paintControls();
    if (isFollowing) page.log.scrollTop = page.log.scrollHeight;
  }

  /** The turn in place `i`, a blank one if there is none or it shows none of `kept`. */
  function turnAt(i, kept = [turns[i]?.shows]) {
    if (turns[i] && kept.includes(turns[i].shows)) return turns[i];
    const blank = turn();
    if (turns[i]) turns[i].el.replaceWith(blank.el);
    else page.log.append(blank.el);
    turns[i] = blank;
    return blank;
  }

  function facts(live) {
    const now = performance.now();
    if (clock.run !== live.run) clock = { run: live.run, start: now, first: live.next };
    if (now - lastFacts < FACTS_MS) return "";
    lastFacts = now;
    const seconds = (now - clock.start) / 1000;
    const pacing = live.next - clock.first;
    // the speed is that of what this view saw arrive; a view that comes late has seen little of the run
    if (seconds < 0.5 || pacing < 2) return pace(live.next, 0);
    return `${pace(live.next, 0)} · ${(pacing / seconds).toFixed(1)} tok/s`;
  }

  function paintControls() {
    const at = phase(state);
    const isStopping = model.get("status") === "stopping";
    const isQueued = at === "reading" && model.get("status") === "queued";
    say(page.status, isStopping ? "Stopping…" : isQueued ? "Waiting for the model…" : (PHRASES[at] ?? outcome));
    say(page.title, model.get("title"));
    toggle(page.fresh, state.turns.length > 0 || at !== "idle");
    el.dataset.phase = at;
    el.dataset.status = model.get("status");
    paintButton();
  }

  function paintButton() {
    const isStop = isBusy();
    say(page.button, isStop ? "Stop" : "Send");
    page.button.classList.toggle("is-stop", isStop);
    const isIdle = !isStop && page.input.value.trim() === "";
    if (isIdle && page.root.getRootNode().activeElement === page.button) page.input.focus();
    page.button.disabled = isIdle;
  }

  function onThinking() {
    page.thinking.checked = model.get("thinking");
  }

  listen(page.button, "click", (event) => {
    if (!isBusy()) submitInput();
    else if (event.detail < 2) stop(); // the second click of a double click on Send is no Stop
  });
  listen(page.input, "input", fit);
  listen(page.input, "keydown", (event) => {
    if (event.key !== "Enter" || event.isComposing) return;
    event.preventDefault();
    if (event.shiftKey) breakLine();
    else submitInput();
  });
  listen(page.root, "keydown", (event) => {
    if (event.key !== "Escape" || !isBusy()) return;
    event.preventDefault();
    event.stopPropagation();
    stop();
  });
  page.suggestions.forEach((suggestion) => {
    listen(suggestion, "click", () => {
      submit(suggestion.textContent);
      page.input.focus();
    });
  });
  listen(page.fresh, "click", () => {
    complain("");
    orders.give("reset", {});
    page.input.focus();
  });
  listen(page.thinking, "change", () => orders.give("set_thinking", { value: page.thinking.checked }));
  listen(page.log, "scroll", () => {
    isFollowing = page.log.scrollHeight - page.log.scrollTop - page.log.clientHeight < NEAR_END_PX;
  });

  const heard = [
    ["msg:custom", receive],
    ["change:transcript", settle],
    ["change:status", repaint],
    ["change:title", repaint],
    ["change:thinking", onThinking],
  ];
  for (const [name, handler] of heard) model.on(name, handler);

  el.classList.add("dsv4", "dsv4-chat");
  el.replaceChildren(page.root);
  onThinking();
  paint();
  resync();

  return () => {
    bound.abort();
    orders.end();
    cancelAnimationFrame(scheduled);
    for (const [name, handler] of heard) model.off(name, handler);
  };
}

export default { render };
