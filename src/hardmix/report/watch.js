"use strict";
// Asks whether the run's files have changed, and if so puts the new page in place of the old one.
// What the reader chose (a curve, open parts, the place on the page) stays.
(() => {
  const EVERY = 2000;
  let version = null, lost = false;
  const all = (selector) => [...document.querySelectorAll(selector)];
  const key = (details) => details.querySelector("summary")?.textContent.trim();

  function age() {
    const place = document.getElementById("age");
    if (!place) return;
    const seconds = Math.max(0, Math.round(Date.now() / 1000 - Number(place.dataset.time)));
    const words = seconds < 90 ? `${seconds} s` : seconds < 5400 ? `${Math.round(seconds / 60)} min` : `${Math.round(seconds / 3600)} h`;
    place.textContent = lost ? "hardmix watch has stopped: this page is no longer updated." : Number(place.dataset.time) ? `last log line ${words} ago` : "";
  }
  async function refresh() {
    const text = await (await fetch("./", { cache: "no-store" })).text();
    const next = new DOMParser().parseFromString(text, "text/html");
    const metric = document.querySelector("input[name=metric]:checked")?.value;
    const open = new Map(all("details").map((each) => [key(each), each.open]));
    const hidden = all(".legend button[aria-pressed=false]").map((each) => each.dataset.run);
    const place = scrollY;
    document.title = next.title;
    document.body.replaceChildren(...next.body.childNodes);
    const script = all("body > script:not([type])").pop(), again = document.createElement("script");
    again.textContent = script.textContent;
    script.replaceWith(again);
    document.querySelector(`input[name=metric][value="${CSS.escape(metric ?? "")}"]`)?.click();
    all("details").forEach((each) => { if (open.has(key(each))) each.open = open.get(key(each)); });
    all(".legend button").forEach((each) => { if (each.dataset.run !== undefined && hidden.includes(each.dataset.run)) each.click(); });
    scrollTo({ top: place, behavior: "instant" });
  }
  async function ask() {
    try {
      const told = await (await fetch("./version", { cache: "no-store" })).text();
      lost = false;
      const busy = document.querySelector(".plot:hover, .plot:focus, .plane:hover, .plane:focus");
      if (version !== null && told !== version && !busy) { await refresh(); version = told; }
      version ??= told;
    } catch { lost = true; }
    age();
    setTimeout(ask, EVERY);
  }
  addEventListener("DOMContentLoaded", () => { age(); ask(); });
})();
