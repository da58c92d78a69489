"use strict";
// Images by the thousand: only rows in sight are in the page, and a sprite is decoded when one of
// its pictures is. Text from the files enters as text nodes only.
(() => {
  const root = document.documentElement;
  root.classList.add("script");
  const find = (id) => document.getElementById(id);
  const facts = JSON.parse(find("facts").textContent);
  const { names, classes, clusters, tile, across, tabs } = facts;
  const number = names.length;

  // -- what the page holds, decoded when it is asked for ------------------------------------------
  const bytes = (id) => {
    const text = atob(find(id).textContent.trim()), found = new Uint8Array(text.length);
    for (let n = 0; n < text.length; n++) found[n] = text.charCodeAt(n);
    return found;
  };
  const once = (make) => { let made; return () => (made ??= make()); };
  const near = once(() => new Uint32Array(bytes("neighbours").buffer));
  const nearness = once(() => new Int8Array(bytes("similarities").buffer));
  const vectors = once(() => new Int8Array(bytes("vectors").buffer));
  const group = once(() => new Int16Array(bytes("clusters").buffer));
  const sizes = once(() => new Uint32Array(bytes("sizes").buffer));
  const label = once(() => new Int16Array(bytes("labels").buffer));
  const sprites = new Map();
  function sprite(at) {
    if (!sprites.has(at)) {
      const image = new Image();
      image.src = URL.createObjectURL(new Blob([bytes(`sprite-${at}`)], { type: "image/webp" }));
      sprites.set(at, image.decode().then(() => image));
    }
    return sprites.get(at);
  }
  async function paint(canvas, index) {
    const place = index % (across * across);
    const image = await sprite(Math.floor(index / (across * across)));
    const pen = canvas.getContext("2d");
    pen.imageSmoothingQuality = "high";
    pen.drawImage(image, (place % across) * tile, Math.floor(place / across) * tile, tile, tile, 0, 0, canvas.width, canvas.height);
    canvas.dataset.painted = index;
  }

  function make(tag, attributes = {}, ...children) {
    const element = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    element.append(...children);
    return element;
  }
  const count = (value) => value.toLocaleString("en");
  const similarity = (value) => value.toFixed(2).replace("-", "\u2212");
  const nameOf = (index) => (index < number ? names[index] : facts.queries[index - number].name);
  const shortName = (index) => nameOf(index).split("/").pop();
  const className = (index) => (label()[index] < 0 ? "" : classes[label()[index]]);
  const clusterName = (cluster) => clusters[cluster].name || `Cluster ${cluster + 1}`;
  const weight = (value) => (value >= 1e6 ? `${(value / 1e6).toFixed(1)} MB` : `${Math.max(1, Math.round(value / 1e3))} kB`);
  const sizeOf = (index) => {
    const [width, height, size] = sizes().subarray(3 * index, 3 * index + 3);
    return `${width} \u00d7 ${height}${size ? `, ${weight(size)}` : ""}`;
  };
  const all = once(() => Uint32Array.from({ length: number }, (_, index) => index));

  // -- views: a list of sections, each with a head and pictures -----------------------------------
  const inCluster = (cluster) => all().filter((index) => group()[index] === cluster);
  const VIEWS = {
    images: () => ({ title: "All images", note: "Ordered by cluster, the most typical first. Choose an image to see the most similar ones.", sections: [{ items: all() }] }),
    duplicates: () => ({
      title: "Near-duplicates", note: facts.notes.duplicates, actions: true,
      sections: certain().map(({ keep, others, similar }) => ({
        title: `${others.length + 1} nearly the same`, note: `keep ${nameOf(keep)}`, items: [keep, ...others], lines: 2, ticks: true,
        badge: (place) => (place ? "" : "keep"), caption: (index, place) => (place ? `${similarity(similar[place - 1])} ${shortName(index)}` : shortName(index)),
        second: sizeOf,
      })),
    }),
    leaks: () => ({
      title: "Leaks", note: facts.notes.leaks,
      sections: facts.leaks.map(([row, group, other, otherGroup, value]) => ({
        title: `${group} and ${otherGroup}`, note: `agreement ${similarity(value)}`, items: [row, other], lines: 2,
        caption: (_, place) => (place ? otherGroup : group), second: shortName,
      })),
    }),
    quality: () => ({
      title: "Quality", note: facts.notes.quality,
      sections: facts.flaws.map((flaw) => ({ title: flaw.title, note: `${count(flaw.rows.length)} image${flaw.rows.length === 1 ? "" : "s"}; ${flaw.note}`, items: flaw.rows, lines: 2, caption: (_, place) => flaw.values[place], second: shortName })),
    }),
    clusters: () => ({
      title: "Clusters", note: facts.notes.clusters,
      sections: clusters.map((each, cluster) => ({
        title: clusterName(cluster), note: `${count(each.size)} images`, items: all().subarray(each.first, each.first + each.size), rows: 2,
        whole: () => go("cluster", cluster),
      })),
    }),
    cluster: (cluster) => ({ title: clusterName(cluster), note: `${count(clusters[cluster].size)} images, the most typical first.`, sections: [{ items: inCluster(cluster) }] }),
    unusual: () => ({ title: "Unusual images", note: facts.notes.unusual, sections: [{ items: facts.unusual.rows, caption: (index, place) => `${facts.unusual.scores[place].toFixed(2)} ${shortName(index)}` }] }),
    labels: () => ({
      title: "Labels to check", note: facts.notes.labels,
      sections: [{ items: facts.suspects.map((each) => each[0]), lines: 2,
        caption: (_, place) => classes[facts.suspects[place][1]],
        second: (_, place) => `${Math.round(100 * facts.suspects[place][3])} % ${classes[facts.suspects[place][2]]}` }],
    }),
    queries: () => ({
      title: "Your pictures", note: "Images given with --query, and the most similar ones according to the encoder.",
      sections: facts.queries.map((each, at) => ({ title: each.name, items: [number + at, ...each.near], badge: (place) => (place ? "" : "query"), caption: (index, place) => (place ? `${similarity(each.similar[place - 1])} ${shortName(index)}` : each.name) })),
    }),
    named: () => {
      const words = wanted.toLowerCase().split(/\s+/).filter(Boolean);
      const items = all().filter((index) => { const text = `${names[index]} ${className(index)}`.toLowerCase(); return words.every((word) => text.includes(word)); });
      return { title: `Named \u201c${wanted}\u201d`, note: items.length ? `${count(items.length)} images.` : "No image has such a name.", sections: [{ items, caption: shortName }] };
    },
    alike: () => alike,
  };
  // -- near-duplicates: how certain, which are ticked, and what is saved ---------------------------
  let least = facts.least;
  const unticked = new Set();
  const certain = () => facts.duplicates.map(({ keep, others, similar }) => ({ keep, others: others.filter((_, at) => similar[at] >= least), similar: similar.filter((value) => value >= least) })).filter((group) => group.others.length);
  const ticked = () => certain().flatMap((group) => group.others).filter((index) => !unticked.has(index));
  function save(name, text) {
    const link = make("a", { href: URL.createObjectURL(new Blob([text], { type: "text/plain" })), download: name });
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  }
  function countTicked() {
    const chosen = ticked(), odd = chosen.filter((index) => facts.unlinked.includes(index)).length;
    find("ticked").textContent = `${count(chosen.length)} ticked${odd ? `; ${odd} have names that a script cannot hold` : ""}`;
    find("save-list").disabled = find("save-script").disabled = !chosen.length;
  }
  const movable = () => ticked().filter((index) => !facts.unlinked.includes(index)).map((index) => names[index]);
  find("save-list").addEventListener("click", () => save("duplicates.txt", ticked().map((index) => `${names[index]}\n`).join("")));
  find("save-script").addEventListener("click", () => save("move-duplicates.py", facts.mover.replace("__ROOT__", () => JSON.stringify(facts.root)).replace("__FILES__", () => JSON.stringify(movable(), null, 4))));
  find("save-script").hidden = !facts.mover;
  find("least").min = find("least").value = facts.least;
  find("least").addEventListener("input", (event) => {
    least = Number(event.target.value);
    find("certainty").textContent = similarity(least);
    go("duplicates", undefined, true);
  });
  find("certainty").textContent = similarity(least);

  let wanted = "", alike = { title: "", note: "", sections: [] };

  // -- the list: rows with known heights, of which those in sight are made ------------------------
  const list = find("list");
  let view = { name: "", sections: [] }, rows = [], starts = [], shown = new Map(), columns = 1, side = 96, focus = null;
  function layOut() {
    const held = list.contains(document.activeElement);
    const before = focus && list.querySelector(`[data-place="${focus}"]`)?.getBoundingClientRect().top;
    const width = list.clientWidth, gap = 8;
    const most = width < 500 ? 104 : Math.max(104, Math.min(tile, 128));
    columns = Math.max(1, Math.floor((width + gap) / (most + gap)));
    side = Math.floor((width + gap) / columns) - gap;
    if (side > 1.5 * most) side = most;
    rows = [];
    starts = [];
    let top = 0;
    const add = (row, height) => { rows.push({ ...row, top, height }); top += height; };
    view.sections.forEach((section, at) => {
      if (section.title) add({ section }, 64);
      const end = section.rows ? Math.min(section.items.length, section.rows * columns) : section.items.length;
      starts.push(rows.length);
      const height = side + gap + (section.caption ? (section.lines ?? 1) * 17 + 8 : 0);
      for (let first = 0; first < end; first += columns) add({ section, at, first, end: Math.min(end, first + columns) }, height);
      if (section.title) top += 16;
    });
    list.style.height = `${top}px`;
    shown.forEach((element) => element.remove());
    shown = new Map();
    if (before) {  // what was looked at stays where it was, also in other columns
      const [section, place] = focus.split("/").map(Number);
      const row = rows[starts[section] + Math.floor(place / columns)];
      scrollBy({ top: list.getBoundingClientRect().top + row.top - before, behavior: "instant" });
    }
    draw();
    if (held) list.querySelector(`[data-place="${focus}"]`)?.focus({ preventScroll: true });
  }
  function rowAt(y) {
    let low = 0, high = rows.length - 1;
    while (low < high) { const middle = (low + high + 1) >> 1; if (rows[middle].top <= y) low = middle; else high = middle - 1; }
    return low;
  }
  function draw() {
    if (!rows.length) return;
    const above = -list.getBoundingClientRect().top;
    const first = rowAt(above - 400), last = rowAt(above + innerHeight + 400);
    for (const [at, element] of shown) if (at < first || at > last) { element.remove(); shown.delete(at); }
    for (let at = first; at <= last; at++) {
      if (shown.has(at)) continue;
      const element = rows[at].first === undefined ? head(rows[at]) : pictures(rows[at], at);
      element.style.top = `${rows[at].top}px`;
      element.style.height = `${rows[at].height}px`;
      const after = [...shown.keys()].filter((each) => each > at).sort((a, b) => a - b)[0];
      list.insertBefore(element, after === undefined ? null : shown.get(after));
      shown.set(at, element);
    }
    if (!list.querySelector('.tile[tabindex="0"]')) list.querySelector(".tile")?.setAttribute("tabindex", "0");
  }
  function head({ section }) {
    const row = make("div", { class: "row head" }, make("h3", { title: section.title }, section.title), make("p", { title: section.note ?? "" }, section.note ?? ""));
    if (section.whole) {
      const button = make("button", { class: "whole", type: "button" }, "Show all");
      button.setAttribute("aria-label", `All images of ${section.title}`);
      button.addEventListener("click", section.whole);
      row.append(button);
    }
    return row;
  }
  function picture(index, size, texts, badge) {
    const scale = Math.min(2, devicePixelRatio || 1), canvas = make("canvas", { width: Math.round(size * scale), height: Math.round(size * scale), "aria-hidden": "true" });
    const words = [nameOf(index), index < number ? className(index) : "", ...texts].filter(Boolean);
    const button = make("button", { class: "tile", type: "button", "data-index": index, "aria-pressed": String(index === chosen), title: nameOf(index), "aria-label": words.join(", ") }, canvas);
    texts.forEach((text, line) => button.append(make("span", line || texts.length === 1 ? {} : { class: "strong" }, text)));
    if (badge) button.append(make("b", {}, badge));
    paint(canvas, index);
    return button;
  }
  function pictures({ section, at, first, end }, row) {
    const element = make("div", { class: "row" });
    for (let place = first; place < end; place++) {
      const index = section.items[place];
      const texts = [section.caption?.(index, place), section.second?.(index, place)].filter((text) => text !== undefined);
      const button = picture(index, side, texts, section.badge?.(place));
      button.dataset.place = `${at}/${place}`;
      button.dataset.row = row;
      button.tabIndex = focus === button.dataset.place ? 0 : -1;
      button.firstChild.style.width = button.firstChild.style.height = button.style.width = `${side}px`;
      element.append(section.ticks && place ? withTick(button, index) : button);
    }
    return element;
  }
  function withTick(button, index) {
    const tick = make("input", { type: "checkbox", "aria-label": `Move ${nameOf(index)}` });
    tick.checked = !unticked.has(index);
    tick.addEventListener("change", () => { if (tick.checked) unticked.delete(index); else unticked.add(index); countTicked(); });
    return make("div", { class: "ticked" }, button, tick);
  }
  function focusOn(section, place) {
    const row = starts[section] + Math.floor(place / columns);
    const box = list.getBoundingClientRect(), top = box.top + rows[row].top, bar = document.querySelector(".bar").offsetHeight + 8;
    if (top < bar) scrollBy({ top: top - bar, behavior: "instant" });
    else if (top + rows[row].height > innerHeight) scrollBy({ top: top + rows[row].height - innerHeight + 8, behavior: "instant" });
    draw();
    list.querySelectorAll('.tile[tabindex="0"]').forEach((each) => { each.tabIndex = -1; });
    focus = `${section}/${place}`;
    const target = list.querySelector(`[data-place="${focus}"]`);
    if (target) { target.tabIndex = 0; target.focus({ preventScroll: true }); }
  }
  const lengthOf = (section) => (section.rows ? Math.min(section.items.length, section.rows * columns) : section.items.length);
  list.addEventListener("keydown", (event) => {
    const from = event.target.closest?.(".tile")?.dataset.place;
    const moves = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -columns, ArrowDown: columns, PageUp: -4 * columns, PageDown: 4 * columns, Home: -Infinity, End: Infinity };
    if (!from || !(event.key in moves)) return;
    event.preventDefault();
    let [section, place] = from.split("/").map(Number);
    const next = place + moves[event.key], length = lengthOf(view.sections[section]);
    if (Number.isFinite(next) && next < 0 && section > 0) { section -= 1; place = lengthOf(view.sections[section]) - 1; }
    else if (Number.isFinite(next) && next >= length && section + 1 < view.sections.length && lengthOf(view.sections[section + 1])) { section += 1; place = 0; }
    else place = Math.max(0, Math.min(length - 1, next));
    focusOn(section, place);
  });
  list.addEventListener("click", (event) => {
    const button = event.target.closest(".tile");
    if (!button) return;
    list.querySelectorAll('.tile[tabindex="0"]').forEach((each) => { each.tabIndex = -1; });
    button.tabIndex = 0;
    focus = button.dataset.place;
    choose(Number(button.dataset.index));
  });

  // -- the chosen image ---------------------------------------------------------------------------
  const detail = find("detail");
  let chosen = null;
  function choose(index, again = false) {
    if (index !== null && index >= number) return;
    chosen = index;
    document.body.classList.toggle("chosen", index !== null);
    detail.hidden = index === null;
    document.querySelectorAll("#list .tile").forEach((each) => each.setAttribute("aria-pressed", String(Number(each.dataset.index) === index)));
    if (index === null) return;
    const close = make("button", { class: "close", type: "button", "aria-label": "Close" }, "\u00d7");
    close.addEventListener("click", () => shut());
    const canvas = make("canvas", { width: Math.max(256, 2 * tile), height: Math.max(256, 2 * tile), role: "img", "aria-label": names[index] });
    const title = make("h2", { tabindex: "-1" }, ...(facts.link && !facts.unlinked.includes(index) ? [make("a", { href: facts.link + names[index].split("/").map(encodeURIComponent).join("/") }, names[index])] : [names[index]]));
    const about = make("dl");
    const fact = (name, ...value) => about.append(make("dt", {}, name), make("dd", {}, ...value));
    fact("Size", sizeOf(index));
    if (className(index)) fact("Class", className(index));
    if (clusters.length) {
      const button = make("button", { type: "button" }, clusterName(group()[index]));
      button.addEventListener("click", () => go("cluster", group()[index]));
      fact("Cluster", button);
    }
    const copies = facts.duplicates.find(({ keep, others }) => keep === index || others.includes(index));
    if (copies) fact("Copies", copies.keep === index ? `${copies.others.length}; keep this one` : `keep ${names[copies.keep]}`);
    const grid = make("div", { class: "near" }), more = make("button", { class: "more", type: "button" }, "Show 48 more");
    const k = facts.near;
    for (let n = 0; n < k; n++) grid.append(picture(near()[index * k + n], 84, [similarity(nearness()[index * k + n] / 127)]));
    more.addEventListener("click", () => { more.remove(); for (const [other, value] of search(index, k + 48).slice(k)) grid.append(picture(other, 84, [similarity(value)])); });
    detail.replaceChildren(close, canvas, title, about, make("h3", {}, "Most similar"), grid, ...(number - 1 > k && vectors().length ? [more] : []));
    detail.scrollTop = 0;
    paint(canvas, index);
    if (!again) title.focus({ preventScroll: true });
  }
  function shut() {
    choose(null);
    list.querySelector(`[data-place="${focus}"]`)?.focus({ preventScroll: true });
  }
  detail.addEventListener("click", (event) => { const button = event.target.closest(".tile"); if (button) choose(Number(button.dataset.index)); });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && chosen !== null) shut();
    if (event.key === "/" && event.target.tagName !== "INPUT") { event.preventDefault(); find("words").focus(); }
  });
  // The exact neighbours stand in the page; those after them are found by shortened vectors.
  function search(index, most) {
    const width = facts.width, found = [], own = vectors().subarray(index * width, (index + 1) * width);
    const exact = new Set(near().subarray(index * facts.near, (index + 1) * facts.near));
    for (let other = 0, place = 0; other < number; other++) {
      let sum = 0;
      for (let n = 0; n < width; n++) sum += own[n] * vectors()[place++];
      if (other !== index && !exact.has(other)) found.push([other, sum * facts.scale]);
    }
    found.sort((a, b) => b[1] - a[1]);
    return [...exact].map((other) => [other, 1]).concat(found.slice(0, most - exact.size));
  }

  // -- a picture from elsewhere: the page cannot run the encoder, so colours and layout must do ----
  const GRID = 8, VALUES = GRID * GRID * 3, SAME = 7;
  const describe = once(async () => {
    const found = new Uint8Array(number * VALUES), per = across * across, pen = make("canvas", { width: across * GRID, height: across * GRID }).getContext("2d", { willReadFrequently: true });
    pen.imageSmoothingQuality = "high";
    for (let at = 0; at * per < number; at++) {
      pen.drawImage(await sprite(at), 0, 0, across * tile, across * tile, 0, 0, across * GRID, across * GRID);
      const { data } = pen.getImageData(0, 0, across * GRID, across * GRID);
      for (let place = 0; place < Math.min(per, number - at * per); place++) copy(data, across * GRID, (place % across) * GRID, Math.floor(place / across) * GRID, found, (at * per + place) * VALUES);
    }
    return found;
  });
  function copy(data, width, left, top, target, to) {
    for (let y = 0; y < GRID; y++) for (let x = 0; x < GRID; x++) for (let c = 0; c < 3; c++) target[to++] = data[((top + y) * width + left + x) * 4 + c];
  }
  async function lookFor(file) {
    tell(`Looking for ${file.name} \u2026`);
    let image;
    try { image = await createImageBitmap(file); } catch { tell(`${file.name} is not an image that this browser can read.`); return; }
    const size = Math.min(image.width, image.height), whole = make("canvas", { width: tile, height: tile }).getContext("2d");
    whole.imageSmoothingQuality = "high";
    whole.drawImage(image, (image.width - size) / 2, (image.height - size) / 2, size, size, 0, 0, tile, tile);
    const pen = make("canvas", { width: GRID, height: GRID }).getContext("2d"), asked = new Uint8Array(VALUES);
    pen.imageSmoothingQuality = "high";
    pen.drawImage(whole.canvas, 0, 0, GRID, GRID);
    copy(pen.getImageData(0, 0, GRID, GRID).data, GRID, 0, 0, asked, 0);
    const known = await describe(), far = new Float32Array(number);
    for (let index = 0, place = 0; index < number; index++) {
      let sum = 0;
      for (let n = 0; n < VALUES; n++) sum += Math.abs(known[place++] - asked[n]);
      far[index] = sum / VALUES;
    }
    const order = all().slice().sort((a, b) => far[a] - far[b]).slice(0, 60);
    const namesake = order.find((index) => shortName(index) === file.name && far[index] <= 3 * SAME);
    const same = namesake ?? (far[order[0]] <= SAME ? order[0] : undefined);
    const note = same !== undefined ? `${file.name} is in this set: ${names[same]}. Its neighbours come from the encoder; below are images of similar colours and layout.`
      : `${file.name} is not in this set. A page cannot run the encoder: these images have similar colours and layout. ${facts.exactness} Choose one to see its neighbours, or use the encoder: ${facts.command} ${file.name}`;
    alike = { title: `Similar to ${file.name}`, note, sections: [{ items: order, caption: shortName }] };
    go("alike");
    if (same !== undefined) choose(same, true);
    tell(note);
  }
  const tell = (text) => { find("status").textContent = text; find("note").textContent = text; };
  const files = (event) => [...(event.dataTransfer?.types ?? [])].includes("Files");
  addEventListener("dragover", (event) => { if (files(event)) { event.preventDefault(); find("drop").hidden = false; } });
  addEventListener("dragleave", (event) => { if (!event.relatedTarget) find("drop").hidden = true; });
  addEventListener("drop", (event) => { find("drop").hidden = true; if (!files(event)) return; event.preventDefault(); if (event.dataTransfer.files[0]) lookFor(event.dataTransfer.files[0]); });
  find("file").addEventListener("change", (event) => { if (event.target.files[0]) lookFor(event.target.files[0]); event.target.value = ""; });

  // -- which view ---------------------------------------------------------------------------------
  const buttons = new Map(tabs.map(([name, text, amount]) => {
    const button = make("button", { type: "button", "data-view": name }, text, ...(amount ? [make("small", {}, count(amount))] : []));
    button.addEventListener("click", () => go(name));
    find("views").append(button);
    return [name, button];
  }));
  function go(name, argument, same = false) {
    view = VIEWS[name](argument);
    focus = null;
    find("actions").hidden = !view.actions;
    if (view.actions) countTicked();
    const owner = name === "cluster" ? "clusters" : name;
    buttons.forEach((button, each) => button.setAttribute("aria-current", String(each === owner)));
    find("heading").textContent = view.title;
    find("note").textContent = view.note;
    if (!same && scrollY > find("about").offsetTop) scrollTo({ top: find("about").offsetTop - 60, behavior: "instant" });
    layOut();
  }
  let waiting;
  find("words").addEventListener("input", (event) => {
    clearTimeout(waiting);
    waiting = setTimeout(() => { wanted = event.target.value.trim(); go(wanted ? "named" : tabs[0][0]); }, 120);
  });
  let frame = 0;
  addEventListener("scroll", () => { frame ||= requestAnimationFrame(() => { frame = 0; draw(); }); }, { passive: true });
  let width = 0;
  new ResizeObserver(() => { if (list.clientWidth !== width) { width = list.clientWidth; layOut(); } }).observe(list);
  go(tabs[0][0]);
  width = list.clientWidth;
  requestAnimationFrame(() => { root.dataset.ready = Math.round(performance.now()); });
})();
