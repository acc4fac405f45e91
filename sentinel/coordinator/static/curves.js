// Curves of the last rounds as SVG: a line with gaps where nothing finite was told, marks where it was NaN or infinite.
// Owns scales, axes and the readout under each figure.

const NS = "http://www.w3.org/2000/svg";
const PAD = { left: 56, right: 10, top: 8, bottom: 20 };

const CURVES = {
  loss: { value: (r) => r.loss_mean, low: (r) => r.loss_min, high: (r) => r.loss_max, none: "No loss was told." },
  loss_scale: { value: (r) => r.loss_scale, log: true, steps: true, none: "No GradScaler in this run." },
  gradient_norm: { value: (r) => r.gradient_norm, log: true, none: "No gradient was reduced." },
  seconds: { value: (r) => r.seconds, unit: " s", zero: true, none: "Two rounds are needed." },
};

function element(name, attributes, text) {
  const made = document.createElementNS(NS, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

const finite = (value) => typeof value === "number" && Number.isFinite(value);

export function short(value) {
  if (!finite(value)) return String(value);
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) return value.toExponential(1).replace("e+", "e");
  return String(Number(value.toPrecision(size >= 1000 ? 5 : 3)));
}

// Round numbers between two bounds: multiples of 1, 2 or 5 times a power of ten.
function steps(low, high) {
  const rough = (high - low) / 3.5, ten = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * ten).find((size) => size >= rough);
  const found = [];
  for (let at = Math.ceil(low / step); at * step <= high; at++) found.push(at * step);
  return found;
}

// Powers of two between two exponents, at most five.
function powers(low, high) {
  const apart = Math.max(1, Math.ceil((high - low) / 4)), found = [];
  for (let exponent = Math.ceil(low); exponent <= high; exponent += apart) found.push(2 ** exponent);
  return found;
}

export class Curve {
  constructor(figure) {
    this.spec = CURVES[figure.dataset.curve];
    this.plot = figure.querySelector(".plot");
    this.readout = figure.querySelector("output");
    this.title = figure.querySelector("figcaption").firstChild.textContent.trim();
    this.rounds = [];
    this.at = null;
    this.plot.addEventListener("pointermove", (event) => this.point(event));
    this.plot.addEventListener("pointerleave", () => this.move(null));
    new ResizeObserver(() => this.draw()).observe(this.plot);
  }

  show(rounds) {
    this.rounds = rounds;
    this.at = null;
    this.draw();
  }

  draw() {
    const { spec, rounds } = this;
    const values = rounds.flatMap((r) => [spec.value(r), spec.low?.(r), spec.high?.(r)]).filter(finite);
    const usable = spec.log ? values.filter((value) => value > 0) : values;
    this.plot.replaceChildren();
    if (!usable.length) {
      this.readout.textContent = spec.none;
      return;
    }
    this.scale(usable);
    const svg = element("svg", { role: "img", tabindex: "0", "aria-label": this.label() });
    svg.addEventListener("keydown", (event) => this.key(event));
    this.axes(svg);
    this.faults(svg);
    if (spec.low) this.band(svg);
    this.line(svg);
    this.cursor = element("line", { class: "cursor", y1: PAD.top, y2: this.height - PAD.bottom, visibility: "hidden" });
    svg.append(this.cursor);
    this.plot.append(svg);
    this.tell();
  }

  scale(values) {
    this.width = this.plot.clientWidth;
    this.height = this.plot.clientHeight;
    const map = this.spec.log ? Math.log2 : (value) => value;
    let low = Math.min(...values.map(map)), high = Math.max(...values.map(map));
    if (this.spec.zero) low = Math.min(0, low);
    const room = Math.max((high - low) * 0.06, this.spec.log ? 0.6 : 0) || Math.abs(high) * 0.1 || 1;
    [low, high] = [this.spec.zero ? low : low - room, high + room];
    const tall = this.height - PAD.top - PAD.bottom, wide = this.width - PAD.left - PAD.right;
    this.low = low;
    this.high = high;
    this.y = (value) => PAD.top + tall * (1 - (map(value) - low) / (high - low));
    this.x = (index) => PAD.left + (this.rounds.length > 1 ? (wide * index) / (this.rounds.length - 1) : wide / 2);
  }

  axes(svg) {
    for (const value of this.spec.log ? powers(this.low, this.high) : steps(this.low, this.high)) {
      const y = this.y(value);
      svg.append(element("line", { class: "grid", x1: PAD.left, x2: this.width - PAD.right, y1: y, y2: y }));
      svg.append(element("text", { x: PAD.left - 8, y: y + 4, "text-anchor": "end" }, short(value) + (this.spec.unit ?? "")));
    }
    const last = this.rounds.length - 1;
    svg.append(element("text", { x: PAD.left, y: this.height - 4 }, `step ${this.rounds[0].step}`));
    svg.append(element("text", { x: this.width - PAD.right, y: this.height - 4, "text-anchor": "end" }, String(this.rounds[last].step)));
  }

  // Rounds in which a rank had nonfinite values of its own, as lines; values that were NaN or infinite, as marks on the axis.
  faults(svg) {
    this.rounds.forEach((round, index) => {
      const x = this.x(index), bottom = this.height - PAD.bottom;
      if (round.blocks.includes("4")) svg.append(element("line", { class: "fault", x1: x, x2: x, y1: PAD.top, y2: bottom }));
      if (typeof this.spec.value(round) === "string") svg.append(element("circle", { class: "nonfinite", cx: x, cy: bottom, r: 3.5 }));
    });
  }

  band(svg) {
    for (const piece of this.pieces((r) => finite(this.spec.low(r)) && finite(this.spec.high(r)))) {
      const up = piece.map((index) => `${this.x(index)},${this.y(this.spec.high(this.rounds[index]))}`);
      const down = [...piece].reverse().map((index) => `${this.x(index)},${this.y(this.spec.low(this.rounds[index]))}`);
      svg.append(element("polygon", { class: "band", points: [...up, ...down].join(" ") }));
    }
  }

  line(svg) {
    const good = (round) => finite(this.spec.value(round)) && (!this.spec.log || this.spec.value(round) > 0);
    for (const piece of this.pieces(good)) {
      const points = piece.map((index) => [this.x(index), this.y(this.spec.value(this.rounds[index]))]);
      if (points.length === 1) svg.append(element("circle", { class: "dot", cx: points[0][0], cy: points[0][1], r: 2.5 }));
      const path = points.map(([x, y], at) => (at === 0 ? `M${x},${y}` : this.spec.steps ? `H${x}V${y}` : `L${x},${y}`)).join("");
      svg.append(element("path", { class: "line", d: path }));
    }
  }

  // Indices of rounds that follow each other and fulfil `good`.
  pieces(good) {
    const pieces = [[]];
    this.rounds.forEach((round, index) => (good(round) ? pieces[pieces.length - 1].push(index) : pieces.push([])));
    return pieces.filter((piece) => piece.length);
  }

  point(event) {
    if (!this.x || !this.rounds.length) return;
    const wide = this.width - PAD.left - PAD.right;
    const share = (event.clientX - this.plot.getBoundingClientRect().left - PAD.left) / wide;
    this.move(Math.max(0, Math.min(this.rounds.length - 1, Math.round(share * (this.rounds.length - 1)))));
  }

  key(event) {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!step) return;
    event.preventDefault();
    const last = this.rounds.length - 1;
    this.move(Math.max(0, Math.min(last, (this.at ?? last + (step < 0 ? 1 : 0)) + step)));
  }

  move(at) {
    this.at = at;
    if (this.cursor) {
      this.cursor.setAttribute("visibility", at === null ? "hidden" : "visible");
      if (at !== null) for (const end of ["x1", "x2"]) this.cursor.setAttribute(end, this.x(at));
    }
    this.tell();
  }

  tell() {
    const round = this.rounds[this.at ?? this.rounds.length - 1];
    if (!round) return;
    const { spec } = this, value = spec.value(round), unit = spec.unit ?? "";
    const spread = spec.low && finite(spec.low(round)) ? ` (${short(spec.low(round))} to ${short(spec.high(round))})` : "";
    const told = value === null ? "not told" : `${short(value)}${unit}${spread}`;
    this.readout.textContent = `${this.at === null ? "Newest, step" : "Step"} ${round.step}: ${told}`;
  }

  label() {
    const told = this.rounds.filter((round) => finite(this.spec.value(round)));
    if (!told.length) return `${this.title}: nothing finite`;
    const first = told[0], last = told[told.length - 1];
    return `${this.title} from ${short(this.spec.value(first))} at step ${first.step} to ${short(this.spec.value(last))} at step ${last.step}`;
  }
}
