// A box above the tables of a long page of the reference that shows only the rows, and the sections, with the typed words.
// Such a page has the mark of .ci/mkdocs_hooks.py; other pages are read, not looked up.
(function () {
  const LONG = 40; // rows, in all tables of a page

  function setUp() {
    const article = document.querySelector("article");
    if (article === null || article.querySelector("[data-reference]") === null) return;
    if (article.querySelector(".filter") !== null) return;
    const rows = Array.from(article.querySelectorAll("table tbody tr"));
    if (rows.length < LONG) return;

    const box = document.createElement("input");
    box.type = "search";
    box.className = "filter";
    box.placeholder = "Filter the " + rows.length + " rows of this page";
    box.setAttribute("aria-label", box.placeholder);
    article.querySelector("h1").insertAdjacentElement("afterend", box);

    const texts = rows.map((row) => row.textContent.toLowerCase());
    box.addEventListener("input", () => show(article, rows, texts, box.value.toLowerCase().split(/\s+/)));
  }

  function show(article, rows, texts, words) {
    rows.forEach((row, index) => {
      row.hidden = !words.every((word) => texts[index].includes(word));
    });
    // A table without rows goes, and so does a heading below h2 that only such tables follow.
    const isFiltering = words.some((word) => word !== "");
    let heading = null;
    let hasRows = false;
    const close = () => {
      if (heading !== null) heading.hidden = isFiltering && !hasRows;
    };
    for (const each of article.children) {
      if (/^H[2-4]$/.test(each.tagName)) {
        close();
        heading = each.tagName === "H2" ? null : each;
        hasRows = false;
      } else if (each.querySelector("table") !== null || each.tagName === "TABLE") {
        const isShown = each.querySelector("tbody tr:not([hidden])") !== null;
        each.hidden = !isShown;
        hasRows = hasRows || isShown;
      }
    }
    close();
  }

  document.addEventListener("DOMContentLoaded", setUp);
  if (document.readyState !== "loading") setUp();
})();
