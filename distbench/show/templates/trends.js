
// Series over launches: each as points, levels with their intervals, and marked changes.
const MISSING = 65535;
const shapes = "http://www.w3.org/2000/svg";
const shape = (name, attributes, text) => {
  const made = document.createElementNS(shapes, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  return made;
};
// Numbers are stored as steps on a logarithmic scale, two bytes each.
const valuesOf = ({ low, span, steps }) => {
  const bytes = Uint8Array.from(atob(steps), (letter) => letter.charCodeAt(0));
  return [...new Uint16Array(bytes.buffer)].map((step) => (step === MISSING ? null : low * Math.exp((span * step) / (MISSING - 1))));
};
const unitText = ({ unit }, value) => {
  if (value === null) return "-";
  return unit === "s" ? timeText(value) : `${Number(value.toPrecision(4)).toLocaleString("en")} ${unit}`.trim();
};
const medianOf = (ordered) => (ordered[(ordered.length - 1) >> 1] + ordered[ordered.length >> 1]) / 2;
const percent = (share) => `${share >= 0 ? "+" : "\u2212"}${Math.round(100 * Math.abs(share))} %`;

const levelsOf = ({ cuts }, values, ranks) => [0, ...cuts].map((start, at) => {
  const stop = cuts[at] ?? values.length;
  const ordered = values.slice(start, stop).filter((value) => value !== null).sort((a, b) => a - b);
  const low = ranks[ordered.length];
  return { start, stop, middle: medianOf(ordered), low: ordered[low], high: ordered[ordered.length - 1 - low] };
});

const roundTicks = (low, high) => {
  const rough = (high - low) / 4;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= rough);
  const ticks = [];
  for (let tick = Math.ceil(low / step) * step; tick <= high; tick += step) ticks.push(tick);
  return ticks;
};

const drawTrend = (data, series, width) => {
  const height = 230;
  const [left, right, top, bottom] = [76, 14, 40, 26];
  const values = valuesOf(series);
  const launches = data.launches[series.group];
  const levels = levelsOf(series, values, data.ranks);
  const known = values.filter((value) => value !== null);
  const middle = medianOf([...known].sort((a, b) => a - b));
  const [low, high] = [Math.min(...known, 0.9 * middle), Math.max(...known, 1.1 * middle)];
  const x = (at) => left + ((at + 0.5) / values.length) * (width - left - right);
  const y = (value) => top + ((high - value) / (high - low)) * (height - top - bottom);
  const name = `${series.name}: ${launches.length} launches${series.cuts.length ? `, ${series.cuts.length} changes` : ""}`;
  const svg = shape("svg", { class: "trend", role: "img", "aria-label": name, viewBox: `0 0 ${width} ${height}`, width, height });
  for (const tick of roundTicks(low, high)) {
    svg.append(shape("line", { class: "axis", x1: left, x2: width - right, y1: y(tick), y2: y(tick) }));
    svg.append(shape("text", { class: "label", x: left - 6, y: y(tick) + 4, "text-anchor": "end" }, unitText(series, tick)));
  }
  const dates = width < 500 ? [0, values.length - 1] : [0, values.length >> 1, values.length - 1];
  dates.forEach((at, place) => {
    const anchor = place === 0 ? "start" : place === dates.length - 1 ? "end" : "middle";
    svg.append(shape("text", { class: "label", x: x(at), y: height - 8, "text-anchor": anchor }, launches[at].date.slice(0, 10)));
  });
  for (const level of levels) {
    const [from, to] = [x(level.start - 0.4), x(level.stop - 0.6)];
    svg.append(shape("rect", { class: "interval", x: from, width: to - from, y: y(level.high), height: Math.max(y(level.low) - y(level.high), 1) }));
    svg.append(shape("line", { class: "level", x1: from, x2: to, y1: y(level.middle), y2: y(level.middle) }));
  }
  series.cuts.forEach((cut, at) => {
    const look = series.slower[at] ? "bad" : "good";
    const place = x(cut - 0.5);
    svg.append(shape("line", { class: `cut ${look}`, x1: place, x2: place, y1: top - 6, y2: height - bottom }));
    const anchor = place > width * 0.6 ? "end" : "start";
    const text = `${percent(levels[at + 1].middle / levels[at].middle - 1)} ${launches[cut].commit}`;
    svg.append(shape("text", { class: look, x: place, y: at % 2 ? 28 : 13, "text-anchor": anchor }, text));
  });
  values.forEach((value, at) => {
    if (value === null) return;
    const launch = launches[at];
    svg.append(shape("circle", { class: "dot", cx: x(at), cy: y(value), r: 2.5 }));
    const spot = shape("circle", { class: "spot", cx: x(at), cy: y(value), r: 7 });
    spot.dataset.tip = [`${launch.date} ${launch.commit} ${launch.label}`.trim(), `torch ${launch.torch}`, unitText(series, value)].join("\n");
    svg.append(spot);
  });
  return svg;
};

const widthOf = (box) => Math.max(Math.min(box.clientWidth, 900), 300);
const plotBox = (name) => element("figure", { className: "box", tabIndex: 0, ariaLabel: `plot: ${name}` });

// The index: a plot per changed case, and filters of plots and tables.
const makeCards = (box, data) => {
  for (const series of data.series) {
    const figure = plotBox(series.name);
    const link = element("a", { href: `${series.page}#${encodeURIComponent(series.name)}`, textContent: series.name });
    const look = series.standing === "slower" ? "bad" : "good";
    const finding = element("span", { className: look, textContent: series.finding });
    figure.append(element("figcaption", {}, link, element("br"), finding), drawTrend(data, series, widthOf(box)));
    figure.dataset.page = data.keys[series.group].page;
    box.append(figure);
  }
  const filters = element("div", { className: "filters" });
  const count = element("output");
  const names = ["scenario", "machine", "torch"];
  const groups = new Map(data.keys.map((keys) => [keys.page, keys]));
  const selects = names.map((name) => {
    const values = [...new Set(data.keys.flatMap((keys) => keys[name].split(", ")))].sort();
    const options = ["", ...values].map((value) => element("option", { value, textContent: value || "all" }));
    const select = element("select", {}, ...options);
    filters.append(element("label", {}, `${name} `, select));
    select.addEventListener("change", () => filter());
    return select;
  });
  filters.append(count);
  box.prepend(filters);
  const filter = () => {
    const chosen = selects.map((select) => select.value);
    const isOut = (page) => !names.every((name, at) => !chosen[at] || groups.get(page)[name].split(", ").includes(chosen[at]));
    for (const figure of all("figure", box)) figure.classList.toggle("out", isOut(figure.dataset.page));
    for (const table of all("main table")) {
      const place = [...table.tHead.rows[0].cells].findIndex((cell) => textOf(cell).startsWith("page"));
      for (const row of table.tBodies[0].rows) row.classList.toggle("out", isOut(textOf(row.cells[place])));
    }
    const shown = all("figure:not(.out)", box).length;
    count.value = chosen.some(Boolean) ? `${shown} of ${data.series.length} plots` : "";
  };
};

// A page of cases: the plot of one case, which a reader chooses in the list or in the table.
const makeChooser = (box, data) => {
  const select = element("select", {}, ...data.series.map(({ name }) => element("option", { textContent: name })));
  const figure = plotBox("the chosen case");
  const draw = () => figure.replaceChildren(drawTrend(data, data.series[select.selectedIndex], widthOf(box)));
  select.addEventListener("change", draw);
  box.append(element("div", { className: "chosen" }, element("label", {}, "case ", select)), figure);
  const places = new Map(data.series.map(({ name }, at) => [name, at]));
  const show = () => {
    let name = "";
    try { name = decodeURIComponent(location.hash.slice(1)); } catch { /* not the name of a case */ }
    if (places.has(name)) select.selectedIndex = places.get(name);
    draw();
  };
  addEventListener("hashchange", show);
  show();
  for (const table of all("main table")) {
    if (table.tHead.rows[0].cells[0].textContent.trim() !== "case") continue;
    for (const { cells: [cell] } of table.tBodies[0].rows) {
      const name = [...cell.childNodes].filter((node) => !node.classList?.contains("row-link"));
      const button = element("button", { type: "button", className: "case" }, ...name);
      const at = places.get(textOf(button));
      cell.append(button);
      button.addEventListener("click", () => {
        select.selectedIndex = at;
        select.dispatchEvent(new Event("change"));
        box.scrollIntoView({ block: "start" });
        figure.focus({ preventScroll: true });
      });
    }
  }
  const pair = element("div", { className: "picker", role: "group", ariaLabel: "Compare two launches" });
  byId("compare-two-launches").append(pair);
  const rows = data.series.map(({ name }) => name);
  const table = data.series.map(valuesOf);
  const launches = data.launches[0];
  makePicker(pair, {
    items: launches.map(({ date, commit, label }) => `${date} ${commit} ${label}`.trim()),
    rows, pairs: {}, otherwise: data.otherwise, first: [Math.max(launches.length - 2, 0), launches.length - 1],
    medians: launches.map((_, at) => table.map((values) => values[at])),
    textOf: (value, row) => unitText(data.series[places.get(row)], value),
  });
};
for (const box of all("[data-trends]")) {
  const data = JSON.parse(box.dataset.trends);
  (data.keys ? makeCards : makeChooser)(box, data);
}
