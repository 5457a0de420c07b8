// Plots: the text of the point or bar under the pointer, tapped, or reached with the arrow keys.
const tip = element("div", { id: "tip", role: "status" });
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

// Of a plot that can be zoomed: brings a spot into view.
const reveals = new Map();

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
  spot.dataset.tip ??= spot.textContent;
  spot.replaceChildren();
}
document.addEventListener("pointerover", (event) => show(event.target.closest?.(".spot")));
document.addEventListener("scroll", place, { capture: true, passive: true });
for (const figure of all("figure.box")) {
  figure.addEventListener("keydown", (event) => {
    const spots = all(".spot", figure);
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (event.key === "Escape") show(null);
    if (!step || !spots.length) return;
    event.preventDefault();
    const at = spots.indexOf(marked);
    const next = spots[(at < 0 && step < 0 ? spots.length - 1 : at + step + spots.length) % spots.length];
    reveals.get(next.closest("svg"))?.(next);
    show(next);
    marked.scrollIntoView({ block: "nearest", inline: "nearest" });
  });
  figure.addEventListener("blur", () => show(null));
}

// A timeline: zoom and pan along its x axis.
const MAX_ZOOM = 2000;
const STEPS = [1, 2, 5, 10];
const SVG = "http://www.w3.org/2000/svg";

const makeZoomable = (svg, number) => {
  const [left, right, low, high] = svg.dataset.zoom.split(" ").map(Number);
  const width = right - left;
  const perPoint = (high - low) / width;
  const clip = document.createElementNS(SVG, "clipPath");
  const area = document.createElementNS(SVG, "rect");
  clip.id = `zoom-${number}`;
  for (const [name, value] of Object.entries({ x: left, y: 0, width, height: svg.viewBox.baseVal.height })) {
    area.setAttribute(name, value);
  }
  clip.append(area);
  svg.append(clip);
  const moving = all("[id*=PolyCollection], .spots", svg);
  for (const group of moving) {
    const window = document.createElementNS(SVG, "g");
    window.setAttribute("clip-path", `url(#${clip.id})`);
    group.replaceWith(window);
    window.append(group);
  }
  // Each panel's ticks move to the round values of the part that is shown.
  const panels = all("[id*=axes_]", svg).map((axes) => all("[id*=xtick_]", axes).map((group) => ({
    group, text: group.querySelector("text"), label: group.querySelector("text")?.textContent,
    x: Number(/[\d.]+/.exec(group.querySelector("path, use")?.getAttribute("d") ?? "0")[0]),
  })));
  const most = Math.max(Math.min(...panels.map((ticks) => ticks.length)), 2);

  let [from, to] = [left, right];
  const draw = () => {
    const scale = width / (to - from);
    const isZoomed = scale > 1.0001;
    const place = (x) => left + (x - from) * scale;
    for (const group of moving) group.setAttribute("transform", `translate(${left - from * scale} 0) scale(${scale} 1)`);
    const [first, last] = [from, to].map((x) => low + (x - left) * perPoint);
    const rough = (last - first) / (most - 1);
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = STEPS.find((factor) => factor * power >= rough * 0.999) * power;
    const decimals = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
    for (const ticks of panels) {
      ticks.forEach(({ group, text, label, x }, at) => {
        const value = (Math.ceil(first / step - 1e-9) + at) * step;
        const target = place(left + (value - low) / perPoint);
        group.style.display = isZoomed && target > right + 0.01 ? "none" : "";
        group.setAttribute("transform", isZoomed ? `translate(${target - x} 0)` : "");
        if (text) text.textContent = isZoomed ? value.toFixed(decimals) : label;
      });
    }
    svg.classList.toggle("zoomed", isZoomed);
    show(null);
  };
  const set = (start, length) => {
    const kept = Math.min(Math.max(length, width / MAX_ZOOM), width);
    from = Math.min(Math.max(start, left), right - kept);
    to = from + kept;
    draw();
  };
  // `factor` above 1 zooms in; the value at `at` (points) stays where it is.
  const zoom = (factor, at = (from + to) / 2) => {
    const length = Math.min(Math.max((to - from) / factor, width / MAX_ZOOM), width);
    set(at - (at - from) * (length / (to - from)), length);
  };
  const pan = (share) => set(from + share * (to - from), to - from);
  const reset = () => set(left, width);
  reveals.set(svg, (spot) => {
    const [x, length] = [Number(spot.getAttribute("x")), Number(spot.getAttribute("width"))];
    if (x < from || x + length > to) set(x + length / 2 - (to - from) / 2, to - from);
  });

  const pointsPerPixel = () => svg.viewBox.baseVal.width / svg.getBoundingClientRect().width;
  const pointAt = (event) => {
    const x = (event.clientX - svg.getBoundingClientRect().left) * pointsPerPixel();
    return from + ((x - left) * (to - from)) / width;
  };
  svg.addEventListener("wheel", (event) => {
    const across = event.shiftKey ? event.deltaX || event.deltaY : event.deltaX;
    if (event.ctrlKey || event.metaKey) zoom(Math.exp(-Math.sign(event.deltaY) * Math.min(Math.abs(event.deltaY), 100) / 250), pointAt(event));
    else if (across && to - from < width * 0.9999) pan(across / 1000);
    else return;
    event.preventDefault();
  }, { passive: false });
  svg.addEventListener("pointermove", (event) => {
    if (!(event.buttons & 1) || !svg.classList.contains("zoomed")) return;
    svg.setPointerCapture(event.pointerId);
    const scale = width / (to - from);
    set(from - (event.movementX * pointsPerPixel()) / scale, to - from);
  });
  const figure = svg.closest("figure");
  const keys = { "+": () => zoom(2), "=": () => zoom(2), w: () => zoom(2), "-": () => zoom(0.5), s: () => zoom(0.5),
    a: () => pan(-0.25), d: () => pan(0.25), 0: reset };
  figure.addEventListener("keydown", (event) => {
    const action = keys[event.key];
    if (!action || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    action();
  });
  const buttons = [
    ["+", "zoom in", keys["+"]], ["\u2212", "zoom out", keys["-"]], ["\u25c0", "earlier", keys.a],
    ["\u25b6", "later", keys.d], ["All", "All: show the whole step", reset],
  ].map(([textContent, title, action]) => {
    const button = element("button", { type: "button", textContent, title, ariaLabel: title });
    button.addEventListener("click", action);
    return button;
  });
  const hint = element("span", { textContent: "zoom: Ctrl + wheel, or + and \u2212 keys; pan: drag, or A and D keys" });
  figure.before(element("div", { className: "tools" }, ...buttons, hint));
};
all("svg[data-zoom]").forEach(makeZoomable);
