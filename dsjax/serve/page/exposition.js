// Prometheus's text format, read; rates and quantiles of two readings. No DOM here.

const LINE = /^([A-Za-z_:][A-Za-z0-9_:]*)(?:\{(.*)\})?\s+(\S+)(?:\s+-?\d+)?$/;
const LABEL = /([A-Za-z_][A-Za-z0-9_]*)="((?:[^"\\]|\\.)*)"/g;
const ESCAPES = { n: "\n", "\\": "\\", '"': '"' };

function number(text) {
  if (text === "+Inf" || text === "Inf") return Infinity;
  if (text === "-Inf") return -Infinity;
  return Number(text); // "NaN" is NaN
}

function labelsOf(text) {
  const labels = {};
  for (const [, name, value] of (text ?? "").matchAll(LABEL)) {
    labels[name] = value.replace(/\\(.)/g, (whole, letter) => ESCAPES[letter] ?? whole);
  }
  return labels;
}

/** Text to Map of a sample's name to [{labels, value}, …]. Lines that are no samples are passed over. */
export function parse(text) {
  const samples = new Map();
  for (const line of text.split("\n")) {
    const found = line.startsWith("#") ? null : LINE.exec(line.trim());
    if (!found) continue;
    const [, name, labels, value] = found;
    if (!samples.has(name)) samples.set(name, []);
    samples.get(name).push({ labels: labelsOf(labels), value: number(value) });
  }
  return samples;
}

/** The sum of a name's samples by one label's values, or under "" without a label. */
export function by(samples, name, label) {
  const sums = new Map();
  for (const { labels, value } of samples.get(name) ?? []) {
    const key = label === undefined ? "" : labels[label] ?? "";
    sums.set(key, (sums.get(key) ?? 0) + value);
  }
  return sums;
}

/** The sum of all samples of a name. */
export function total(samples, name) {
  return by(samples, name).get("") ?? 0;
}

/** The quantile of what a histogram got between two readings, linear within a bucket; null where it got nothing. */
export function quantile(before, after, name, share) {
  const old = by(before, `${name}_bucket`, "le");
  const buckets = [...by(after, `${name}_bucket`, "le")].map(([le, count]) => [number(le), count - (old.get(le) ?? 0)]);
  buckets.sort((a, b) => a[0] - b[0]);
  const all = buckets.length ? buckets[buckets.length - 1][1] : 0;
  if (!(all > 0)) return null;
  let lower = 0;
  let count = 0;
  for (const [bound, upTo] of buckets) {
    if (upTo >= share * all && upTo > count) {
      return bound === Infinity ? lower : lower + ((bound - lower) * (share * all - count)) / (upTo - count);
    }
    [lower, count] = [bound, upTo];
  }
  return lower;
}
