// Ranks by rounds on a canvas: a column per round, a row per block of ranks, the worst of the block as colour.
// Owns drawing, pointing and keys. What the digits mean comes with the answer (legend).

const NAMES = ["nothing", "clean", "skipped", "received", "own"];
const BOTTOM = 22, FONT = "11px system-ui, sans-serif";
const OWN = 4; // drawn last and a little larger: one rank of 16,384 must be seen

export class HeatMap {
  constructor(canvas, readout, openBlock) {
    this.canvas = canvas;
    this.readout = readout;
    this.openBlock = openBlock;
    this.answer = null;
    this.cursor = null;
    canvas.addEventListener("pointermove", (event) => this.point(event));
    canvas.addEventListener("pointerleave", () => { if (document.activeElement !== canvas) this.move(null); });
    canvas.addEventListener("click", (event) => { this.point(event); this.open(); });
    canvas.addEventListener("keydown", (event) => this.key(event));
    new ResizeObserver(() => this.draw()).observe(canvas);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
  }

  show(answer) {
    this.answer = answer;
    this.rows = Math.max(1, Math.ceil(answer.ranks / answer.ranks_per_block));
    if (this.cursor) this.cursor.column = Math.min(this.cursor.column, this.columns().length - 1);
    this.canvas.setAttribute("aria-label", this.summary());
    this.draw();
    this.tell();
  }

  // The newest rounds that fit.
  columns() {
    const fit = Math.max(10, Math.floor((this.canvas.clientWidth - this.left()) / 7));
    return this.answer ? this.answer.rounds.slice(-fit) : [];
  }

  // Room for the longest name of a row.
  left() {
    const longest = this.answer ? String(this.answer.first_rank + this.answer.ranks).length : 4;
    return 40 + 7 * longest;
  }

  draw() {
    const { canvas, answer } = this;
    if (!answer || canvas.clientWidth <= this.left()) return;
    const rowHeight = Math.max(4, Math.min(26, 340 / this.rows));
    const height = Math.round(rowHeight * this.rows) + BOTTOM;
    canvas.style.height = `${height}px`;
    const ratio = devicePixelRatio || 1, width = canvas.clientWidth;
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    const pen = canvas.getContext("2d");
    pen.scale(ratio, ratio);
    const columns = this.columns();
    const left = this.left();
    this.geometry = { left, rowHeight, columnWidth: Math.min(22, (width - left) / Math.max(columns.length, 1)) };
    pen.fillStyle = getComputedStyle(document.documentElement).getPropertyValue("--nothing");
    pen.fillRect(left, 0, width - left, rowHeight * this.rows);
    this.cells(pen, columns);
    this.labels(pen, columns);
    this.frame(pen);
  }

  cells(pen, columns) {
    const { left, rowHeight, columnWidth } = this.geometry;
    const style = getComputedStyle(document.documentElement);
    const colours = NAMES.map((name) => style.getPropertyValue(`--${name}`).trim());
    const gapX = columnWidth > 6 ? 1 : 0.5, gapY = rowHeight > 7 ? 1 : 0;
    const own = [];
    columns.forEach((round, column) => {
      for (let row = 0; row < this.rows; row++) {
        const seen = Number(round.blocks[row] ?? 0);
        if (seen === OWN) own.push([column, row]);
        pen.fillStyle = colours[seen];
        if (seen) pen.fillRect(left + column * columnWidth, row * rowHeight, columnWidth - gapX, rowHeight - gapY);
      }
    });
    const more = rowHeight < 9 ? 1.5 : 0;
    pen.fillStyle = colours[OWN];
    for (const [column, row] of own) {
      pen.fillRect(left + column * columnWidth - more, row * rowHeight - more, columnWidth - gapX + 2 * more, rowHeight - gapY + 2 * more);
    }
  }

  labels(pen, columns) {
    const { left, rowHeight, columnWidth } = this.geometry;
    pen.fillStyle = getComputedStyle(document.documentElement).getPropertyValue("--muted");
    pen.font = FONT;
    pen.textAlign = "right";
    pen.textBaseline = "middle";
    const every = Math.ceil(16 / rowHeight);
    for (let row = 0; row < this.rows; row += every) {
      pen.fillText(`rank ${this.firstOf(row)}`, left - 8, Math.max(6, (row + 0.5) * rowHeight));
    }
    pen.textAlign = "left";
    const apart = Math.ceil(58 / columnWidth), y = this.rows * rowHeight + 12;
    for (let column = 0; column < columns.length; column += apart) {
      pen.fillText(column ? `${columns[column].step}` : `step ${columns[0].step}`, left + column * columnWidth, y);
    }
  }

  frame(pen) {
    if (!this.cursor) return;
    const { left, rowHeight, columnWidth } = this.geometry;
    pen.strokeStyle = getComputedStyle(document.documentElement).getPropertyValue("--ink");
    pen.lineWidth = 2;
    pen.strokeRect(left + this.cursor.column * columnWidth - 1, this.cursor.row * rowHeight - 1, columnWidth + 1, rowHeight + 1);
  }

  firstOf(row) { return this.answer.first_rank + row * this.answer.ranks_per_block; }

  ranksOf(row) {
    const first = this.firstOf(row);
    const last = Math.min(first + this.answer.ranks_per_block, this.answer.first_rank + this.answer.ranks) - 1;
    return first === last ? `rank ${first}` : `ranks ${first} to ${last}`;
  }

  point(event) {
    if (!this.geometry) return;
    const box = this.canvas.getBoundingClientRect();
    const column = Math.floor((event.clientX - box.left - this.geometry.left) / this.geometry.columnWidth);
    const row = Math.floor((event.clientY - box.top) / this.geometry.rowHeight);
    const inside = column >= 0 && column < this.columns().length && row >= 0 && row < this.rows;
    this.move(inside ? { column, row } : null);
  }

  key(event) {
    const steps = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
    if (event.key === "Enter") return this.open();
    if (!steps || !this.answer) return;
    event.preventDefault();
    const last = this.columns().length - 1;
    const at = this.cursor ?? { column: last + (steps[0] === -1 ? 1 : 0), row: 0 };
    const clamp = (value, top) => Math.max(0, Math.min(top, value));
    this.move({ column: clamp(at.column + steps[0], last), row: clamp(at.row + steps[1], this.rows - 1) });
  }

  move(cursor) {
    this.cursor = cursor;
    this.draw();
    this.tell();
  }

  open() {
    if (!this.cursor || this.answer.ranks_per_block === 1) return;
    const first = this.firstOf(this.cursor.row);
    this.openBlock(first, Math.min(this.answer.ranks_per_block, this.answer.first_rank + this.answer.ranks - first));
  }

  tell() {
    const round = this.cursor && this.columns()[this.cursor.column];
    this.readout.textContent = round
      ? `Step ${round.step}, ${this.ranksOf(this.cursor.row)}: ${this.answer.legend[round.blocks[this.cursor.row] ?? "0"]}`
      : this.summary();
  }

  summary() {
    const { answer } = this;
    if (!answer || !answer.rounds.length) return "No round has ended yet.";
    const newest = answer.rounds[answer.rounds.length - 1];
    const own = answer.rounds.filter((round) => round.blocks.includes("4"));
    const found = own.length
      ? `own nonfinite values in ${own.length} round${own.length === 1 ? "" : "s"}, first at step ${own[0].step}`
      : "no rank had nonfinite values of its own";
    return `${answer.ranks} rank${answer.ranks === 1 ? "" : "s"}, ${answer.rounds.length} rounds up to step ${newest.step}: ${found}.`;
  }
}

// Rows of the table that says the same in words: rounds in which anything but a clean step was seen.
export function unusual(answer) {
  const found = [];
  for (const round of [...answer.rounds].reverse()) {
    for (const digit of ["4", "3", "2"]) {
      const rows = [...round.blocks].flatMap((seen, row) => (seen === digit ? [row] : []));
      if (rows.length) found.push([round.step, round.round, answer.legend[digit], ranges(rows, answer)]);
    }
  }
  return found.slice(0, 100);
}

function ranges(rows, answer) {
  if (rows.length * answer.ranks_per_block >= answer.ranks) return "all shown";
  const { first_rank: first, ranks_per_block: size } = answer;
  const names = rows.slice(0, 12).map((row) => (size === 1 ? `${first + row}` : `${first + row * size}–${first + (row + 1) * size - 1}`));
  return names.join(", ") + (rows.length > 12 ? `, … (${rows.length})` : "");
}
