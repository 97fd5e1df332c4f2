// The live half: reads /server_info and /history once, /get_load and a few names of /metrics every two seconds, and draws them.

import { drawColumns, drawLines, short } from "/page/charts.js";
import { by, parse, quantile, total } from "/page/exposition.js";

const SECONDS = 2;
const MINUTES = 5; // across the charts over time; as long as the server remembers
const FIRST = "vllm:time_to_first_token_seconds";
const BETWEEN = "vllm:inter_token_latency_seconds";
const NAMES = [
  "vllm:prompt_tokens_total", "vllm:generation_tokens_total", "vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total",
  `${FIRST}_bucket`, `${BETWEEN}_bucket`, "dsjax_expert_tokens_total", "dsjax_expert_balancedness",
  "dsjax_compilations_after_warm_up_total",
];
const METRICS = `/metrics?${NAMES.map((name) => `name[]=${encodeURIComponent(name)}`).join("&")}`;

const $ = (id) => document.getElementById(id);
const sum = (values) => values.reduce((all, each) => all + each, 0);
const milliseconds = (seconds) => (seconds === null ? "–" : `${short(seconds * 1000)} ms`);
const percent = (part, whole) => (whole > 0 ? `${Math.round((100 * part) / whole)} %` : "–");

/** What host memory and the disk hold, where there are any, and the share of the prompts' tokens that they had. */
function tilesBelow({ ranks, disk }) {
  const hosts = ranks.map((rank) => rank.host).filter(Boolean);
  if (!hosts.length && !disk) return [];
  const used = (pages) => percent(sum(pages.map((one) => one.used_pages)), sum(pages.map((one) => one.usable_pages)));
  return [
    ...(hosts.length ? [["host memory", used(hosts)]] : []),
    ...(disk ? [["disk", used([disk])]] : []),
    ["hits below", percent(sum(ranks.map(({ hits }) => hits.host + hits.disk)), sum(ranks.map((rank) => rank.queried)))],
  ];
}

/** Watches until the page is left. `headers()` gives what a request needs; `onTrouble(text or null)` is told how it goes. */
export class Watch {
  constructor(headers, onTrouble) {
    this.headers = headers;
    this.onTrouble = onTrouble;
    this.points = []; // [{time, prompts, made, running, waiting}]: sums and load, of the last minutes; times in milliseconds
    this.readings = []; // [{time, samples}], enough for a minute
  }

  async run() {
    for (;;) {
      if (!document.hidden) await this.read();
      await new Promise((resolve) => setTimeout(resolve, SECONDS * 1000));
    }
  }

  async get(path) {
    const response = await fetch(path, { headers: this.headers(), cache: "no-store" }).catch(() => {
      throw new Error("the server does not answer");
    });
    if (response.status === 401) throw new Error("this server wants an API key: type it above");
    if (response.status === 503) throw new Error("the server is not ready: it warms up, or shuts down");
    if (!response.ok) throw new Error(`${path.split("?")[0]} answered ${response.status}`);
    return response;
  }

  async read() {
    try {
      if (!this.info) await this.begin();
      const [load, text] = await Promise.all([
        this.get("/get_load").then((response) => response.json()),
        this.get(METRICS).then((response) => response.text()),
      ]);
      this.below = tilesBelow(load);
      this.show(load.ranks, parse(text));
      this.onTrouble(null);
    } catch (error) {
      this.onTrouble(error.message);
    }
  }

  /** What is served, and what it did before this page was opened. */
  async begin() {
    const [info, models, history] = await Promise.all(
      ["/server_info", "/v1/models", "/history"].map(async (path) => (await this.get(path)).json()),
    );
    this.info = info;
    this.model = models.data[0].id;
    const now = performance.now();
    this.points = history.points.map(({ age, prompt_tokens, generation_tokens, running, waiting }) => (
      { time: now - 1000 * age, prompts: prompt_tokens, made: generation_tokens, running, waiting }
    ));
    const buckets = Object.entries(history.buckets_a_minute_ago).map(([name, counts]) => (
      [`${name}_bucket`, Object.entries(counts).map(([le, value]) => ({ labels: { le }, value }))]
    ));
    this.readings = [{ time: now, samples: new Map(buckets) }];
    $("server").textContent = `${this.model} on ${info.mesh}: ${info.num_devices} × ${info.device_kind}`;
    $("recording").hidden = !info.admin;
  }

  show(ranks, samples) {
    const now = performance.now();
    const minute = this.readings[0];
    this.readings = [...this.readings, { time: now, samples }].slice(-(60 / SECONDS));
    const point = {
      time: now, prompts: total(samples, NAMES[0]), made: total(samples, NAMES[1]),
      running: sum(ranks.map((rank) => rank.running)), waiting: sum(ranks.map((rank) => rank.waiting)),
    };
    // A point so near to the last one makes no rate worth drawing: it takes its place.
    if (this.points.length > 1 && now - this.points.at(-1).time < 500 * SECONDS) this.points.pop();
    this.points = [...this.points, point].filter(({ time }) => now - time <= 60000 * MINUTES);
    const rates = Object.fromEntries(["made", "prompts"].map((name) => [name, this.rates(name, now)]));
    this.showTiles(ranks, samples, minute.samples, rates);
    drawLines($("tokens"), [
      { name: "made", className: "one", points: rates.made },
      { name: "of prompts", className: "two", points: rates.prompts },
    ], 60 * MINUTES);
    drawLines($("load"), ["running", "waiting"].map((name, index) => (
      { name, className: index ? "two" : "one", points: this.points.map((each) => [(now - each.time) / 1000, each[name]]) }
    )), 60 * MINUTES);
    this.showRanks(ranks);
    this.showExperts(samples);
  }

  /** [[seconds ago, tokens a second], …] between each two points. A sum that fell was begun anew, by another server. */
  rates(name, now) {
    return this.points.slice(1).map((point, index) => {
      const before = this.points[index];
      const grown = point[name] >= before[name] ? point[name] - before[name] : point[name];
      return [(now - point.time) / 1000, (1000 * grown) / Math.max(point.time - before.time, 1)];
    });
  }

  showTiles(ranks, samples, old, rates) {
    const held = sum(ranks.map((rank) => rank.used_pages));
    const compiled = total(samples, "dsjax_compilations_after_warm_up_total");
    const tiles = [
      ["running", short(sum(ranks.map((rank) => rank.running)))],
      ["waiting", short(sum(ranks.map((rank) => rank.waiting)))],
      ["tokens/s", short(rates.made.at(-1)?.[1] ?? 0)],
      ["prompt tokens/s", short(rates.prompts.at(-1)?.[1] ?? 0)],
      ["cache held", percent(held, sum(ranks.map((rank) => rank.usable_pages)))],
      ["prefix hits", percent(total(samples, NAMES[3]), total(samples, NAMES[2]))],
      ...this.below,
      ["first token, P50", milliseconds(quantile(old, samples, FIRST, 0.5))],
      ["between tokens, P50", milliseconds(quantile(old, samples, BETWEEN, 0.5))],
    ];
    $("compiled").hidden = !compiled;
    $("compiled").textContent = `${short(compiled)} programs were compiled while serving: requests waited for them.`;
    $("tiles").replaceChildren(...tiles.map(([name, value]) => {
      const tile = document.createElement("div");
      tile.append(Object.assign(document.createElement("dt"), { textContent: name }));
      tile.append(Object.assign(document.createElement("dd"), { textContent: value }));
      return tile;
    }));
  }

  showRanks(ranks) {
    const most = Math.max(0, ...ranks.map((rank) => rank.running + rank.waiting));
    drawColumns($("requests"), ranks.map(({ rank, running, waiting }) => (
      { label: `rank ${rank}: ${running} running, ${waiting} waiting`, values: [running, waiting] }
    )), { of: "rank", summary: `Requests of ${ranks.length} ranks; most on one: ${most}` });
    const held = sum(ranks.map((rank) => rank.used_pages));
    drawColumns($("pages"), ranks.map((rank) => (
      {
        label: `rank ${rank.rank}: ${rank.used_pages} held, ${rank.cached_pages} cached of ${rank.usable_pages}`,
        values: [rank.used_pages, rank.cached_pages],
      }
    )), { of: "rank", summary: `${held} pages held on ${ranks.length} ranks` });
    $("usable").textContent = `of ${short(Math.max(...ranks.map((rank) => rank.usable_pages)))} on each`;
  }

  showExperts(samples) {
    const tokens = [...by(samples, "dsjax_expert_tokens_total", "expert")].sort(([a], [b]) => a - b);
    $("unrecorded").hidden = tokens.length > 0;
    if (!tokens.length) return;
    const most = Math.max(...tokens.map(([, count]) => count));
    const mean = sum(tokens.map(([, count]) => count)) / tokens.length;
    const balance = by(samples, "dsjax_expert_balancedness", "of").get("sums");
    const times = mean > 0 ? `hottest ${(most / mean).toFixed(2)} × mean` : "no tokens yet";
    $("balance").textContent = balance === undefined ? times : `${times}, balancedness of ranks ${balance.toFixed(2)}`;
    drawColumns($("experts"), tokens.map(([expert, count]) => ({ label: `expert ${expert}: ${count} tokens`, values: [count] })), {
      of: "expert", mean, summary: `Tokens of ${tokens.length} experts: ${times}`,
    });
  }
}
