// The mathematics of the page explore.md; drawn at the end. Nothing is fetched.
"use strict";

// softmax of logits.
function softmax(logits) {
  const most = Math.max(...logits);
  const e = logits.map((x) => Math.exp(x - most));
  const sum = e.reduce((a, b) => a + b, 0);
  return e.map((x) => x / sum);
}

// The weights of one query over the keys, by the kind of head.
function weights(kind, query, keys, temperature, bias) {
  if (kind === "hardmax") {
    const scores = keys.map((k, j) => query * k + bias[j] * temperature);
    const most = Math.max(...scores);
    const ties = scores.filter((x) => x === most).length;
    return scores.map((x) => (x === most ? 1 / ties : 0));
  }
  const score = kind === "dot" ? (k) => query * k : (k) => -0.5 * (query - k) ** 2;
  return softmax(keys.map((k, j) => score(k) / temperature + bias[j]));
}

// F(t): the output of a dot head with values v at inverse temperature t, and its bias.
function output(t, keys, values, bias) {
  const w = softmax(keys.map((k, j) => t * k + bias[j]));
  return w.reduce((sum, x, j) => sum + x * values[j], 0);
}

// Chebyshev points of every panel: `panels` panels of `count` nodes over [-edge, edge].
function panelNodes(edge, panels, count) {
  const half = edge / panels;
  return Array.from({ length: panels }, (_, p) => {
    const middle = -edge + (2 * p + 1) * half;
    return Array.from(
      { length: count },
      (_, i) => middle - half * Math.cos((Math.PI * (i + 0.5)) / count),
    );
  });
}

// The polynomial through (nodes, samples) at t, by the barycentric formula for Chebyshev points.
function interpolate(t, nodes, samples) {
  let above = 0;
  let below = 0;
  for (let i = 0; i < nodes.length; ++i) {
    if (t === nodes[i]) return samples[i];
    const w = ((i % 2 ? -1 : 1) * Math.sin((Math.PI * (i + 0.5)) / nodes.length)) / (t - nodes[i]);
    above += w * samples[i];
    below += w;
  }
  return above / below;
}

// The largest difference between F and its table over [-edge, edge].
function tableError(edge, panels, count, keys, values, bias) {
  let worst = 0;
  for (const nodes of panelNodes(edge, panels, count)) {
    const samples = nodes.map((t) => output(t, keys, values, bias));
    const left = nodes[0];
    const right = nodes[count - 1];
    for (let i = 0; i <= 50; ++i) {
      const t = left + ((right - left) * i) / 50;
      const gap = interpolate(t, nodes, samples) - output(t, keys, values, bias);
      worst = Math.max(worst, Math.abs(gap));
    }
  }
  return worst;
}

// Bars of weights over the keys, with the largest weight and the ends of the axis in numbers.
function bars(w, keys, width) {
  const step = width / w.length;
  const most = Math.max(...w);
  const drawn = w.map(
    (x, j) => `<rect class="bar" x="${step * (j + 0.1)}" y="${84 - 70 * x}" height="${70 * x}"
      width="${0.8 * step}"><title>key ${keys[j].toFixed(2)}: ${x.toFixed(3)}</title></rect>`,
  );
  const at = Math.min(Math.max((w.indexOf(most) + 0.5) * step, 16), width - 16);
  return `${drawn.join("")}<line class="faint" x1="0" x2="${width}" y1="84" y2="84"/>
    <text x="0" y="97">key -2</text><text x="${width}" y="97" text-anchor="end">2</text>
    <text class="most" x="${at}" y="${81 - 70 * most}" text-anchor="middle">${most.toFixed(3)}</text>`;
}

function draw() {
  const number = (id) => Number(document.getElementById(id).value);
  const count = number("keys");
  const temperature = 10 ** number("temperature");
  const query = number("query");
  const keys = Array.from({ length: count }, (_, j) => -2 + (4 * (j + 0.5)) / count);
  const values = keys.map((k) => Math.sin(2 * k));
  const bias = keys.map((k) => -number("bias") * (k - 0.5) ** 2);
  const width = document.getElementById("table").clientWidth;
  for (const kind of ["dot", "gaussian", "hardmax"])
    document.getElementById(kind).innerHTML = bars(
      weights(kind, query, keys, temperature, bias),
      keys,
      width,
    );
  const edge = 1 / temperature;
  const panels = number("panels");
  const nodes = number("nodes");
  const place = (t, y) => `${(width * (1 + (0.98 * t) / edge)) / 2},${80 - 72 * Math.max(-2, Math.min(2, y))}`;
  const f = (t) => output(t, keys, values, bias);
  const tables = panelNodes(edge, panels, nodes).map((places) => ({
    places,
    samples: places.map(f),
  }));
  const steps = 60;
  const path = (panel, y) =>
    Array.from({ length: steps + 1 }, (_, i) => {
      const t = -edge + (2 * edge * (panel + i / steps)) / panels;
      return place(t, y(t));
    }).join(" ");
  const lines = tables.map(
    ({ places, samples }, p) => `<polyline class="ink" points="${path(p, f)}"/>
      <polyline class="table" points="${path(p, (t) => interpolate(t, places, samples))}"/>`,
  );
  const dots = tables.flatMap(({ places, samples }) =>
    places.map((t, i) => {
      const [x, y] = place(t, samples[i]).split(",");
      return `<circle class="node" cx="${x}" cy="${y}" r="2.5"/>`;
    }),
  );
  const borders = Array.from({ length: panels + 1 }, (_, p) => {
    const x = width * (0.01 + (0.98 * p) / panels);
    return `<line class="faint" x1="${x}" x2="${x}" y1="0" y2="160"/>`;
  });
  document.getElementById("table").innerHTML =
    `${borders.join("")}${lines.join("")}${dots.join("")}
    <text x="0" y="174">t = ${(-edge).toPrecision(2)}</text>
    <text x="${width}" y="174" text-anchor="end">${edge.toPrecision(2)}</text>`;
  const error = tableError(edge, panels, nodes, keys, values, bias);
  document.getElementById("error").textContent = error.toExponential(1);
  for (const slider of document.querySelectorAll("#explore input"))
    slider.nextElementSibling.textContent =
      slider.id === "temperature" ? temperature.toPrecision(2) : slider.value;
}

if (typeof document !== "undefined") {
  for (const slider of document.querySelectorAll("#explore input"))
    slider.addEventListener("input", draw);
  window.addEventListener("resize", draw);
  draw();
}
if (typeof module !== "undefined")
  module.exports = { weights, output, panelNodes, interpolate, tableError };
