"use strict";
// Tables: a click on a header sorts, numbers as numbers and blanks last; the button saves the data behind the table.
for (const table of document.querySelectorAll("table")) {
  const body = table.tBodies[0];
  [...table.tHead.rows[0].cells].forEach((header, index) => {
    header.querySelector("button").addEventListener("click", () => {
      const descending = header.getAttribute("aria-sort") === "ascending";
      for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
      header.setAttribute("aria-sort", descending ? "descending" : "ascending");
      const value = (row) => row.cells[index].dataset.value;
      const rows = [...body.rows].sort((a, b) => {
        const [x, y] = [value(a), value(b)];
        if (x === "" || y === "") return (x === "") - (y === "");
        const numeric = !Number.isNaN(Number(x)) && !Number.isNaN(Number(y));
        const order = numeric ? Number(x) - Number(y) : x.localeCompare(y);
        return descending ? -order : order;
      });
      body.append(...rows);
    });
  });
}
for (const button of document.querySelectorAll("button.download")) {
  button.addEventListener("click", () => {
    const data = JSON.parse(document.getElementById(button.dataset.table + "-data").textContent);
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([data.csv], { type: "text/csv" }));
    link.download = data.name + ".csv";
    link.click();
    URL.revokeObjectURL(link.href);
  });
}
// Figures: drawn once in the reader's colour scheme, and again whenever it changes.
const plots = [...document.querySelectorAll(".plot")];
if (plots.length) {
  const templates = JSON.parse(document.getElementById("plot-templates").textContent);
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const sources = plots.map((plot) => document.getElementById(plot.id + "-data").textContent);
  const [light, dim] = [templates.light.layout.colorway, templates.dark.layout.colorway];
  const shade = (source) => light.reduce((text, colour, i) => text.replaceAll(`"${colour}"`, `"${dim[i]}"`), source);
  // The button that uploads a chart could never work here: nothing leaves the page.
  const OPTIONS = { responsive: true, displaylogo: false, modeBarButtonsToRemove: ["sendChartToCloud"] };
  const draw = () => plots.forEach((plot, index) => {
    const { data, layout } = JSON.parse(dark.matches ? shade(sources[index]) : sources[index]);
    // What a trace says of itself in the dark: text on a colour of the scale, which is another one there.
    const traces = data.map((trace) => (dark.matches ? { ...trace, ...trace.meta?.dark } : trace));
    const themed = { ...layout, template: templates[dark.matches ? "dark" : "light"] };
    Plotly.react(plot, traces, themed, OPTIONS);
  });
  draw();
  dark.addEventListener("change", draw);
}
