// Parts of a page that its stream of events replaces. Our server renders them, and escapes what users write.
export const element = (name, className = "", textContent = "") => Object.assign(document.createElement(name), { className, textContent });
const same = (one, other) => ["tagName", "href", "ariaLabel", "value"].every((name) => one[name] === other[name]);

// Replaces a part, but not while somebody types in it. What is open, scrolled and focused stays so.
export function part({ id, html }) {
  const place = document.getElementById(id), active = document.activeElement;
  const inside = place.contains(active) && active !== place;
  if (inside && active.matches("input:not([type=checkbox]), select, textarea")) return;
  const all = (what) => [...place.querySelectorAll(what)];
  const alike = () => all(active.tagName).filter((one) => same(one, active));
  const index = inside ? alike().indexOf(active) : -1;
  const open = all("details").map((one) => one.open);
  const scrolled = all(".scroll").map((one) => [one.scrollLeft, one.scrollTop]);
  place.innerHTML = html;
  all("details").forEach((one, i) => { if (open[i] != null) one.open = open[i]; });
  all(".scroll").forEach((one, i) => { if (scrolled[i]) [one.scrollLeft, one.scrollTop] = scrolled[i]; });
  if (index >= 0) (alike()[index] ?? alike()[0])?.focus({ preventScroll: true });
}

// Opens a stream of events while the page is seen. A browser opens one again that was cut, but none that was refused:
// then we ask why, and try again after a growing pause.
export function follow(address, listeners) {
  let source = null, pause = 1000, timer = 0;
  const said = document.getElementById("live");
  const say = (text) => { if (said && said.textContent !== text) said.textContent = text; };
  const open = () => {
    clearTimeout(timer);
    source?.close();
    source = null;
    if (document.hidden) return;          // a browser opens few connections to one server
    const mine = source = new EventSource(address());
    mine.addEventListener("open", () => { pause = 1000; say("live"); });
    mine.addEventListener("error", async () => {
      say("not connected; trying again");
      if (mine.readyState !== EventSource.CLOSED) return;
      const status = await fetch(address()).then((one) => { one.body?.cancel(); return one.status; }, () => 0);
      if (mine !== source) return;
      if (status === 401) location.reload();          // which leads to the login, and back here
      else if (status === 404) say("deleted");
      else {
        if (status === 429) say("too many pages are open; trying again");
        timer = setTimeout(open, pause * (0.5 + Math.random()));
        pause = Math.min(2 * pause, 30_000);
      }
    });
    for (const [name, listener] of Object.entries({ part, ...listeners })) mine.addEventListener(name, (event) => listener(JSON.parse(event.data)));
  };
  document.addEventListener("visibilitychange", open);
  open();
  return open;
}

const whole = document.querySelector("[data-events]:not([data-curves])");
if (whole) follow(() => whole.dataset.events, {});
