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

function draw() {
  const number = (id) => Number(document.getElementById(id).value);
  const count = number("keys");
  const temperature = 10 ** number("temperature");
  const query = number("query");
  const keys = Array.from({ length: count }, (_, j) => -2 + (4 * (j + 0.5)) / count);
  const values = keys.map((k) => Math.sin(2 * k));
  const bias = keys.map((k) => -number("bias") * (k - 0.5) ** 2);
  const style = getComputedStyle(document.body);
  const ink = style.getPropertyValue("color");
  for (const kind of ["dot", "gaussian", "hardmax"]) {
    const w = weights(kind, query, keys, temperature, bias);
    const bars = w.map(
      (x, j) => `<rect x="${(300 * j) / count}" y="${100 - 100 * x}" height="${100 * x}"
        width="${(300 / count) * 0.8}" fill="#4477aa"><title>key ${keys[j].toFixed(2)}:
        ${x.toFixed(3)}</title></rect>`,
    );
    document.getElementById(kind).innerHTML = bars.join("");
  }
  const edge = 1 / temperature;
  const panels = number("panels");
  const nodes = number("nodes");
  const at = (t) => 150 + (145 * t) / edge;
  const height = (y) => 50 - 45 * y;
  const line = Array.from({ length: 301 }, (_, i) => {
    const t = -edge + (2 * edge * i) / 300;
    return `${at(t)},${height(output(t, keys, values, bias))}`;
  });
  const dots = panelNodes(edge, panels, nodes).flatMap((panel) => [
    ...panel.map(
      (t) => `<circle cx="${at(t)}" cy="${height(output(t, keys, values, bias))}" r="1.8"
        fill="#cc3311"/>`,
    ),
  ]);
  const borders = Array.from({ length: panels + 1 }, (_, p) => {
    const x = at(-edge + (2 * edge * p) / panels);
    return `<line x1="${x}" x2="${x}" y1="0" y2="100" stroke="${ink}" stroke-opacity="0.2"/>`;
  });
  document.getElementById("table").innerHTML =
    `${borders.join("")}<polyline points="${line.join(" ")}" fill="none" stroke="${ink}"/>` +
    dots.join("");
  const error = tableError(edge, panels, nodes, keys, values, bias);
  document.getElementById("error").textContent = error.toExponential(1);
  for (const slider of document.querySelectorAll("#explore input"))
    slider.nextElementSibling.textContent =
      slider.id === "temperature" ? temperature.toPrecision(2) : slider.value;
}

if (typeof document !== "undefined") {
  for (const slider of document.querySelectorAll("#explore input"))
    slider.addEventListener("input", draw);
  draw();
}
if (typeof module !== "undefined")
  module.exports = { weights, output, panelNodes, interpolate, tableError };
