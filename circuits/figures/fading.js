// A click on a node of a circuit fades all edges but its own; a second click shows all again.
function fadeOnClick(plot) {
  const { shown, faded } = plot.layout.meta.fading;
  // An edge that passes behind a node may be nearer to the pointer than its centre, and the click is said to be there.
  function nodeAt({ clientX, clientY }) {
    const { xaxis, yaxis } = plot._fullLayout;
    const { left, top } = plot.getBoundingClientRect();
    const { x, y, text, marker } = plot.data.find(({ name }) => name === "nodes");
    const away = (i) =>
      Math.hypot(
        left + xaxis._offset + xaxis.l2p(x[i]) - clientX,
        top + yaxis._offset + yaxis.l2p(y[i]) - clientY,
      );
    return text.find((_, i) => away(i) <= marker.size / 2);
  }
  plot.on("plotly_click", ({ event }) => {
    const node = nodeAt(event);
    if (node === undefined) return;
    const of = (wanted) => ({ meta }) => !meta?.ends ? 1 : wanted(meta.ends) ? shown : faded;
    const own = plot.data.map(of((ends) => ends.includes(node)));
    const again = plot.data.every(({ opacity }, i) => (opacity ?? 1) === own[i]);
    Plotly.restyle(plot, { opacity: again ? plot.data.map(of(() => true)) : own });
  });
}
