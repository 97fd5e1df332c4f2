// Two charts in SVG with their scales in HTML: lines over time, and columns side by side. Colours come from page.css.

const SVG = "http://www.w3.org/2000/svg";
const [WIDTH, HEIGHT] = [600, 100];
const MOST_NUMBERS = 16; // columns beside which their numbers have room

function shape(name, attributes, title) {
  const node = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (title !== undefined) node.append(Object.assign(document.createElementNS(SVG, "title"), { textContent: title }));
  return node;
}

function element(className, text = "") {
  return Object.assign(document.createElement("div"), { className, textContent: text });
}

/** A number with few digits. */
export function short(value) {
  if (value >= 1e7) return `${Math.round(value / 1e6)}M`;
  if (value >= 10000) return `${Math.round(value / 1000)}k`;
  return value >= 100 || Number.isInteger(value) ? String(Math.round(value)) : value.toFixed(1);
}

/** The least of 1, 2, 4 and 10 times a power of ten that is no less: a scale whose half is a plain number too. */
export function roundTop(value) {
  const power = 10 ** Math.floor(Math.log10(Math.max(value, 1)));
  return [1, 2, 4, 10].map((each) => each * power).find((each) => each >= value);
}

/** marks: [[share of the width, text], …] under the picture. The scale beside it has 0, the half and the top. */
function show(place, label, shapes, top, marks, { axisClass = "axis", numbers = [] } = {}) {
  const svg = shape("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img", "aria-label": label });
  const lines = [0, 0.5, 1].map((share) => shape("line", { x1: 0, x2: WIDTH, y1: HEIGHT * share, y2: HEIGHT * share }));
  svg.append(...lines, ...shapes);
  const scale = element("scale");
  scale.append(...[top, top / 2, 0].map((value) => element("", short(value))));
  const axis = element(axisClass);
  axis.append(...marks.map(([share, text]) => {
    const mark = element("", text);
    mark.style.left = `${100 * share}%`;
    return mark;
  }));
  const row = element("numbers");
  row.append(...numbers.map((value) => element("", short(value))));
  place.className = "plot";
  place.replaceChildren(scale, svg, axis, ...(numbers.length ? [row] : []));
}

/** series: [{name, className, points: [[seconds ago, value], …]}], newest last; `seconds` across. */
export function drawLines(place, series, seconds) {
  const highest = Math.max(0, ...series.flatMap(({ points }) => points.map(([, value]) => value)));
  const top = roundTop(highest);
  const shapes = series.map(({ className, points }) => {
    const at = points.filter(([age]) => age <= seconds).map(([age, value]) => {
      const [x, y] = [(1 - age / seconds) * WIDTH, HEIGHT - (value / top) * HEIGHT];
      return `${x.toFixed(1)},${y.toFixed(1)}`;
    });
    return shape("polyline", { class: className, points: at.join(" ") });
  });
  const latest = series.map(({ name, points }) => `${name} ${short(points.at(-1)?.[1] ?? 0)}`).join(", ");
  const minutes = seconds / 60;
  const marks = Array.from({ length: minutes + 1 }, (_, index) => [index / minutes, index < minutes ? `−${minutes - index}` : "now"]);
  marks[0][1] += " min";
  show(place, `${latest}; highest ${short(highest)}`, shapes, top, marks, { axisClass: "axis time" });
}

/** columns: [{label, values: [one, two]}], the two stacked; `of`: what a column is; `mean` draws a line; `full` is the least top. */
export function drawColumns(place, columns, { of, full = 0, mean, summary }) {
  const width = WIDTH / Math.max(columns.length, 1);
  const gap = Math.min(width * 0.2, 6);
  const sums = columns.map(({ values }) => values.reduce((all, each) => all + Math.max(each, 0), 0));
  const top = roundTop(Math.max(full, ...sums));
  const shapes = [];
  columns.forEach(({ label, values }, index) => {
    let base = HEIGHT;
    values.forEach((value, which) => {
      const height = (Math.max(value, 0) / top) * HEIGHT;
      base -= height;
      const box = { x: index * width + gap / 2, y: base, width: width - gap, height, class: which ? "two" : "one" };
      shapes.push(shape("rect", box, label));
    });
  });
  if (mean !== undefined) {
    const y = HEIGHT - (mean / top) * HEIGHT;
    shapes.push(shape("line", { x1: 0, x2: WIDTH, y1: y, y2: y, class: "mean" }));
  }
  // A number under every column, or under every second, fourth, …: at most a dozen.
  const every = 2 ** Math.max(0, Math.ceil(Math.log2(columns.length / 12)));
  const marks = columns.map((_, index) => [(index + 0.5) / columns.length, index === 0 ? `${of} 0` : String(index)]);
  const numbers = columns.length <= MOST_NUMBERS ? sums : [];
  show(place, summary, shapes, top, marks.filter((_, index) => index % every === 0), { numbers });
}
