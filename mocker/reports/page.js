// Draws the charts of a report from the data in the page. Plotly decodes the packed columns by itself.
"use strict";
const runs = JSON.parse(document.getElementById("mocker-runs").textContent);
const COLOURS = ["#3366cc", "#d95f02", "#1b9e77", "#c2185b", "#7b4fb5", "#8a6d00", "#00838f", "#616161"];
const MOST_LINES = 12;
const CDFS = [["ttft_ms", "TTFT"], ["ttst_ms", "TTST"], ["tpot_ms", "TPOT, per request"], ["itl_ms", "ITL, pooled"],
  ["e2e_latency_ms", "End to end"]];
const SERIES = [["output_tok_s", "Output tokens / s"], ["arrivals_rps", "Arrivals / s"],
  ["completed_rps", "Completed requests / s"], ["waiting", "Queue depth (requests waiting)"],
  ["running", "Running requests"], ["batch_tokens_per_pass", "Batch tokens (mean a pass)"],
  ["kv_usage", "KV use (share of the pool that requests hold)"], ["kv_cached_blocks", "KV blocks cached, not held"],
  ["kv_host_blocks", "KV blocks in the host tier"], ["kv_disk_blocks", "KV blocks in the disk tier of all workers"],
  ["kv_remote_blocks", "KV blocks in the remote store of all workers"],
  ["cache_hit_ratio", "Cache-hit ratio of prompts at first admission"], ["preemptions", "Preemptions"],
  ["prompt_tok_s", "Prompt tokens computed / s"], ["busy", "Busy (share of the time inside passes)"],
  ["router_queue", "Requests kept back by the router"]];
const CONFIG = { responsive: true, displaylogo: false };

function layout(title, x, y) {
  return { title: { text: title, font: { size: 14 } }, margin: { l: 60, r: 14, t: 34, b: 42 }, hovermode: "closest",
    xaxis: Object.assign({ title: { text: x } }, {}), yaxis: y, legend: { orientation: "h", y: -0.25, font: { size: 10 } },
    paper_bgcolor: "#fff", plot_bgcolor: "#fff", font: { size: 11 } };
}

function box(parent, name) {
  const div = document.createElement("div");
  div.className = "chart";
  div.dataset.chart = name;
  parent.appendChild(div);
  return div;
}

function unpack(packed) {
  const bytes = Uint8Array.from(atob(packed.bdata), (c) => c.charCodeAt(0));
  return new Float32Array(bytes.buffer);
}

function drawCdfs(log) {
  const parent = document.getElementById("cdfs");
  parent.querySelectorAll(".chart").forEach((chart) => Plotly.purge(chart));
  parent.replaceChildren();
  for (const [key, title] of CDFS) {
    const lines = runs.map((run, i) => [run, i]).filter(([run]) => run.cdf && run.cdf[key] && run.cdf[key].samples)
      .map(([run, i]) => ({ type: "scatter", mode: "lines", line: { color: COLOURS[i % COLOURS.length], shape: "hv" },
        name: `${run.name} (${run.cdf[key].samples.toLocaleString("en")})`, x: run.cdf[key].x, y: run.cdf[key].y }));
    if (!lines.length) continue;
    const form = layout(title, "ms", { range: [0, 1.02], tickformat: ".0%" });
    form.xaxis.type = log ? "log" : "linear";
    if (!log) form.xaxis.rangemode = "tozero";
    Plotly.newPlot(box(parent, key), lines, form, CONFIG);
  }
}

function linesOf(view, key) {
  if (view === "total") {
    return runs.map((run, i) => [run, i]).filter(([run]) => run.series && run.series.total[key]).map(([run, i]) => ({
      type: "scatter", mode: "lines", name: run.name, x: run.series.t, y: run.series.total[key], connectgaps: false,
      line: { color: COLOURS[i % COLOURS.length], width: 1.3 } }));
  }
  const series = runs[Number(view)].series;
  const rows = series.of_workers[key];
  if (!rows && !series.total[key]) return [];
  if (!rows) {
    return [{ type: "scatter", mode: "lines", name: "all workers", x: series.t, y: series.total[key],
      line: { color: COLOURS[0], width: 1.3 } }];
  }
  if (rows.length > MOST_LINES) {
    return [{ type: "heatmap", x: series.t, y: series.workers, z: rows.map(unpack), colorscale: "Viridis",
      hoverongaps: false }];
  }
  return rows.map((y, w) => ({ type: "scatter", mode: "lines", name: series.workers[w], x: series.t, y,
    line: { color: COLOURS[w % COLOURS.length], width: 1.3 } }));
}

function anything(packed) {
  return packed && unpack(packed).some((value) => value > 0);
}

let zooming = false;
function follow(charts, event) {
  if (zooming) return;
  const change = {};
  if (event["xaxis.autorange"]) change["xaxis.autorange"] = true;
  else if (event["xaxis.range[0]"] !== undefined) {
    change["xaxis.range"] = [event["xaxis.range[0]"], event["xaxis.range[1]"]];
  } else return;
  zooming = true;
  Promise.all(charts.map((chart) => Plotly.relayout(chart, change))).finally(() => { zooming = false; });
}

function drawSeries(view) {
  const parent = document.getElementById("series");
  parent.querySelectorAll(".chart").forEach((chart) => Plotly.purge(chart));
  parent.replaceChildren();
  const charts = [];
  for (const [key, title] of SERIES) {
    const always = key !== "preemptions" && key !== "router_queue" && !/^kv_(host|disk|remote)_blocks$/.test(key);
    if (!always && !runs.some((run) => run.series && anything(run.series.total[key]))) continue;
    const lines = linesOf(view, key);
    if (!lines.length) continue;
    const share = key === "kv_usage" || key === "cache_hit_ratio" || key === "busy";
    const form = layout(title, "simulated time, s", lines[0].type === "heatmap" ? { type: "category", automargin: true }
      : { rangemode: "tozero", tickformat: share ? ".0%" : undefined });
    const chart = box(parent, key);
    charts.push(chart);
    Plotly.newPlot(chart, lines, form, CONFIG).then(() => chart.on("plotly_relayout", (e) => follow(charts, e)));
  }
}

function draw() {
  drawCdfs(false);
  document.getElementById("log").addEventListener("change", (e) => drawCdfs(e.target.checked));
  const view = document.getElementById("view");
  if (view) {
    drawSeries(view.value);
    view.addEventListener("change", () => drawSeries(view.value));
  }
  document.documentElement.dataset.drawn = document.querySelectorAll(".chart .main-svg").length;
}

async function load(packed) {
  const text = atob(packed.trim());
  const bytes = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  const script = document.createElement("script");
  script.textContent = await new Response(stream).text();
  document.head.appendChild(script);
}

const library = document.getElementById("plotly");
if (!library) draw();
else if (window.DecompressionStream) load(library.textContent).then(draw);
else document.getElementById("cdfs").textContent = "Charts need a browser of 2023 or later (DecompressionStream).";
