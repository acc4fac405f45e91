// The link to the coordinator: one event stream, and parts of the page renewed when it says that something changed.
// Owns no content: every part comes from the server as it would on a reload.

const link = document.getElementById("link");
const MIN_GAP_MS = 1000;

function say(state, text) {
  link.dataset.state = state;
  link.textContent = text;
}

// Calls `act` at most once a second, and once more if it was wanted meanwhile.
function paced(act) {
  let running = false, wanted = false;
  return async function again() {
    wanted = true;
    if (running) return;
    running = true;
    while (wanted) {
      wanted = false;
      try { await act(); } catch { /* the stream says whether the coordinator is gone */ }
      await new Promise((resolve) => setTimeout(resolve, MIN_GAP_MS));
    }
    running = false;
  };
}

// Replaces the parts marked data-live by what the server shows now; a part that has the focus inside keeps it.
async function renewParts() {
  const answer = await fetch(location.href, { headers: { Accept: "text/html" } });
  if (!answer.ok) return;
  const fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
  for (const part of document.querySelectorAll("[data-live]")) {
    const renewed = fresh.querySelector(`[data-live="${part.dataset.live}"]`);
    if (!renewed || renewed.innerHTML === part.innerHTML) continue;
    const focused = part.contains(document.activeElement) ? document.activeElement.getAttribute("href") : null;
    part.replaceChildren(...document.adoptNode(renewed).childNodes);
    if (focused) part.querySelector(`a[href="${CSS.escape(focused)}"]`)?.focus();
  }
}

// Follows the coordinator. `draw` is called with every change, besides the parts; `run` limits it to one run's changes.
export function follow(run, draw) {
  const renew = paced(renewParts);
  const redraw = draw ? paced(draw) : () => {};
  say("waiting", "connecting");
  const stream = new EventSource("/api/v1/events");
  stream.addEventListener("open", () => say("live", "live"));
  stream.addEventListener("error", () => say("lost", "coordinator does not answer"));
  stream.addEventListener("change", (event) => {
    const { runs } = JSON.parse(event.data);
    if (run && !runs.includes(run)) return;
    renew();
    redraw();
  });
  addEventListener("pagehide", () => stream.close());
}
