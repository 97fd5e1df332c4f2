// The live half: reads /server_info once, /get_load and a few names of /metrics every two seconds, and draws them.

import { drawColumns, drawLines, short } from "/page/charts.js";
import { by, grown, parse, quantile, total } from "/page/exposition.js";

const SECONDS = 2;
const POINTS = 60;
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

/** Watches until the page is left. `headers()` gives what a request needs; `onTrouble(text or null)` is told how it goes. */
export class Watch {
  constructor(headers, onTrouble) {
    this.headers = headers;
    this.onTrouble = onTrouble;
    this.history = []; // [{time, samples}], enough for a minute
    this.made = [];
    this.prompts = [];
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
      if (!this.info) {
        const [info, models] = await Promise.all(["/server_info", "/v1/models"].map(async (path) => (await this.get(path)).json()));
        this.info = info;
        this.model = models.data[0].id;
        $("server").textContent = `${this.model} on ${info.mesh}: ${info.num_devices} × ${info.device_kind}`;
      }
      const [load, text] = await Promise.all([
        this.get("/get_load").then((response) => response.json()),
        this.get(METRICS).then((response) => response.text()),
      ]);
      this.show(load.ranks, parse(text));
      this.onTrouble(null);
    } catch (error) {
      this.onTrouble(error.message);
    }
  }

  show(ranks, samples) {
    const now = performance.now();
    const last = this.history.at(-1);
    const minute = this.history[0];
    this.history = [...this.history, { time: now, samples }].slice(-(60 / SECONDS));
    if (last) {
      const seconds = (now - last.time) / 1000;
      for (const [values, name] of [[this.made, NAMES[1]], [this.prompts, NAMES[0]]]) {
        values.push(grown(last.samples, samples, name) / seconds);
        if (values.length > POINTS) values.shift();
      }
    }
    this.showTiles(ranks, samples, (minute ?? { samples }).samples);
    drawLines($("tokens"), [
      { name: "made", className: "one", values: this.made },
      { name: "of prompts", className: "two", values: this.prompts },
    ], POINTS, SECONDS);
    this.showRanks(ranks);
    this.showExperts(samples);
  }

  showTiles(ranks, samples, old) {
    const held = sum(ranks.map((rank) => rank.used_pages));
    const compiled = total(samples, "dsjax_compilations_after_warm_up_total");
    const tiles = [
      ["running", short(sum(ranks.map((rank) => rank.running)))],
      ["waiting", short(sum(ranks.map((rank) => rank.waiting)))],
      ["tokens/s", short(this.made.at(-1) ?? 0)],
      ["cache held", percent(held, sum(ranks.map((rank) => rank.usable_pages)))],
      ["prefix hits", percent(total(samples, NAMES[3]), total(samples, NAMES[2]))],
      ["first token, P50", milliseconds(quantile(old, samples, FIRST, 0.5))],
      ["between tokens, P50", milliseconds(quantile(old, samples, BETWEEN, 0.5))],
      ...(compiled ? [["compiled while serving", short(compiled)]] : []),
    ];
    $("tiles").replaceChildren(...tiles.map(([name, value]) => {
      const tile = document.createElement("div");
      tile.append(Object.assign(document.createElement("dt"), { textContent: name }));
      tile.append(Object.assign(document.createElement("dd"), { textContent: value }));
      return tile;
    }));
  }

  showRanks(ranks) {
    const ends = { left: "rank 0", right: `rank ${ranks.length - 1}` };
    const most = Math.max(1, ...ranks.map((rank) => rank.running + rank.waiting));
    drawColumns($("requests"), ranks.map(({ rank, running, waiting }) => (
      { label: `rank ${rank}: ${running} running, ${waiting} waiting`, values: [running, waiting] }
    )), { top: most, ...ends, summary: `Requests of ${ranks.length} ranks; most on one: ${most}` });
    const held = sum(ranks.map((rank) => rank.used_pages));
    drawColumns($("pages"), ranks.map((rank) => (
      {
        label: `rank ${rank.rank}: ${rank.used_pages} held, ${rank.cached_pages} cached of ${rank.usable_pages}`,
        values: [rank.used_pages, rank.cached_pages],
      }
    )), { top: Math.max(...ranks.map((rank) => rank.usable_pages)), ...ends, summary: `${held} pages held on ${ranks.length} ranks` });
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
      top: most, mean, left: "expert 0", right: `expert ${tokens.length - 1}`, summary: `Tokens of ${tokens.length} experts: ${times}`,
    });
  }
}
