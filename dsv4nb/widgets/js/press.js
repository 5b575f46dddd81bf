// Buttons that move while they are pressed.

/**
 * Call `act` when a button is pressed. A text that grows above it can move it away between press and release, and then
 * a browser gives no click: the release counts where the button was, too. Released elsewhere, a press is taken back.
 *
 * @param {(event: { detail: number }) => void} act gets the number of clicks in a row
 */
export function onPress(node, listen, act) {
  let pressedAt = null;
  listen(node, "pointerdown", (event) => {
    pressedAt = event.button === 0 ? node.getBoundingClientRect() : null;
  });
  listen(node.ownerDocument, "pointercancel", () => (pressedAt = null));
  listen(node.ownerDocument, "pointerup", (event) => {
    const hasMoved = pressedAt && holds(pressedAt, event) && !holds(node.getBoundingClientRect(), event);
    pressedAt = null;
    if (hasMoved && !node.disabled) act({ detail: 1 });
  });
  listen(node, "click", act);
}

function holds({ left, right, top, bottom }, { clientX: x, clientY: y }) {
  return left <= x && x <= right && top <= y && y <= bottom;
}
