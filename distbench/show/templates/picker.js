
// Two of several items side by side: a ratio with its interval where it was computed for the pair, else of medians.
const timeText = (seconds) => {
  if (seconds === null) return "-";
  const [scale, unit] = seconds >= 1 ? [1, "s"] : seconds >= 1e-3 ? [1e-3, "ms"] : [1e-6, "us"];
  return `${Number((seconds / scale).toPrecision(3))} ${unit}`;
};
const timesText = (ratio) => `${Number(ratio.toPrecision(3))}x`;
const ratioText = (ratio) => (ratio >= 1 ? `${timesText(ratio)} slower` : `${timesText(1 / ratio)} faster`);

const inverse = ([ratio, low, high, verdict]) => [
  1 / ratio, high && 1 / high, low && 1 / low, { slower: "faster", faster: "slower" }[verdict] ?? verdict,
];
const pairText = ([ratio, low, high, verdict]) => {
  const ends = ratio >= 1 ? [low, high] : [high && 1 / high, low && 1 / low];
  const interval = ends[0] && ends[1] ? ` (95 % CI ${ends.map((end) => Number(end.toPrecision(3))).join("-")}x)` : "";
  const name = { "within noise": "no difference beyond noise" }[verdict] ?? verdict;
  return `${ratioText(ratio)} than A${interval}. Verdict: ${name}.`;
};

const makePicker = (box, { items, rows, medians, pairs, otherwise, textOf = timeText, first = [0, 1] }) => {
  const title = box.getAttribute("aria-label");
  const answer = element("output");
  let shown = null;
  const selects = ["A", "B"].map((name, at) => {
    const select = element("select", {}, ...items.map((item, value) => element("option", { value, textContent: item })));
    select.selectedIndex = first[at];
    box.append(element("label", {}, `${name} `, select));
    select.addEventListener("change", () => compare());
    return select;
  });
  const swap = element("button", { type: "button", textContent: "Swap", ariaLabel: `swap A and B: ${title}` });
  box.append(swap, answer);
  swap.addEventListener("click", () => {
    [selects[0].selectedIndex, selects[1].selectedIndex] = selects.map((select) => select.selectedIndex).reverse();
    compare();
  });

  const casesTable = (a, b) => {
    const cells = (tag, texts) => texts.map((textContent, at) => element(tag, { textContent, className: at ? "" : "left" }));
    const measured = rows.map((row, at) => [row, medians[a][at], medians[b][at]]).filter(([, x, y]) => x !== null && y !== null);
    const head = element("tr", {}, ...cells("th", ["case", "A", "B", "B / A"]));
    const body = measured.map(([row, x, y]) => element("tr", {}, ...cells("td", [row, textOf(x, row), textOf(y, row), (y / x).toFixed(2)])));
    const table = element("table", {}, element("thead", {}, head), element("tbody", {}, ...body));
    const region = element("div", { className: "box", tabIndex: 0, role: "group", ariaLabel: title }, table);
    return [element("figure", {}, element("figcaption", { textContent: `${title}: ${body.length} cases of both` }), region), table];
  };

  const compare = () => {
    const [a, b] = selects.map((select) => select.selectedIndex);
    const pair = pairs[`${b},${a}`] ?? (pairs[`${a},${b}`] && inverse(pairs[`${a},${b}`]));
    if (shown) {
      tableIds.delete(shown.id);
      shown.figure.remove();
      shown = null;
    }
    if (a === b) answer.value = "Choose two different ones.";
    else if (rows.length === 1) {
      const times = `A takes ${textOf(medians[a][0], rows[0])}, B takes ${textOf(medians[b][0], rows[0])}`;
      answer.value = pair ? `${times}. B is ${pairText(pair)}` : `${times}. ${otherwise}.`;
    } else {
      answer.value = `${otherwise}.`;
      const [figure, table] = casesTable(a, b);
      box.append(figure);
      shown = { figure, id: furnish(table) };
    }
  };
  compare();
};
for (const box of all("[data-picker]")) makePicker(box, JSON.parse(box.dataset.picker));
