// The readout of a chart follows the pointer, or the arrow keys, Home and End while the chart has the focus.
for (const figure of document.querySelectorAll("figure.chart")) {
  const { x: [low, high, left, right], series } = JSON.parse(figure.dataset.chart);
  const svg = figure.querySelector("svg");
  const cursor = svg.querySelector(".cursor");
  const readout = figure.querySelector(".readout");
  const at = figure.querySelector(".at");
  const values = figure.querySelectorAll(".legend b");
  const last = [at.textContent, ...Array.from(values, (value) => value.textContent)];
  const steps = [...new Set(series.flatMap((points) => points.map(([step]) => step)))].sort((a, b) => a - b);
  const byStep = series.map((points) => new Map(points));
  let chosen = -1;

  function show(index) {
    chosen = Math.max(0, Math.min(steps.length - 1, index));
    const step = steps[chosen];
    const place = high > low ? left + ((right - left) * (step - low)) / (high - low) : (left + right) / 2;
    cursor.setAttribute("x1", place);
    cursor.setAttribute("x2", place);
    at.textContent = `step ${step.toLocaleString("en")}`;
    values.forEach((value, i) => {
      value.textContent = byStep[i].has(step) ? byStep[i].get(step) ?? "unknown" : "-";
    });
  }

  function hide() {
    chosen = -1;
    cursor.setAttribute("x1", -9);
    cursor.setAttribute("x2", -9);
    [at, ...values].forEach((element, i) => { element.textContent = last[i]; });
  }

  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect();
    const place = ((event.clientX - box.left) / box.width) * svg.viewBox.baseVal.width;
    const wanted = low + ((place - left) / (right - left)) * (high - low);
    let nearest = 0;
    steps.forEach((step, i) => {
      if (Math.abs(step - wanted) < Math.abs(steps[nearest] - wanted)) nearest = i;
    });
    show(nearest);
  });
  svg.addEventListener("pointerleave", hide);
  figure.addEventListener("blur", () => { readout.removeAttribute("aria-live"); hide(); });
  figure.addEventListener("keydown", (event) => {
    const here = chosen < 0 ? steps.length : chosen;
    const target = { ArrowLeft: here - 1, ArrowRight: chosen < 0 ? 0 : here + 1, Home: 0, End: steps.length - 1 }[event.key];
    if (target === undefined || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    readout.setAttribute("aria-live", "polite");
    show(target);
  });
}
