/* Draws the figures with Plotly, each when it comes near the window, in the colours of the reader's theme. */
(async () => {
  "use strict";
  const { figures, palette } = JSON.parse(document.getElementById("figures").textContent);
  const state = (window.report = { total: Object.keys(figures).length, drawn: 0, error: null });
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const coarse = matchMedia("(pointer: coarse)");

  /* Plotly travels gzipped: the page is less than half as large. */
  const packed = Uint8Array.from(atob(document.getElementById("plotly").textContent), (c) => c.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  const script = document.createElement("script");
  script.textContent = await new Response(stream).text();
  document.head.append(script);

  const recolour = (value, twins) => {
    if (typeof value === "string") return twins[value] ?? value;
    if (Array.isArray(value)) return value.map((item) => recolour(item, twins));
    if (value === null || typeof value !== "object") return value;
    return Object.fromEntries(Object.entries(value).map(([key, item]) => [key, recolour(item, twins)]));
  };

  const draw = async (place) => {
    const { data, layout, twins } = figures[place.dataset.figure];
    const plot = recolour({ data, layout }, dark.matches ? { ...palette, ...twins } : {});
    const style = getComputedStyle(document.documentElement);
    plot.layout.hoverlabel = {
      bgcolor: style.getPropertyValue("--card").trim(),
      bordercolor: style.getPropertyValue("--line").trim(),
      font: { color: style.getPropertyValue("--ink").trim() },
    };
    if (place.clientWidth < 480 && plot.layout.showlegend) {
      plot.layout.height += 24 * Math.max(0, Math.ceil(plot.data.length / 2) - 1); /* the legend takes more lines */
    }
    plot.layout.dragmode = coarse.matches ? false : "zoom"; /* a finger scrolls the page, a mouse zooms */
    await Plotly.react(place, plot.data, plot.layout, { responsive: true, displayModeBar: false });
    if (!place.dataset.drawn) state.drawn += 1;
    place.dataset.drawn = "yes";
  };

  const places = [...document.querySelectorAll("[data-figure]")];
  const near = new IntersectionObserver((entries) => {
    for (const entry of entries.filter((e) => e.isIntersecting)) {
      near.unobserve(entry.target);
      draw(entry.target).catch((error) => { state.error = String(error); throw error; });
    }
  }, { rootMargin: "800px 0px" });
  places.forEach((place) => near.observe(place));

  const redraw = () => places.filter((place) => place.dataset.drawn).forEach(draw);
  dark.addEventListener("change", redraw);
  window.addEventListener("beforeprint", () => places.forEach(draw));
})();
