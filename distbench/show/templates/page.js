"use strict";
const byId = (id) => document.getElementById(id);
const all = (selector, within = document) => [...within.querySelectorAll(selector)];

// Tables: a click on a heading sorts, a word in the box above filters.
const UNITS = {
  ns: 1e-9, us: 1e-6, ms: 1e-3, s: 1, min: 60, h: 3600, "%": 1e-2, k: 1e3, M: 1e6, G: 1e9,
  B: 1, KiB: 2 ** 10, MiB: 2 ** 20, GiB: 2 ** 30, TiB: 2 ** 40, PiB: 2 ** 50,
};
const NUMBER = /^\[?([+-]?(?:\d[\d,]*\.?\d*|\.\d+)(?:e[+-]?\d+)?)\s*(%|[A-Za-z]+)?/;

const numberIn = (cell) => {
  const text = cell.textContent.trim();
  const found = NUMBER.exec(text);
  if (!found) return null;
  let scale = UNITS[found[2]] ?? 1;
  // An interval has the unit of the number that it stands behind.
  if (text.startsWith("[") && cell.previousElementSibling) {
    scale = UNITS[NUMBER.exec(cell.previousElementSibling.textContent.trim())?.[2]] ?? 1;
  }
  return Number(found[1].replaceAll(",", "")) * scale;
};

const compareBy = (column, direction, isNumeric) => (one, other) => {
  const [a, b] = [one, other].map((row) => row.cells[column]);
  if (isNumeric) {
    const [x, y] = [numberIn(a), numberIn(b)];
    if (x === null || y === null) return (x === null) - (y === null);
    return direction * (x - y);
  }
  return direction * a.textContent.localeCompare(b.textContent, undefined, { numeric: true });
};

const groupsOf = (table, rows) => {
  if (!("together" in table.dataset)) return rows.map((row) => [row]);
  const groups = [];
  for (const row of rows) {
    if (!groups.length || row.classList.contains("break")) groups.push([]);
    groups.at(-1).push(row);
  }
  return groups;
};

const makeSortable = (table, groups) => {
  const body = table.tBodies[0];
  const headings = [...table.tHead.rows[0].cells];
  headings.forEach((heading, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...heading.childNodes);
    heading.append(button);
    button.addEventListener("click", () => {
      const cells = groups.flat().map((row) => row.cells[column]);
      const told = cells.filter((cell) => cell.textContent.trim() !== "-");
      const isNumeric = told.length > 0 && told.filter((cell) => numberIn(cell) !== null).length > told.length / 2;
      const [first, second] = isNumeric ? ["descending", "ascending"] : ["ascending", "descending"];
      const next = { [first]: second, [second]: "none" }[heading.ariaSort] ?? first;
      headings.forEach((other) => other.removeAttribute("aria-sort"));
      let ordered = groups;
      if (next !== "none") {
        heading.ariaSort = next;
        const compare = compareBy(column, next === "ascending" ? 1 : -1, isNumeric);
        // A group's first row leads it, wherever the others go.
        ordered = groups.map(([head, ...rest]) => [head, ...rest.sort(compare)]);
        ordered.sort((a, b) => compare(a[0], b[0]));
      }
      table.classList.toggle("sorted", next !== "none");
      body.append(...ordered.flat());
    });
  });
};

const makeFilterable = (table, groups) => {
  const label = document.createElement("label");
  label.className = "filter";
  const box = Object.assign(document.createElement("input"), { type: "search", placeholder: "filter rows" });
  const count = Object.assign(document.createElement("output"), { value: "" });
  box.setAttribute("aria-label", "filter the rows of this table");
  label.append(box, count);
  const total = groups.flat().length;
  box.addEventListener("input", () => {
    const words = box.value.toLowerCase().split(/\s+/).filter(Boolean);
    let shown = 0;
    for (const group of groups) {
      const text = group.map((row) => [...row.cells].map((cell) => cell.textContent).join(" ")).join(" ").toLowerCase();
      const isShown = words.every((word) => text.includes(word));
      for (const row of group) row.hidden = !isShown;
      shown += isShown ? group.length : 0;
    }
    count.value = words.length ? `${shown} of ${total} rows` : "";
  });
  table.closest("figure").querySelector("figcaption").append(label);
};

for (const table of all("main table")) {
  const groups = groupsOf(table, [...table.tBodies[0].rows]);
  if (groups.length > 1) makeSortable(table, groups.map((group) => [...group]));
  if (groups.length > 5) makeFilterable(table, groups);
}

// Plots: the text of what is pointed at, tapped, or reached with the arrow keys.
const tip = document.createElement("div");
tip.id = "tip";
tip.setAttribute("role", "status");
document.body.append(tip);
let marked = null;

const place = () => {
  if (!marked) return;
  const box = marked.getBoundingClientRect();
  const [width, height] = [tip.offsetWidth, tip.offsetHeight];
  const left = Math.min(Math.max(box.left + box.width / 2 - width / 2, 4), innerWidth - width - 4);
  tip.style.left = `${left}px`;
  tip.style.top = `${box.top > height + 8 ? box.top - height - 6 : box.bottom + 6}px`;
};

const show = (spot) => {
  marked?.classList.remove("marked");
  marked = spot;
  tip.classList.toggle("on", Boolean(spot));
  if (!spot) return;
  spot.classList.add("marked");
  tip.textContent = spot.dataset.tip;
  place();
};

for (const spot of all(".spot")) {
  spot.dataset.tip = spot.textContent;
  spot.replaceChildren();
}
document.addEventListener("pointerover", (event) => show(event.target.closest?.(".spot")));
document.addEventListener("scroll", place, { capture: true, passive: true });
for (const figure of all("figure.box")) {
  const spots = all(".spot", figure);
  figure.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (event.key === "Escape") show(null);
    if (!step || !spots.length) return;
    event.preventDefault();
    const at = spots.indexOf(marked);
    show(spots[(at < 0 && step < 0 ? spots.length - 1 : at + step + spots.length) % spots.length]);
    marked.scrollIntoView({ block: "nearest", inline: "nearest" });
  });
  figure.addEventListener("blur", () => show(null));
}

// The page itself: contents, folding, theme, and everything open on paper.
const entries = byId("entries");
const opened = byId("contents");
const openContents = (isOpen) => {
  entries.classList.toggle("open", isOpen);
  opened.ariaExpanded = String(isOpen);
};
opened.addEventListener("click", () => openContents(!entries.classList.contains("open")));
entries.addEventListener("click", (event) => event.target.closest("a") && openContents(false));

const sections = all("details.section");
const fold = byId("fold");
fold.addEventListener("click", () => {
  const isOpen = sections.every((section) => !section.open);
  for (const section of sections) section.open = isOpen;
});
const sayFold = () => { fold.textContent = sections.some((section) => section.open) ? "Fold all" : "Open all"; };
for (const section of sections) section.addEventListener("toggle", sayFold);

const reach = () => {
  const target = location.hash.length > 1 && byId(location.hash.slice(1));
  if (target instanceof HTMLDetailsElement) target.open = true;
};
addEventListener("hashchange", reach);
reach();

const theme = byId("theme");
const prefersDark = matchMedia("(prefers-color-scheme: dark)");
const isDark = () => (document.documentElement.dataset.theme ?? (prefersDark.matches ? "dark" : "light")) === "dark";
const sayTheme = () => { theme.textContent = isDark() ? "Light" : "Dark"; };
theme.addEventListener("click", () => {
  document.documentElement.dataset.theme = isDark() ? "light" : "dark";
  try { localStorage.setItem("distbench-theme", document.documentElement.dataset.theme); } catch { /* not kept */ }
  sayTheme();
});
prefersDark.addEventListener("change", sayTheme);
sayTheme();

let folded = [];
addEventListener("beforeprint", () => {
  folded = sections.filter((section) => !section.open);
  for (const section of folded) section.open = true;
});
addEventListener("afterprint", () => { for (const section of folded) section.open = false; });

const current = new IntersectionObserver((seen) => {
  for (const { target, isIntersecting } of seen) {
    entries.querySelector(`a[href="#${target.id}"]`)?.classList.toggle("seen", isIntersecting);
  }
}, { rootMargin: "-10% 0px -60% 0px" });
for (const section of sections) current.observe(section);
