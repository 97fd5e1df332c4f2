// Two charts in SVG: lines over time, and columns side by side. Colours come from page.css.

const SVG = "http://www.w3.org/2000/svg";
const [WIDTH, HEIGHT] = [600, 100];

function shape(name, attributes, title) {
  const node = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (title !== undefined) node.append(Object.assign(document.createElementNS(SVG, "title"), { textContent: title }));
  return node;
}

function show(place, label, shapes, left, right) {
  const svg = shape("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img", "aria-label": label });
  svg.append(shape("line", { x1: 0, x2: WIDTH, y1: HEIGHT, y2: HEIGHT }), ...shapes);
  const axis = document.createElement("div");
  axis.className = "axis";
  for (const text of [left, right]) axis.append(Object.assign(document.createElement("span"), { textContent: text }));
  place.replaceChildren(svg, axis);
}

/** A number with few digits. */
export function short(value) {
  if (value >= 10000) return `${Math.round(value / 1000)}k`;
  return value >= 100 || Number.isInteger(value) ? String(Math.round(value)) : value.toFixed(1);
}

/** series: [{name, className, values}], equally long, newest last; `most` points across, `seconds` apart. */
export function drawLines(place, series, most, seconds) {
  const top = Math.max(1, ...series.flatMap(({ values }) => values));
  const shapes = series.map(({ className, values }) => {
    const first = most - values.length;
    const points = values.map((value, index) => {
      const x = ((first + index) * WIDTH) / (most - 1);
      return `${x.toFixed(1)},${(HEIGHT - (value / top) * (HEIGHT - 4)).toFixed(1)}`;
    });
    return shape("polyline", { class: className, points: points.join(" ") });
  });
  const latest = series.map(({ name, values }) => `${name} ${short(values.at(-1) ?? 0)}`).join(", ");
  show(place, `${latest}; highest ${short(top)}`, shapes, `${most * seconds} s ago`, `highest ${short(top)}`);
}

/** columns: [{label, values: [one, two]}], the two stacked; `top` is the full height; `mean` draws a line. */
export function drawColumns(place, columns, { top, mean, left, right, summary }) {
  const width = WIDTH / Math.max(columns.length, 1);
  const gap = Math.min(width * 0.2, 6);
  const scale = (HEIGHT - 2) / Math.max(top, 1e-9);
  const shapes = [];
  columns.forEach(({ label, values }, index) => {
    let base = HEIGHT;
    values.forEach((value, which) => {
      const height = Math.max(value, 0) * scale;
      base -= height;
      const box = { x: index * width + gap / 2, y: base, width: width - gap, height, class: which ? "two" : "one" };
      shapes.push(shape("rect", box, label));
    });
  });
  if (mean !== undefined) {
    const y = HEIGHT - mean * scale;
    shapes.push(shape("line", { x1: 0, x2: WIDTH, y1: y, y2: y, class: "mean" }));
  }
  show(place, summary, shapes, left, right);
}
