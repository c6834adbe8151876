"use strict";
const textOf = (id) => document.getElementById(id)?.textContent;
// What reporting/packing.py deflated.
async function inflate(text) {
  const characters = atob(text);
  const packed = new Uint8Array(characters.length);
  for (let at = 0; at < packed.length; at++) packed[at] = characters.charCodeAt(at);
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}
const inflateText = async (text) => new TextDecoder().decode(await inflate(text));
// A table that is wider than its page becomes a list: each row a block, each cell behind the name of its column.
function fit(table) {
  const names = [...table.tHead.rows[0].cells].map((header) => header.innerText.trim());
  table.classList.remove("stacked");
  if (table.scrollWidth <= table.parentElement.clientWidth + 1) return;
  for (const row of table.tBodies[0].rows)
    for (const [at, cell] of [...row.cells].entries()) cell.dataset.label = names[at];
  table.classList.add("stacked");
}
const widths = new ResizeObserver((changed) => changed.forEach(({ target }) => fit(target.querySelector("table"))));
for (const region of document.querySelectorAll(".scroll:has(> table)")) widths.observe(region);
// Tables: a click on a header sorts, numbers as numbers and blanks last; the button saves the data behind the table.
function sortRows(table) {
  const headers = [...table.tHead.rows[0].cells];
  const index = headers.findIndex((header) => header.hasAttribute("aria-sort"));
  if (index < 0) return;
  const descending = headers[index].getAttribute("aria-sort") === "descending";
  const value = (row) => row.cells[index].dataset.value;
  const rows = [...table.tBodies[0].rows].sort((a, b) => {
    const [x, y] = [value(a), value(b)];
    if (x === "" || y === "") return (x === "") - (y === "");
    const numeric = !Number.isNaN(Number(x)) && !Number.isNaN(Number(y));
    const order = numeric ? Number(x) - Number(y) : x.localeCompare(y);
    return descending ? -order : order;
  });
  table.tBodies[0].append(...rows);
}
for (const table of document.querySelectorAll("table")) {
  for (const header of table.tHead.rows[0].cells) {
    header.querySelector("button").addEventListener("click", () => {
      const descending = header.getAttribute("aria-sort") === "ascending";
      for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
      header.setAttribute("aria-sort", descending ? "descending" : "ascending");
      sortRows(table);
    });
  }
}
// As sections.py breaks names: behind their marks, and an interval or a number never.
function* breakable(text) {
  for (const [index, part] of text.split(/(\[[^\]]*\]|[-+]?\d[\d.]*e[-+]\d+)/).entries()) {
    if (index % 2) {
      const whole = document.createElement("span");
      whole.className = "whole";
      whole.textContent = part;
      yield whole;
    } else {
      for (const [at, name] of part.split(/(?<=[/:_=])(?=\S)|(?<=\w\()(?=\S)|(?<=\D,)(?=\S)/).entries()) {
        if (at) yield document.createElement("wbr");
        yield name;
      }
    }
  }
}
// A table of what its slider is at: its rows are made from data that came deflated.
const steppedTables = [...document.querySelectorAll("table[data-stepped]")].map((table) => ({
  table,
  rows: inflateText(textOf(table.id + "-rows")).then(JSON.parse),
}));
async function fillTables(control, index) {
  for (const { table, rows } of steppedTables) {
    if (table.dataset.stepped !== control) continue;
    const { classes, frames, cells } = await rows;
    const made = cells.slice(...frames[index]).map((row) => {
      const line = document.createElement("tr");
      row.forEach(([shown, value], column) => {
        const cell = line.insertCell();
        cell.append(...breakable(shown));
        cell.dataset.value = value;
        if (classes[column]) cell.className = classes[column];
      });
      return line;
    });
    table.tBodies[0].replaceChildren(...made);
    sortRows(table);
    fit(table);
  }
}
for (const button of document.querySelectorAll("button.download")) {
  button.addEventListener("click", async () => {
    const data = JSON.parse(textOf(button.dataset.table + "-data"));
    const csv = data.deflated ? await inflate(data.deflated) : data.csv;
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([csv], { type: "text/csv" }));
    link.download = data.name + ".csv";
    link.click();
    URL.revokeObjectURL(link.href);
  });
}
