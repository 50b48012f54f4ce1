// A box at the top of a long page of the reference: it shows only the rows of tables, or the sections, with the typed words.
// Such a page has the mark of .ci/mkdocs_hooks.py; other pages are read, not looked up.
(function () {
  const LONG = 40; // rows, in all tables of a page
  const MANY = 15; // sections of a page that has fewer rows

  function setUp() {
    const article = document.querySelector("article");
    if (article === null || article.querySelector("[data-reference]") === null) return;
    if (article.querySelector(".filter") !== null) return;
    const rows = Array.from(article.querySelectorAll("table tbody tr"));
    const sections = sectionsOf(article);
    if (rows.length >= LONG) {
      const texts = textsOf(rows.map((row) => [row]));
      addBox(article, rows.length + " rows", (words) => show(article, rows, texts, words));
    } else if (sections.length >= MANY) {
      const texts = textsOf(sections);
      addBox(article, sections.length + " sections", (words) => {
        sections.forEach((section, index) => {
          for (const each of section) each.hidden = !words.every((word) => texts[index].includes(word));
        });
      });
    }
  }

  function addBox(article, what, show) {
    const box = document.createElement("input");
    box.type = "search";
    box.className = "filter";
    box.placeholder = "Filter the " + what + " of this page";
    box.setAttribute("aria-label", box.placeholder);
    article.querySelector("h1").insertAdjacentElement("afterend", box);
    box.addEventListener("input", () => show(box.value.toLowerCase().split(/\s+/)));
  }

  function textsOf(entries) {
    return entries.map((entry) => entry.map((each) => each.textContent).join(" ").toLowerCase());
  }

  // Each section is its heading with what follows, or an object of the Python API with its members.
  function sectionsOf(article) {
    const objects = Array.from(article.querySelectorAll(".doc-object"));
    if (objects.length > 0) return objects.map((each) => [each]);
    const level = article.querySelector(":scope > h3") === null ? "H2" : "H3";
    const sections = [];
    let section = null;
    for (const each of article.children) {
      if (each.tagName === level) {
        section = [each];
        sections.push(section);
      } else if (/^H[12]$/.test(each.tagName)) {
        section = null;
      } else if (section !== null) {
        section.push(each);
      }
    }
    return sections;
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
