// Figures: drawn in the reader's colour scheme, and again when it changes; those that step, also when the slider moves.
const templates = JSON.parse(textOf("plot-templates") ?? "null");
const dark = window.matchMedia("(prefers-color-scheme: dark)");
// What the reader has set: sliders and buttons, each with a name, in the order of the page.
const controls = [...document.querySelectorAll("[data-control]")].map((element) => ({
  element,
  name: element.dataset.control,
  labels: JSON.parse(textOf(element.dataset.labels)),
  index: Number(element.dataset.start),
}));
const controlled = (name) => controls.find((control) => control.name === name);
const setting = () => controls.map(({ index }) => index).join() || "0";
// Frames are in the order of the settings of the controls that a part follows, the last one's changing fastest.
const frameOf = ({ follows, at }) =>
  at[follows.map(controlled).reduce((flat, { labels, index }) => flat * labels.length + index, 0)];

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
  return { ...moves, made };
}
const figures = [...document.querySelectorAll(".plot")].map((plot) => ({
  plot,
  source: textOf(plot.id + "-data"),
  follows: [],
}));
for (const shown of figures) {
  const moves = JSON.parse(textOf(shown.plot.id + "-moves") ?? "null");
  shown.follows = moves?.follows ?? [];
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
// The button that uploads a chart could never work here: nothing leaves the page. Where no pointer hovers, Plotly would show
// the toolbar all the time, over what stands above the figure.
const OPTIONS = {
  responsive: true,
  displaylogo: false,
  displayModeBar: matchMedia("(hover: none)").matches ? false : "hover",
  modeBarButtonsToRemove: ["sendChartToCloud"],
};
// Nothing waits in here: a page about to be printed has no time for that.
function draw(shown) {
  const { plot, source, moving } = shown;
  shown.dark = dark.matches;
  const figure = JSON.parse(shown.dark ? shade(source) : source);
  const fades = figure.layout.meta?.fading;
  for (const [path, values] of moving?.made ?? []) put(figure, path, values(frameOf(moving)));
  // What a trace says of itself in the dark: text on a colour of the scale, which is another one there.
  const coloured = figure.data.map((trace) => (shown.dark ? { ...trace, ...trace.meta?.dark } : trace));
  const width = plot.clientWidth;
  const traces = withRoom(coloured, width);
  const template = templates[shown.dark ? "dark" : "light"];
  shown.height ??= parseFloat(plot.style.height);
  // Said to plotly as well, which looks at the element's own size only when the window changes.
  const widest = parseFloat(plot.style.maxWidth);
  const height = heightAt(width, widest, shown.height, figure.layout, templates.light.layout.margin);
  plot.style.height = `${height}px`;
  // A zoom of the reader's outlives the next step.
  const layout = { uirevision: "kept", ...figure.layout, height, template, legend: legendAt(width, figure.layout.legend) };
  const drawn = Plotly.react(plot, traces, layout, OPTIONS);
  if (fades && !shown.fades) fadeOnClick(plot);
  shown.fades = Boolean(fades);
  shown.firstDrawn?.();
  delete shown.firstDrawn;
  return drawn;
}
// One at a time, the nearest to what the reader sees first, and those out of sight when the browser has nothing else to
// do. `shown` says the setting of all in sight, `drawn` that of all.
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
      state.shown = setting();
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
  state.shown = state.drawn = setting();
}
redraw(figures);
window.addEventListener("beforeprint", () => {
  const ready = [...stale].filter(({ moving }) => window.Plotly && moving !== undefined);
  for (const shown of ready) stale.delete(shown) && draw(shown);
});
dark.addEventListener("change", () => redraw(figures));
window.addEventListener("resize", () => redraw(figures));
