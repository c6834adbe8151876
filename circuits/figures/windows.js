// What a figure is in a window that is narrower than the one it was made for.
// Numbers in cells that are too narrow for them would run into each other; they are in the hover text as well.
const withRoom = (traces, width) =>
  traces.map((trace) =>
    trace.meta?.roomFrom > width
      ? { ...trace, ...(trace.mode === "text" ? { visible: false } : { texttemplate: "" }) }
      : trace,
  );
// One panel whose cells keep their shape would leave a gap below itself.
function heightAt(width, widest, height, layout, usual) {
  if (!layout.yaxis?.scaleanchor || layout.yaxis2 || !(width < widest)) return height;
  const { l, r, t, b } = { ...usual, ...layout.margin };
  return Math.round(t + b + ((height - t - b) * (width - l - r)) / (widest - l - r));
}
// Left of the entries the title of a legend leaves them no width; above them it has all, and smaller letters where it is long.
function legendAt(width, legend) {
  const { text } = legend?.title ?? {};
  if (!text || width >= 560) return legend;
  const size = Math.min(13, (width - 80) / text.length / 0.55);
  return { ...legend, title: { ...legend.title, side: "top", font: { ...legend.title.font, size } } };
}
