"use strict";
// Theme, navigation, tables, filters, edges and printing. The page reads without any of it.

// ---------------------------------------------------------------- theme
const root = document.documentElement;
const wantsDark = matchMedia("(prefers-color-scheme: dark)");
const THEME = "curvescope-theme";

function remembered() {
  try { return localStorage.getItem(THEME); } catch { return null; } // file:// may refuse
}

function remember(theme) {
  try { localStorage.setItem(THEME, theme); } catch { /* until the page is closed */ }
}

function isDark() {
  return root.dataset.theme ? root.dataset.theme === "dark" : wantsDark.matches;
}

function themeChanged() {
  document.getElementById("theme").setAttribute("aria-pressed", String(isDark()));
  document.dispatchEvent(new Event("themechange"));
}

function startTheme() {
  const theme = remembered();
  if (theme === "dark" || theme === "light") root.dataset.theme = theme;
  document.getElementById("theme").addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    remember(root.dataset.theme);
    themeChanged();
  });
  wantsDark.addEventListener("change", themeChanged);
  document.getElementById("theme").setAttribute("aria-pressed", String(isDark()));
}

// ---------------------------------------------------------------- navigation
function startNavigation() {
  const nav = document.querySelector("nav.side"), menu = document.getElementById("menu");
  const open = (yes) => {
    nav.classList.toggle("open", yes);
    menu.setAttribute("aria-expanded", String(yes));
  };
  menu.addEventListener("click", () => open(!nav.classList.contains("open")));
  nav.addEventListener("click", (event) => { if (event.target.closest("a")) open(false); });
  nav.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && nav.classList.contains("open")) { open(false); menu.focus(); }
  });
  const links = [...nav.querySelectorAll("a")];
  const sections = links.map((link) => document.getElementById(link.hash.slice(1)));
  const mark = () => {
    const atEnd = innerHeight + scrollY >= root.scrollHeight - 4;
    let now = sections.findLastIndex((section) => section.getBoundingClientRect().top < innerHeight / 3);
    if (atEnd && scrollY > 0) now = sections.length - 1;
    links.forEach((link, i) => {
      if (i === Math.max(now, 0)) link.setAttribute("aria-current", "location");
      else link.removeAttribute("aria-current");
    });
  };
  let asked = false;
  addEventListener("scroll", () => {
    if (!asked) requestAnimationFrame(() => { asked = false; mark(); });
    asked = true;
  }, { passive: true });
  mark();
}

// A link to something inside a folded part opens it.
function startFolds() {
  const reveal = () => {
    const target = location.hash && document.getElementById(decodeURIComponent(location.hash.slice(1)));
    for (let fold = target && target.closest("details"); fold; fold = fold.parentElement.closest("details")) fold.open = true;
  };
  addEventListener("hashchange", reveal);
  reveal();
}

// ---------------------------------------------------------------- tables
function keyOf(cell) {
  const text = cell.dataset.sort ?? cell.textContent;
  if (cell.classList.contains("number")) {
    const value = text === "inf" ? Infinity : text === "-inf" ? -Infinity : Number(text.replaceAll(",", ""));
    return Number.isNaN(value) ? null : value;
  }
  return text === "" || text === "–" ? null : text;
}

function compare(a, b) {
  if (typeof a === typeof b) return typeof a === "number" ? a - b : a.localeCompare(b, "en", { numeric: true });
  return typeof a === "number" ? -1 : 1;
}

// What has no value comes last, either way.
function sortBy(th) {
  const table = th.closest("table"), up = th.getAttribute("aria-sort") !== "ascending";
  for (const other of table.querySelectorAll("th")) other.setAttribute("aria-sort", "none");
  th.setAttribute("aria-sort", up ? "ascending" : "descending");
  const rows = [...table.tBodies[0].rows].map((row) => [keyOf(row.cells[th.cellIndex]), row]);
  rows.sort(([a], [b]) => a === null || b === null ? (a === null) - (b === null) : (up ? 1 : -1) * compare(a, b));
  table.tBodies[0].append(...rows.map(([, row]) => row));
}

function startTables() {
  for (const th of document.querySelectorAll("th"))
    th.querySelector("button")?.addEventListener("click", () => sortBy(th));
  for (const group of document.querySelectorAll(".filter")) {
    const rows = [...document.getElementById(group.dataset.table).querySelectorAll("tbody tr")];
    group.addEventListener("click", (event) => {
      const pressed = event.target.closest("button");
      if (!pressed) return;
      for (const button of group.querySelectorAll("button")) button.setAttribute("aria-pressed", String(button === pressed));
      const level = pressed.dataset.level;
      for (const row of rows) row.hidden = level !== "" && row.dataset.level !== level;
      group.querySelector("[role=status]").textContent = `${rows.filter((row) => !row.hidden).length} of ${rows.length} claims shown`;
    });
  }
}

// What is wider than its box fades at the right, until it is scrolled to its end.
function startEdges() {
  const mark = (box) => box.classList.toggle("cut", box.scrollLeft + box.clientWidth < box.scrollWidth - 4);
  const resized = new ResizeObserver((entries) => {
    for (const { target } of entries) mark(target.matches(".scroll, .still, .frame") ? target : target.parentElement);
  });
  for (const box of document.querySelectorAll(".scroll, .still, .frame")) {
    box.addEventListener("scroll", () => mark(box), { passive: true });
    resized.observe(box);
    if (box.firstElementChild) resized.observe(box.firstElementChild);
  }
}

// ---------------------------------------------------------------- printing
// Everything is unfolded.
function startPrinting() {
  let folded = [];
  addEventListener("beforeprint", () => {
    folded = [...document.querySelectorAll("details:not([open])")];
    for (const fold of folded) fold.open = true;
  });
  addEventListener("afterprint", () => { for (const fold of folded) fold.open = false; });
}

startTheme();
startNavigation();
startFolds();
startTables();
startEdges();
startPrinting();
