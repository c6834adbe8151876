// Controls: sliders and buttons move what follows them. A click in a curve moves its slider to the nearest step.
for (const control of controls) {
  const { element, name, labels } = control;
  const range = element.querySelector("input");
  const output = element.querySelector("output");
  const jumps = [...element.querySelectorAll("button[data-index]")];
  control.show = (index) => {
    control.index = index;
    if (range) {
      range.value = index;
      range.setAttribute("aria-valuetext", labels[index]);
    }
    if (output) output.textContent = labels[index];
    for (const jump of jumps) jump.setAttribute("aria-pressed", Number(jump.dataset.index) === index);
    fillTables(name, index);
    redraw(figures.filter((figure) => figure.follows.includes(name)));
  };
  range?.addEventListener("input", () => control.show(Number(range.value)));
  for (const jump of jumps) jump.addEventListener("click", () => control.show(Number(jump.dataset.index)));
  const onward = element.querySelector("button[data-onward]");
  onward?.addEventListener("click", () => control.show((control.index + 1) % labels.length));
}
for (const figure of figures) {
  const picks = JSON.parse(figure.plot.dataset.picks ?? "null");
  if (!picks) continue;
  figure.firstDrawn = () =>
    figure.plot.on("plotly_click", ({ points }) => {
      const away = picks.map((picked) => Math.abs(picked - points[0].x));
      controlled(figure.follows[0]).show(away.indexOf(Math.min(...away)));
    });
}
for (const control of controls) control.show(control.index);
