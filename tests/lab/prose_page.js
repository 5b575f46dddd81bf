// A chat's page without Jupyter: `show()` renders it, `say` and `put` are its kernel, `sent` is what it asked.
async ([script, style, maths]) => {
  document.body.innerHTML = "";
  document.head.append(Object.assign(document.createElement("style"), { textContent: style }));
  const { default: chat } = await import(URL.createObjectURL(new Blob([script], { type: "text/javascript" })));
  const traits = {
    title: "toy", status: "idle", run: 0, thinking: false, examples: ["Hello?"], transcript: { ended: 0, turns: [] },
  };
  const heard = new Map();
  const of = (name) => heard.get(name) ?? heard.set(name, new Set()).get(name);
  const model = {
    get: (name) => traits[name],
    set: (name, value) => { traits[name] = value; },
    save_changes: () => {},
    on: (name, handler) => of(name).add(handler),
    off: (name, handler) => of(name).delete(handler),
    send: (message) => {
      sent.push(message);
      if (message.kind === "maths" && maths) setTimeout(() => say({ kind: "maths", script: maths }));
    },
  };
  const sent = (window.sent = []);
  const blank = { reasoning: "", cards: [], is_calling: false, n_tokens: 1, n_reasoning: 0, reasoning_s: null };
  const known = { ...blank, stop_reason: "stop", seconds: 0, footer: "1 token", error: "", runs: [], siblings: [] };
  window.say = (message) => of("msg:custom").forEach((handler) => handler(message, []));
  window.put = (name, value) => { traits[name] = value; of(`change:${name}`).forEach((handler) => handler()); };
  window.turn_ = (fields, i) => ({ ...known, user: "q", number: i + 1, siblings: [i + 1], ...fields });
  window.turns_ = (ended, turns) => put("transcript", { ended, turns: turns.map(turn_) });
  window.show = () => {
    const el = document.body.appendChild(document.createElement("div"));
    chat.render({ model, el }); // what ends it is not returned: it would be called
  };
  window.begin_ = (run) => say({ kind: "begin", run, user: "q", command: "" });
  window.frame_ = (run, start, texts, letter = "c") =>
    say({ kind: "frame", run, start, tokens: texts.map((text) => [letter, text]) });
  window.painted = () => new Promise((go) => requestAnimationFrame(() => requestAnimationFrame(go)));
  window.answer = () => [...document.querySelectorAll(".dsv4-answer")].at(-1);
};
