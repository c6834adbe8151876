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
// A table of what the slider is at: its rows are made from data that came deflated.
const steppedTables = [...document.querySelectorAll("table[data-stepped]")].map((table) => ({
  table,
  rows: inflateText(textOf(table.id + "-rows")).then(JSON.parse),
}));
async function fillTables(index) {
  for (const { table, rows } of steppedTables) {
    const { classes, frames, cells } = await rows;
    const made = cells.slice(...frames[index]).map((row) => {
      const line = document.createElement("tr");
      row.forEach(([shown, value], column) => {
        const cell = line.insertCell();
        cell.textContent = shown;
        cell.dataset.value = value;
        if (classes[column]) cell.className = classes[column];
      });
      return line;
    });
    table.tBodies[0].replaceChildren(...made);
    sortRows(table);
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
