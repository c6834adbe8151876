// Figures: drawn in the reader's colour scheme, and again when it changes; those that step, also when the slider moves.
const templates = JSON.parse(textOf("plot-templates") ?? "null");
const dark = window.matchMedia("(prefers-color-scheme: dark)");
let step = Number(document.querySelector(".stepper input")?.value ?? 0);

// Packed numbers [frame ...]: first the low bytes of all, then the high bytes; the last level stands for NaN.
async function unpacked({ shape, low, unit, levels, data }) {
  const bytes = await inflate(data);
  const half = bytes.length / 2;
  const [frames, rows, columns] = shape;
  const number = (at) => {
    const level = bytes[at] + 256 * bytes[at + half];
    return level > levels ? NaN : low + unit * level;
  };
  return (frame) =>
    Array.from({ length: rows }, (_, row) => {
      const start = (frame * rows + row) * columns;
      return Float64Array.from({ length: columns }, (_, column) => number(start + column));
    });
}
async function prepared(moves) {
  if (!moves) return null;
  const made = await Promise.all(
    Object.entries(moves.paths).map(async ([path, values]) => [
      path.split("."),
      Array.isArray(values) ? (frame) => values[frame] : await unpacked(values),
    ]),
  );
  return { at: moves.at, made };
}
const figures = [...document.querySelectorAll(".plot")].map((plot) => ({
  plot,
  source: textOf(plot.id + "-data"),
  steps: document.getElementById(plot.id + "-moves") !== null,
}));
for (const shown of figures) {
  const moves = JSON.parse(textOf(shown.plot.id + "-moves") ?? "null");
  shown.ready = prepared(moves).then((moving) => Object.assign(shown, { moving }));
}
// Plotly takes longer to start than all the rest: words and tables are there before it.
const started = inflateText(textOf("plotly")).then((code) => {
  const script = document.createElement("script");
  script.textContent = code;
  document.head.append(script);
});
function put(figure, path, value) {
  const last = path.at(-1);
  path.slice(0, -1).reduce((part, key) => part[key], figure)[last] = value;
}
const shade = (source) =>
  templates.light.layout.colorway.reduce(
    (text, colour, i) => text.replaceAll(`"${colour}"`, `"${templates.dark.layout.colorway[i]}"`),
    source,
  );
// The button that uploads a chart could never work here: nothing leaves the page.
const OPTIONS = { responsive: true, displaylogo: false, modeBarButtonsToRemove: ["sendChartToCloud"] };
// Nothing waits in here: a page about to be printed has no time for that.
function draw(shown) {
  const { plot, source, moving } = shown;
  shown.dark = dark.matches;
  const figure = JSON.parse(shown.dark ? shade(source) : source);
  for (const [path, values] of moving?.made ?? []) put(figure, path, values(moving.at[step]));
  // What a trace says of itself in the dark: text on a colour of the scale, which is another one there.
  const traces = figure.data.map((trace) => (shown.dark ? { ...trace, ...trace.meta?.dark } : trace));
  // Numbers in cells that are too narrow for them would run into each other; they are in the hover text as well.
  for (const trace of traces) if (trace.meta?.roomFrom > plot.clientWidth) trace.texttemplate = "";
  const template = templates[shown.dark ? "dark" : "light"];
  // A zoom of the reader's outlives the next step.
  const drawn = Plotly.react(plot, traces, { uirevision: "kept", ...figure.layout, template }, OPTIONS);
  shown.firstDrawn?.();
  delete shown.firstDrawn;
  return drawn;
}
// One at a time, the nearest to what the reader sees first, and those out of sight when the browser has nothing else to
// do. `shown` says the step of all in sight, `drawn` that of all.
const stale = new Set();
let drawing = false;
const whenIdle = () =>
  new Promise((resume) => (window.requestIdleCallback ?? setTimeout)(resume, { timeout: 200 }));
function away({ plot }) {
  const { top, bottom } = plot.getBoundingClientRect();
  return Math.max(0, top - window.innerHeight, -bottom);
}
const nearest = () => [...stale].reduce((best, shown) => (away(shown) < away(best) ? shown : best));
const state = document.documentElement.dataset;
async function redraw(wanted) {
  for (const shown of wanted) stale.add(shown);
  delete state.shown;
  delete state.drawn;
  if (drawing) return;
  drawing = true;
  await started;
  while (stale.size) {
    if (away(nearest()) > 0) {
      state.shown = step;
      await whenIdle();
    }
    // It may have been printed meanwhile.
    if (!stale.size) break;
    const shown = nearest();
    stale.delete(shown);
    // What goes wrong in one figure is told, and stops no other.
    await shown.ready.then(draw).catch(console.error);
    await new Promise((resume) => setTimeout(resume));
    // Chromium does not tell of a change that was read before it was told.
    if (!stale.size) for (const late of figures) if (late.dark !== dark.matches) stale.add(late);
  }
  drawing = false;
  state.shown = state.drawn = step;
}
redraw(figures);
window.addEventListener("beforeprint", () => {
  const ready = [...stale].filter(({ moving }) => window.Plotly && moving !== undefined);
  for (const shown of ready) stale.delete(shown) && draw(shown);
});
dark.addEventListener("change", () => redraw(figures));
window.addEventListener("resize", () => redraw(figures));
