
// Tables: a click on a heading sorts, a word in the box above filters, every row has a link, all rows can be copied.
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
  // An interval has the unit of the number before it.
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

const makeFilterable = (groups, tools) => {
  const box = element("input", { type: "search", placeholder: "filter rows", ariaLabel: "filter the rows of this table" });
  const count = element("output");
  tools.append(element("label", {}, box, count));
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
};

// The rows as a reader sees them: filtered and sorted, each cell on one line.
const textOf = (cell) => cell.textContent.replace(/\s+/g, " ").trim();
const shownRows = (table) => [...table.rows].filter((row) => !row.hidden).map((row) => [...row.cells].map(textOf));

const markdownOf = (table, caption) => {
  const escaped = (text) => text.replace(/[\\|*`<]/g, "\\$&");
  const [headings, ...rows] = shownRows(table);
  const rules = [...table.tHead.rows[0].cells].map((cell) => (cell.classList.contains("left") ? ":---" : "---:"));
  const lines = [headings.map(escaped), rules, ...rows.map((row) => row.map(escaped))];
  return `**${escaped(caption)}**\n\n${lines.map((cells) => `| ${cells.join(" | ")} |\n`).join("")}`;
};

const csvOf = (table) => {
  // A spreadsheet runs a cell that begins so, unless it is a number.
  const safe = (text) => (/^[=@+-]./.test(text) && !/^[+-][\d.,]+ ?[%\w/]*$/.test(text) ? `'${text}` : text);
  const quoted = (text) => (/[",]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text);
  return shownRows(table).map((row) => `${row.map(safe).map(quoted).join(",")}\n`).join("");
};

// One stop of the Tab key per table: the arrow keys go from link to link.
const linkRows = (table, id) => {
  const rows = [...table.tBodies[0].rows];
  const isKey = [...table.tHead.rows[0].cells].map((cell) => cell.classList.contains("left"));
  const numKeys = Math.max(isKey.indexOf(false) < 0 ? isKey.length : isKey.indexOf(false), 1);
  const taken = new Set();
  const links = rows.map((row) => {
    const key = [...row.cells].slice(0, numKeys).map(textOf).join(" ");
    row.id = `${id}.${unique(slug(key), taken)}`;
    const link = element("a", { className: "row-link", href: `#${row.id}`, tabIndex: -1, ariaLabel: `link to row ${key}` });
    row.cells[0].prepend(link);
    return link;
  });
  const shownLinks = () => all(".row-link", table.tBodies[0]).filter((link) => !link.closest("tr").hidden);
  const offer = (offered) => { for (const link of links) link.tabIndex = link === offered ? 0 : -1; };
  offer(links[0]);
  table.closest("figure").addEventListener("input", () => offer(shownLinks()[0]));
  table.addEventListener("keydown", (event) => {
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (!step || !links.includes(event.target)) return;
    event.preventDefault();
    const shown = shownLinks();
    const next = shown[shown.indexOf(event.target) + step];
    if (!next) return;
    offer(next);
    next.focus();
  });
};

const tableIds = new Set();
const furnish = (table) => {
  const groups = groupsOf(table, [...table.tBodies[0].rows]);
  const figcaption = table.closest("figure").querySelector("figcaption");
  const caption = textOf(figcaption);
  const tools = element("div", { className: "tools" });
  figcaption.append(tools);
  if (groups.length > 1) makeSortable(table, groups.map((group) => [...group]));
  if (groups.length > 5) makeFilterable(groups, tools);
  tools.append(
    actionButton("Copy", `copy as Markdown: ${caption}`, () => copy(markdownOf(table, caption)), "Copied"),
    actionButton("CSV", `save as CSV: ${caption}`, () => save(`${slug(caption)}.csv`, "text/csv", csvOf(table)), "Saved"),
  );
  const id = unique(`${table.closest(".section").id}.${slug(caption)}`, tableIds);
  linkRows(table, id);
  return id;
};
all("main table").forEach(furnish);

// A link to a row opens its section, shows it although it was filtered away, and highlights it.
const reach = () => {
  let name = "";
  try { name = decodeURIComponent(location.hash.slice(1)); } catch { /* not one of this page's links */ }
  const target = name && byId(name);
  for (const row of all("tr.linked")) row.classList.remove("linked");
  if (!target) return;
  const section = target.closest("details");
  if (section) section.open = true;
  if (!(target instanceof HTMLTableRowElement)) return;
  target.classList.add("linked");
  target.hidden = false;
  target.scrollIntoView({ block: "center" });
};
addEventListener("hashchange", reach);
reach();
