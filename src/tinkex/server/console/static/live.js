// A part of a page that its stream of events replaces, and what says whether it is live.
// The parts are rendered by our server, which escapes what users write.
export function part({ id, html }) {
  const place = document.getElementById(id);
  const active = document.activeElement;
  if (place.contains(active) && active !== place && !active.matches("[role=region]")) return;   // somebody types there
  const open = [...place.querySelectorAll("details")].map((one) => one.open);
  const scrolled = [...place.querySelectorAll(".scroll")].map((one) => [one.scrollLeft, one.scrollTop]);
  place.innerHTML = html;
  place.querySelectorAll("details").forEach((one, i) => { if (open[i] != null) one.open = open[i]; });
  place.querySelectorAll(".scroll").forEach((one, i) => { if (scrolled[i]) [one.scrollLeft, one.scrollTop] = scrolled[i]; });
}

export function follow(address, listeners) {
  let source = null;
  const said = document.getElementById("live");
  const say = (text) => { if (said) said.textContent = text; };
  const open = () => {
    source?.close();
    source = null;
    if (document.hidden) return;          // a browser opens few connections to one server
    source = new EventSource(address());
    source.addEventListener("open", () => say("live"));
    source.addEventListener("error", () => say("not connected; trying again"));
    for (const [name, listener] of Object.entries({ part, ...listeners })) source.addEventListener(name, (event) => listener(JSON.parse(event.data)));
  };
  document.addEventListener("visibilitychange", open);
  open();
  return open;
}

const whole = document.querySelector("[data-events]:not([data-curves])");
if (whole) follow(() => whole.dataset.events, {});
