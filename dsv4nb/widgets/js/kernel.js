// Whether there still is a kernel to talk to.

const GONE = ["restarting", "autorestarting", "dead", "terminating"];

/**
 * Call `cut` when the kernel that this model lives in is restarted or gone; hosts differ in what they tell.
 * @returns {() => void} ends this
 */
export function whenCut(model, cut) {
  const onStatus = (_, status) => {
    if (GONE.includes(status)) cut();
  };
  model.on("comm_live_update", cut);
  model.on("comm:close", cut);
  const signal = model.widget_manager?.kernel?.statusChanged; // JupyterLab's
  signal?.connect(onStatus);
  return () => {
    model.off("comm_live_update", cut);
    model.off("comm:close", cut);
    signal?.disconnect(onStatus);
  };
}
