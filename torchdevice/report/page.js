"use strict";
(() => {
  const table = document.querySelector("table.rows");
  if (!table) return;
  const body = table.tBodies[0];
  const rows = [...body.rows];
  const search = document.querySelector("input[type=search]");
  const boxes = [...document.querySelectorAll(".filters input[type=checkbox]")];

  const more = document.querySelector("button.more");
  let shown = 1000;

  const show = () => {
    let found = 0;
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const wanted = new Set(boxes.filter((box) => box.checked).map((box) => box.value));
    for (const row of rows) {
      const text = row.textContent.toLowerCase();
      const fits = wanted.has(row.dataset.group) && words.every((word) => text.includes(word));
      row.hidden = !fits || ++found > shown;
    }
    more.hidden = found <= shown;
    more.textContent = `show ${Math.min(1000, found - shown)} of ${found - shown} more rows`;
  };
  const restart = () => {
    shown = 1000;
    show();
  };
  search.addEventListener("input", restart);
  for (const box of boxes) box.addEventListener("change", restart);
  more.addEventListener("click", () => {
    shown += 1000;
    show();
  });
  show();

  const compare = (a, b) => (isNaN(a) || isNaN(b) ? a.localeCompare(b, undefined, { numeric: true }) : a - b);
  for (const head of table.tHead.rows[0].cells) {
    head.querySelector("button").addEventListener("click", () => {
      const descending = head.getAttribute("aria-sort") === "descending";
      for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", descending ? "ascending" : "descending");
      const value = (row) => row.cells[head.cellIndex].dataset.value;
      rows.sort((a, b) => compare(value(a), value(b)) * (descending ? 1 : -1));
      body.append(...rows);
      restart();
    });
  }
})();
