// The slider: one step for everything on the page. A click in a curve moves it to the nearest step.
const stepper = document.querySelector(".stepper");
if (stepper) {
  const range = stepper.querySelector("input");
  const labels = JSON.parse(textOf(range.id + "-labels"));
  const jumps = [...stepper.querySelectorAll("button[data-index]")];
  const show = (index) => {
    step = index;
    range.value = index;
    range.setAttribute("aria-valuetext", labels[index]);
    stepper.querySelector("output").textContent = labels[index];
    for (const jump of jumps) jump.setAttribute("aria-pressed", Number(jump.dataset.index) === index);
    fillTables(index);
    redraw(figures.filter((figure) => figure.steps));
  };
  range.addEventListener("input", () => show(Number(range.value)));
  for (const jump of jumps) jump.addEventListener("click", () => show(Number(jump.dataset.index)));
  for (const figure of figures) {
    const picks = JSON.parse(figure.plot.dataset.picks ?? "null");
    if (!picks) continue;
    figure.firstDrawn = () =>
      figure.plot.on("plotly_click", ({ points }) => {
        const away = picks.map((picked) => Math.abs(picked - points[0].x));
        show(away.indexOf(Math.min(...away)));
      });
  }
  show(step);
}
