"use strict";
// Scenes: figures that plotly draws when they come near, in the page's colors, with the switches beside them.

const scenes = new Map(); // element to what it shows
const BLACK = /"(rgba\(0,0,0,1\)|#000000|rgb\(0,0,0\))"/g; // of ink, which is light where the page is dark
let onPaper = false;

function color(name) {
  return onPaper ? "#000000" : getComputedStyle(root).getPropertyValue(name).trim();
}

function inked(part) {
  return JSON.parse(JSON.stringify(part).replace(BLACK, JSON.stringify(color("--ink"))));
}

function axisColors() {
  return { color: color("--ink"), linecolor: color("--soft"), gridcolor: color("--line"), zerolinecolor: color("--soft") };
}

// The layout of a scene in the page's colors and width; its height stays.
function dressed(layout) {
  const made = inked(layout);
  delete made.width;
  Object.assign(made, { autosize: true, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)" });
  made.font = { ...made.font, color: color("--ink"), family: "system-ui, sans-serif" };
  made.margin = { l: 60, r: 20, t: 30, b: 50, ...made.margin };
  made.legend = { ...made.legend, bgcolor: "rgba(0,0,0,0)" };
  const solid = onPaper ? "#ffffff" : color("--paper");
  made.hoverlabel = { ...made.hoverlabel, bgcolor: solid, font: { color: color("--ink") }, bordercolor: color("--soft") };
  for (const key of Object.keys(made)) {
    if (/^[xy]axis\d*$/.test(key)) made[key] = { ...made[key], ...axisColors() };
    if (/^scene\d*$/.test(key))
      for (const axis of ["xaxis", "yaxis", "zaxis"])
        made[key][axis] = { ...made[key][axis], ...axisColors(), backgroundcolor: "rgba(0,0,0,0)" };
  }
  return made;
}

function chosen(figure) {
  const form = figure.querySelector(".controls");
  if (!form) return null;
  return [...form.children].map((one) => (one.querySelector("input:checked") ?? one.querySelector("select")).value).join("|");
}

function drawScene(element) {
  const { found, figure } = scenes.get(element);
  const shown = found.variants?.[chosen(figure)] ?? found;
  const smallest = Math.min(shown.layout.width ?? 0, 680); // what is narrower scrolls in its frame
  element.style.minWidth = `${smallest}px`;
  element.style.minHeight = `${shown.layout.height ?? 420}px`;
  const data = inked(shown.data), layout = dressed(shown.layout);
  const camera = element.layout?.scene?.camera;
  if (camera && layout.scene) layout.scene = { ...layout.scene, camera };
  Plotly.react(element, data, layout, { responsive: true, displaylogo: false });
  scenes.get(element).drawn = true;
}

function redrawScenes() {
  for (const [element, { drawn }] of scenes) if (drawn) drawScene(element);
}

// A scene with its lists, which it tells once, in their places.
function whole(part, lists) {
  if (part === null || typeof part !== "object") return part;
  if (Array.isArray(part)) return part.map((one) => whole(one, lists));
  if (Number.isInteger(part.list)) return lists[part.list];
  return Object.fromEntries(Object.entries(part).map(([key, one]) => [key, whole(one, lists)]));
}

function startScenes() {
  const seen = new IntersectionObserver((entries) => {
    for (const { isIntersecting, target } of entries)
      if (isIntersecting) { seen.unobserve(target); drawScene(target); }
  }, { rootMargin: "500px" });
  for (const element of document.querySelectorAll(".scene")) {
    const source = element.querySelector("script"), figure = element.closest("figure");
    const { lists = [], ...scene } = JSON.parse(source.textContent);
    scenes.set(element, { found: whole(scene, lists), figure, drawn: false });
    source.remove();
    figure.querySelector(".controls")?.addEventListener("change", () => drawScene(element));
    seen.observe(element);
  }
}

// On paper, scenes that have no still are drawn in black.
function startPaper() {
  addEventListener("beforeprint", () => {
    onPaper = true;
    for (const element of scenes.keys()) if (!element.closest(".printed")) drawScene(element);
  });
  addEventListener("afterprint", () => { onPaper = false; redrawScenes(); });
}

document.addEventListener("themechange", redrawScenes);
startScenes();
startPaper();
