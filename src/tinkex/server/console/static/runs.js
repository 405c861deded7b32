// The list of runs, read again every few seconds.
import { part } from "./live.js";

const place = document.getElementById("runs");
// What is checked stays so; a browser that goes back has checked some.
const chosen = new Set([...place.querySelectorAll("[name=run]:checked")].map((box) => box.value));
const copying = () => { const s = getSelection(); return !s.isCollapsed && place.contains(s.anchorNode); };
let shown = "";

function selected() {
  const boxes = [...place.querySelectorAll("[name=run]")], button = place.querySelector(".bar button");
  for (const box of boxes) box.checked = chosen.has(box.value);
  if (button) button.disabled = !boxes.some((box) => box.checked);
}

async function again() {
  const address = location.href, began = performance.now();
  try {
    if (!document.hidden) {
      const response = await fetch(address, { headers: { accept: "text/html", "hx-request": "true", "hx-target": "runs" } });
      if (response.status === 204) return location.reload();   // logged out
      const html = await response.text();
      if (response.ok && html !== shown && address === location.href && !document.querySelector(".htmx-request") && !copying()) {
        part({ id: "runs", html });
        selected();
        shown = html;
      }
    }
  } catch { /* the server is away */ }
  setTimeout(again, Math.max(3000, 100 * (performance.now() - began)));
}

place.addEventListener("change", ({ target }) => { chosen[target.checked ? "add" : "delete"](target.value); selected(); });
document.addEventListener("htmx:afterSwap", selected);
selected();
setTimeout(again, 3000);
