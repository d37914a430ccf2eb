// A strip chart: the last minutes of one figure, the newest at the right edge.

const SVG = "http://www.w3.org/2000/svg";
const HEIGHT = 80;
const PLOT = { top: 7, bottom: 64, right: 46 }; // the right margin has the scale, the bottom one the time

/** The next of 1, 2, 5, 10, ... that is not below `value`. */
function ceiling(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((step) => step * power).find((top) => top >= value * 0.999);
}

function draw(parent, tag, attributes = {}, text = "") {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.textContent = text;
  parent.append(node);
  return node;
}

export class Chart {
  /**
   * `name` is a member of the points that `show` gets, a number or null. `format` turns a number into text, and `mark`
   * a round one on the scale, which goes up to `least` or higher. With `joins` the line runs on over nulls, which suits
   * what comes now and then.
   */
  constructor(figure, name, format, mark, windowS, { least = 1, joins = false } = {}) {
    Object.assign(this, { name, format, mark, windowS, least, joins, points: [], now: 0 });
    this.output = figure.querySelector("output");
    this.svg = draw(figure, "svg", { height: HEIGHT, role: "img" });
    this.scale = [0, 1, 2].map((step) => ({ line: draw(this.svg, "path", { class: "grid" }), step }));
    this.labels = [1, 2].map((step) => ({ text: draw(this.svg, "text", { "text-anchor": "end" }), step }));
    this.area = joins ? null : draw(this.svg, "path", { class: "area" });
    this.line = draw(this.svg, "path", { class: "trace" });
    this.cursor = draw(this.svg, "path", { class: "cursor" });
    draw(this.svg, "text", { y: HEIGHT - 2 }, `${Math.round(windowS / 60)} min ago`);
    this.end = draw(this.svg, "text", { y: HEIGHT - 2, "text-anchor": "end" }, "now");
    this.svg.addEventListener("pointermove", (event) => this.point(event.clientX - this.svg.getBoundingClientRect().left));
    this.svg.addEventListener("pointerleave", () => this.point(null));
    new ResizeObserver(() => this.paint()).observe(this.svg);
  }

  /** `points` are `{at, ...}` in order of time, in seconds; `summary` is what is said of them. */
  show(points, now, summary) {
    Object.assign(this, { points: points.filter(({ at }) => now - at <= this.windowS), now, summary });
    this.paint();
  }

  paint() {
    const { width } = this.svg.getBoundingClientRect();
    if (!width) return; // not on the screen
    this.right = width - PLOT.right;
    this.top = ceiling(Math.max(this.least, ...this.points.map((point) => point[this.name] ?? 0)));
    for (const { line, step } of this.scale) line.setAttribute("d", `M0 ${this.y((this.top * step) / 2)}H${this.right}`);
    for (const { text, step } of this.labels) {
      text.setAttribute("x", width);
      text.setAttribute("y", this.y((this.top * step) / 2) + 4);
      text.textContent = this.mark((this.top * step) / 2);
    }
    this.end.setAttribute("x", this.right);
    this.line.setAttribute("d", this.path());
    this.area?.setAttribute("d", this.path(true));
    this.point(this.pointer ?? null);
    this.svg.setAttribute("aria-label", this.summary ?? "");
  }

  x(at) {
    return Math.round(this.right * (1 - (this.now - at) / this.windowS) * 10) / 10;
  }

  y(value) {
    return Math.round((PLOT.bottom - (PLOT.bottom - PLOT.top) * (value / this.top)) * 10) / 10;
  }

  /** Each run of numbers as a line; a single one is a line of no length, which round ends make a dot. */
  path(isFilled = false) {
    const runs = [[]];
    for (const { at, [this.name]: value } of this.points) {
      if (value !== null) runs.at(-1).push(`${this.x(at)} ${this.y(value)}`);
      else if (!this.joins && runs.at(-1).length) runs.push([]);
    }
    const drawn = runs.filter((run) => run.length);
    if (!isFilled) return drawn.map((run) => `M${run.join("L")}h0`).join("");
    const foot = (place) => `${place.split(" ")[0]} ${PLOT.bottom}`;
    return drawn.map((run) => `M${foot(run[0])}L${run.join("L")}L${foot(run.at(-1))}Z`).join("");
  }

  /** Tell the value under the pointer, and without one the summary. */
  point(x) {
    this.pointer = x;
    const at = this.now - this.windowS * (1 - x / this.right);
    const seen = x === null ? [] : this.points.filter((point) => point[this.name] !== null);
    const near = (a, b) => (Math.abs(a.at - at) < Math.abs(b.at - at) ? a : b);
    const point = seen.length ? seen.reduce(near) : null;
    this.cursor.setAttribute("d", point ? `M${this.x(point.at)} ${PLOT.top}V${PLOT.bottom}` : "");
    const told = point && `${Math.round(this.now - point.at)} s ago: ${this.format(point[this.name])}`;
    this.output.textContent = told ?? this.summary ?? "";
  }
}
