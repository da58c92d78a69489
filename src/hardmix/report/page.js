"use strict";
// The curves and the maps. Text from the runs enters the page as text nodes only.
(() => {
  const root = document.documentElement;
  root.classList.add("script");
  const read = (id) => JSON.parse(document.getElementById(id).textContent);
  const SVG = "http://www.w3.org/2000/svg";

  function make(tag, attributes = {}, ...children) {
    const element = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    element.append(...children);
    return element;
  }
  function draw(tag, attributes = {}, text) {
    const element = document.createElementNS(SVG, tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    if (text !== undefined) element.textContent = text;
    return element;
  }
  const format = (value) => {
    if (value === 0) return "0";
    const size = Math.abs(value);
    if (size >= 1000) return Math.round(value).toLocaleString("en");
    if (size < 0.001) return value.toExponential(2);
    return value.toPrecision(size >= 100 ? 4 : size >= 1 ? 3 : 2).replace(/^-/, "\u2212");
  };
  const colour = (run) => `var(--c${run.group % 8})`;
  const DASHES = ["", "7 4", "2 4", "10 4 2 4", "14 5", "4 2"];
  const dash = (run) => DASHES[(run.seed + Math.floor(run.group / 8)) % DASHES.length];

  function ticks(low, high, wanted) {
    const rough = (high - low) / wanted || 1;
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = power * [1, 2, 5, 10].find((each) => each * power >= rough);
    const found = [];
    for (let n = Math.ceil(low / step - 1e-9); n * step <= high + step * 1e-9; n++) {
      found.push(Number((n * step).toPrecision(12)));
    }
    return found;
  }
  function nearest(points, x) {
    let low = 0, high = points.length - 1;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (points[middle][0] < x) low = middle + 1; else high = middle;
    }
    if (low > 0 && x - points[low - 1][0] <= points[low][0] - x) low -= 1;
    return points[low];
  }

  function chart(place, { metrics, runs, points }) {
    let metric = metrics[0], cursor = null, raised = null;
    const visible = runs.map(() => true);
    const chosen = new Map();

    const menu = make("fieldset", { class: "metrics" }, make("legend", { class: "hidden" }, "What is drawn"));
    const rest = make("div"), more = make("details", {}, make("summary", {}, "More measures"), rest);
    metrics.forEach((each, index) => {
      const input = make("input", { type: "radio", name: "metric", value: each.key });
      input.checked = index === 0;
      input.addEventListener("change", () => { metric = each; cursor = null; update(); });
      (each.main ? menu : rest).append(make("label", {}, input, make("span", {}, each.name)));
    });
    if (rest.childElementCount) menu.append(more);
    const about = make("p", { class: "about" });
    const plot = make("div", { class: "plot", tabindex: "0", role: "slider", "aria-label": "Epoch" });
    const output = make("output", { "aria-live": "off" });
    const all = make("button", { type: "button" }, "Show all");
    const none = make("button", { type: "button" }, "Hide all");
    const save = make("button", { type: "button" }, "Save as CSV");
    const legend = make("ul", { class: "legend", "aria-label": "Runs" });
    place.append(menu, about, plot, make("div", { class: "reading" }, output, all, none, save), legend);

    runs.forEach((run, index) => {
      const line = draw("svg", { width: 34, height: 10, "aria-hidden": "true" });
      line.append(draw("line", { x1: 0, x2: 34, y1: 5, y2: 5, "stroke-width": 2.5, "stroke-dasharray": dash(run), style: `stroke:${colour(run)}` }));
      const value = make("span", { class: "value" });
      const button = make("button", { type: "button", "aria-pressed": "true", "data-run": run.name },
        line, make("span", { class: "name" }, run.name), value);
      button.addEventListener("click", () => { visible[index] = !visible[index]; update(); });
      for (const event of ["pointerenter", "focus"]) button.addEventListener(event, () => { raised = index; paint(); });
      for (const event of ["pointerleave", "blur"]) button.addEventListener(event, () => { raised = null; paint(); });
      chosen.set(index, { button, value });
      legend.append(make("li", {}, button));
    });
    const turn = (on) => () => { visible.fill(on); update(); };
    all.addEventListener("click", turn(true));
    none.addEventListener("click", turn(false));
    save.addEventListener("click", () => {
      const lines = rows().map((row) => row.map((cell) => `"${String(cell).replaceAll('"', '""')}"`).join(","));
      const link = make("a", { download: `${metric.key}.csv`, href: URL.createObjectURL(new Blob([lines.join("\n") + "\n"], { type: "text/csv" })) });
      link.click();
      setTimeout(() => URL.revokeObjectURL(link.href), 1000);
    });

    const curves = () => points[metric.key];
    const shown = () => runs.map((_, index) => index).filter((index) => visible[index] && curves()[index].length);
    const unit = () => (metric.percent ? " %" : "");
    const longest = () => shown().map((index) => curves()[index]).reduce((a, b) => (b.length > a.length ? b : a), []);
    const within = (curve, x) => curve.length && x >= curve[0][0] - 1 && x <= curve[curve.length - 1][0] + 1;

    function rows() {
      const epochs = [...new Set(curves().flat().map((point) => point[0]))].sort((a, b) => a - b);
      const maps = curves().map((curve) => new Map(curve));
      return [["Epoch", ...runs.map((run) => run.name)], ...epochs.map((x) => [x, ...maps.map((each) => each.get(x) ?? "")])];
    }

    let frame = null;
    function paint() {
      const width = Math.max(260, plot.clientWidth), height = Math.round(Math.min(380, Math.max(240, width * 0.4)));
      const box = { left: 52, right: width - 14, top: 14, bottom: height - 40 };
      const used = shown().map((index) => curves()[index]);
      const xs = curves().flat().map((point) => point[0]), ys = used.flat().map((point) => point[1]);
      let low = Math.min(...ys), high = Math.max(...ys);
      if (!ys.length) { low = 0; high = 1; }
      if (metric.key === "lr" || metric.key === "images_per_second") low = 0;
      const pad = (high - low) * 0.06 || Math.abs(high) * 0.1 || 1;
      if (low !== 0) low -= pad;
      high += pad;
      if (Math.min(...ys) >= 0) low = Math.max(low, 0);
      if (metric.percent) high = Math.min(high, Math.max(100, Math.max(...ys)));
      const first = 0, last = Math.ceil(Math.max(...xs, 1e-9) - 1e-6);
      const x = (value) => box.left + ((value - first) / (last - first)) * (box.right - box.left);
      const y = (value) => box.bottom - ((value - low) / (high - low)) * (box.bottom - box.top);
      frame = { x, box, first, last };

      const svg = draw("svg", { viewBox: `0 0 ${width} ${height}`, height, "aria-hidden": "true" });
      const levels = ticks(low, high, 5);
      const gap = levels.length > 1 ? levels[1] - levels[0] : 1;
      const decimals = Math.min(6, Math.max(0, -Math.floor(Math.log10(gap) + 1e-9)));
      for (const tick of levels) {
        svg.append(draw("line", { class: "grid", x1: box.left, x2: box.right, y1: y(tick), y2: y(tick) }));
        const text = tick.toLocaleString("en", { minimumFractionDigits: decimals, maximumFractionDigits: decimals });
        svg.append(draw("text", { x: box.left - 8, y: y(tick) + 4, "text-anchor": "end" }, text));
      }
      for (const tick of ticks(first, last, Math.min(10, width / 90))) {
        svg.append(draw("text", { x: x(tick), y: box.bottom + 18, "text-anchor": "middle" }, String(tick)));
      }
      svg.append(draw("line", { class: "axis", x1: box.left, x2: box.right, y1: box.bottom, y2: box.bottom }));
      svg.append(draw("text", { x: (box.left + box.right) / 2, y: height - 4, "text-anchor": "middle" }, "epoch"));
      for (const index of shown()) {
        const d = curves()[index].map((point, n) => `${n ? "L" : "M"}${x(point[0]).toFixed(1)} ${y(point[1]).toFixed(1)}`).join("");
        const path = { class: raised === null || raised === index ? "curve" : "curve faded", d, "stroke-dasharray": dash(runs[index]), style: `stroke:${colour(runs[index])}` };
        if (curves()[index].length < 2) { path.d += "h0.01"; path["stroke-linecap"] = "round"; path["stroke-width"] = 6; }
        svg.append(draw("path", path));
      }
      if (cursor !== null) {
        svg.append(draw("line", { class: "cursor", x1: x(cursor), x2: x(cursor), y1: box.top, y2: box.bottom }));
        for (const index of shown()) {
          if (!within(curves()[index], cursor)) continue;
          const [px, py] = nearest(curves()[index], cursor);
          svg.append(draw("circle", { class: "spot", cx: x(px), cy: y(py), r: 4.5, style: `fill:${colour(runs[index])}` }));
        }
      }
      plot.replaceChildren(svg);
      say();
    }
    function say() {
      const at = cursor === null ? "Last value" : `Epoch ${Number(cursor.toFixed(2))}`;
      output.textContent = at;
      const words = [];
      runs.forEach((run, index) => {
        const curve = curves()[index];
        const point = cursor === null ? curve[curve.length - 1] : within(curve, cursor) ? nearest(curve, cursor) : undefined;
        const text = point === undefined ? "" : format(point[1]) + unit();
        chosen.get(index).value.textContent = text;
        if (visible[index] && text) words.push(`${run.name} ${text}`);
      });
      plot.setAttribute("aria-valuemin", "0");
      plot.setAttribute("aria-valuemax", String(Number(frame.last.toFixed(2))));
      plot.setAttribute("aria-valuenow", String(Number((cursor ?? frame.last).toFixed(2))));
      plot.setAttribute("aria-valuetext", `${metric.name}, ${at}: ${words.join(", ")}`);
    }
    function update() {
      about.textContent = metric.about + (metric.percent ? " In percent." : "");
      runs.forEach((_, index) => chosen.get(index).button.setAttribute("aria-pressed", String(visible[index])));
      paint();
      table();
    }
    const details = document.getElementById("curve-table"), numbers = document.getElementById("curve-numbers");
    function table() {
      if (!details.open) return;
      const [head, ...body] = rows();
      const cells = (row, tag) => row.map((cell, n) => make(n ? tag : "th", { class: "n", scope: n && tag === "td" ? "" : n ? "col" : "row" }, typeof cell === "number" && n ? format(cell) : String(cell)));
      numbers.replaceChildren(make("div", { class: "scroll", role: "region", "aria-label": metric.name, tabindex: "0" },
        make("table", {}, make("caption", {}, make("strong", {}, metric.name), make("span", {}, about.textContent)),
          make("thead", {}, make("tr", {}, ...cells(head, "th"))),
          make("tbody", {}, ...body.map((row) => make("tr", {}, ...cells(row, "td")))))));
      watchWidth.observe(numbers.firstChild);
    }
    details.addEventListener("toggle", table);

    function point(event) {
      const curve = longest();
      if (!curve.length) return;
      const { left } = plot.getBoundingClientRect();
      const share = (event.clientX - left - frame.box.left) / (frame.box.right - frame.box.left);
      cursor = nearest(curve, frame.first + share * (frame.last - frame.first))[0];
      paint();
    }
    plot.addEventListener("pointermove", point);
    plot.addEventListener("pointerdown", point);
    plot.addEventListener("pointerleave", () => { if (document.activeElement !== plot) { cursor = null; paint(); } });
    plot.addEventListener("blur", () => { cursor = null; paint(); });
    plot.addEventListener("keydown", (event) => {
      const stops = longest().map((each) => each[0]);
      if (!stops.length) return;
      const moves = { ArrowLeft: -1, ArrowDown: -1, ArrowRight: 1, ArrowUp: 1, PageDown: -10, PageUp: 10 };
      let index = cursor === null ? stops.length - 1 : stops.indexOf(nearest(longest(), cursor)[0]);
      if (event.key in moves) index += cursor === null ? 0 : moves[event.key];
      else if (event.key === "Home") index = 0;
      else if (event.key === "End") index = stops.length - 1;
      else if (event.key === "Escape") { cursor = null; paint(); return; }
      else return;
      event.preventDefault();
      cursor = stops[Math.max(0, Math.min(stops.length - 1, index))];
      paint();
    });
    new ResizeObserver(() => paint()).observe(plot);
    update();
  }

  function map(figure, { x, y, label, classes, images, names, links }) {
    const plane = figure.querySelector(".plane");
    const here = make("span", { class: "here", hidden: "" }), card = make("div", { class: "card", hidden: "", "aria-live": "polite" });
    const drawn = new Map([...plane.querySelectorAll("image")].map((each) => [Number(each.dataset.point), each.getAttribute("href")]));
    const source = (index) => drawn.get(index) ?? images[index];
    plane.append(here, card);
    const pictured = x.map((_, index) => index).filter(source).sort((a, b) => x[a] - x[b] || a - b);
    let at = -1;
    function show(index) {
      here.hidden = card.hidden = index === null;
      if (index === null) return;
      const left = x[index] / 10, top = y[index] / 10;
      here.style.left = `${left}%`;
      here.style.top = `${top}%`;
      card.style.left = left > 50 ? "" : `calc(${left}% + 14px)`;
      card.style.right = left > 50 ? `calc(${100 - left}% + 14px)` : "";
      card.style.top = top > 60 ? "" : `${top}%`;
      card.style.bottom = top > 60 ? `${100 - top}%` : "";
      const kind = classes[label[index]], name = (names[index] ?? "").split("/").pop();
      card.replaceChildren(...(kind ? [make("b", {}, kind)] : []), name || (kind ? "" : "no label"));
      if (source(index)) {
        const image = make("img", { alt: "", src: source(index) });
        image.decode().then(() => image.classList.toggle("small", image.naturalWidth < 96), () => {});
        card.prepend(image);
      }
    }
    plane.addEventListener("pointermove", (event) => {
      const box = plane.getBoundingClientRect();
      const px = ((event.clientX - box.left) / box.width) * 1000, py = ((event.clientY - box.top) / box.height) * 1000;
      const over = event.target.closest?.("g")?.querySelector("image");
      let best = over ? Number(over.dataset.point) : null, least = 40 ** 2;
      for (let n = 0; !over && n < x.length; n++) {
        // An image to look at is worth a little way.
        const far = ((x[n] - px) ** 2 + (y[n] - py) ** 2) * (source(n) ? 0.3 : 1);
        if (far < least) { least = far; best = n; }
      }
      show(best);
    });
    plane.addEventListener("pointerleave", () => show(null));
    plane.addEventListener("blur", () => show(null));
    plane.addEventListener("keydown", (event) => {
      const moves = { ArrowLeft: -1, ArrowUp: -1, ArrowRight: 1, ArrowDown: 1 };
      if (event.key === "Escape") { show(null); return; }
      if (event.key === "Enter" && !card.hidden && links[pictured[at]]) make("a", { href: links[pictured[at]], target: "_blank", rel: "noopener" }).click();
      if (!(event.key in moves) || !pictured.length) return;
      event.preventDefault();
      at = Math.max(0, Math.min(pictured.length - 1, at + moves[event.key]));
      show(pictured[at]);
    });
  }

  // A wide table says in words that it can be moved, too: a phone hides its scroll bars.
  const hints = new Map();
  function hint(box) {
    if (!hints.has(box)) {
      hints.set(box, make("p", { class: "sideways", "aria-hidden": "true" }, "Scroll sideways for more columns \u2192"));
      box.before(hints.get(box));
    }
    hints.get(box).classList.toggle("needed", box.scrollWidth > box.clientWidth + 1);
  }
  const watchWidth = new ResizeObserver((entries) => entries.forEach((each) => hint(each.target)));
  for (const box of document.querySelectorAll(".scroll")) { hint(box); watchWidth.observe(box); }

  const curves = read("curve-data");
  if (curves.metrics.length) chart(document.getElementById("chart"), curves);
  const maps = read("map-data");
  for (const figure of document.querySelectorAll("[data-map]")) map(figure, maps[Number(figure.dataset.map)]);
})();
