// One run's page: asks for its last rounds whenever they changed, and draws them.
import { Curve } from "./curves.js";
import { HeatMap, unusual } from "./heatmap.js";
import { follow } from "./live.js";

const ROUNDS = 160, BLOCKS = 64, RETRY_MS = 2000;
const run = document.getElementById("main").dataset.run;
const everyone = document.getElementById("all-ranks");
const curves = [...document.querySelectorAll("[data-curve]")].map((figure) => new Curve(figure));
const heatmap = new HeatMap(document.getElementById("heatmap"), document.getElementById("heat-readout"), zoom);
let shown = { first: 0, count: 0 };

async function draw() {
  const query = new URLSearchParams({ run_id: run, last: ROUNDS, blocks: BLOCKS, ...shown });
  const response = await fetch(`/api/v1/rounds?${query}`);
  if (!response.ok) {
    // A busy coordinator answers late, and a run that is over need not change again to be drawn.
    setTimeout(draw, RETRY_MS);
    return;
  }
  const answer = await response.json();
  heatmap.show(answer);
  for (const curve of curves) curve.show(answer.rounds);
  list(unusual(answer));
  document.documentElement.dataset.drawn = String(answer.rounds.length);
}

function zoom(first, count) {
  shown = { first, count };
  everyone.hidden = count === 0;
  heatmap.cursor = null;
  draw();
}

function list(rows) {
  const body = document.querySelector("#unusual tbody");
  body.replaceChildren(...rows.map((cells) => {
    const row = document.createElement("tr");
    for (const cell of cells) row.insertCell().textContent = cell;
    return row;
  }));
}

everyone.addEventListener("click", () => { zoom(0, 0); document.getElementById("heatmap").focus(); });
if ("watched" in document.getElementById("main").dataset) draw();
follow(run, draw);
