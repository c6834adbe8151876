// Draws the figure of a saved page anew when the window's width changes.
{
  const plot = document.getElementById("{plot_id}");
  const { data, layout } = plot;
  const { height } = layout;
  const fit = () => {
    const width = plot.clientWidth;
    const widest = parseFloat(getComputedStyle(plot.parentElement).maxWidth);
    const higher = heightAt(width, widest, height, layout, layout.template?.layout?.margin);
    plot.style.height = `${higher}px`;
    const legend = legendAt(width, layout.legend);
    return Plotly.react(plot, withRoom(data, width), { ...layout, width, height: higher, legend, uirevision: "kept" });
  };
  window.addEventListener("resize", fit);
  fit();
}
